"""Coverage τ: how an SAE that carries the first core at each τ reconstructs, through training (Appendix C)."""

from dataclasses import replace

from dmsae.config import Json
from dmsae.experiments.grid import Grid
from dmsae.experiments.lab import Lab, curves
from dmsae.sae.config import CoreMode


def run(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return, for each coverage, a row and the curves of training; the pool and all but the core are the same."""
    config = replace(lab.base, seed=seed)
    rows, through = [], {}
    for coverage in grid.coverages:
        at = replace(config, coverage=coverage)
        core = lab.first_core(at)
        chosen = lab.transfer_config(config, "tau", core_modes=(CoreMode.DENSE,))
        (result,) = lab.transfer(chosen, core)
        (row,) = lab.rows([result], at, [lab.held(core, config)])
        rows.append({**row, "sae": f"coverage-{coverage:g}", "coverage": coverage})
        through[f"{coverage:g}"] = curves(result)
    return {"rows": rows, "curves": through}
