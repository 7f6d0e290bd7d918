"""Does a random core decay while a distilled one stays in use? Activity of frozen rows through training.

The rows are those of the distilled core, or random ones in its place, at several norms and sparsities, since with unit
decoder rows the norm of a frozen row may decide what its direction is said to decide. Detectors cannot decay: their
activity is frozen, and stands beside the others for comparison.
"""

from dataclasses import replace

from dmsae.config import Json
from dmsae.cores.controls import RandomKind
from dmsae.experiments.grid import Grid, scaled
from dmsae.experiments.lab import Lab, curves
from dmsae.sae.config import CoreMode


def run(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return a row and the activity of the core through training for each source of rows, norm and k."""
    config = replace(lab.base, seed=seed)
    done, _ = lab.distill(config)
    core = done.distilled
    rows, through = [], {}
    ks = list(dict.fromkeys(scaled(config.k, factor) for factor in grid.random_k_factors))
    for k in ks:
        for norm in grid.norms if k == ks[0] else ("found",):
            kinds = (RandomKind.NORM_MATCHED, RandomKind.COVARIANCE_MATCHED)
            chosen = lab.transfer_config(config, "random-core", k=(k,), core_norm=norm, random_cores=kinds)
            modes = (CoreMode.DENSE, CoreMode.DETECTOR) if norm == "found" else (CoreMode.DENSE,)
            results = lab.transfer(replace(chosen, core_modes=modes), core)
            for result, row in zip(results, lab.rows(results, config), strict=True):
                name = f"{row['sae']}-norm-{norm}"
                rows.append({**row, "sae": name, "k": k, "norm": norm})
                through[name] = curves(result)
    return {"rows": rows, "curves": through, "n_core": len(core)}
