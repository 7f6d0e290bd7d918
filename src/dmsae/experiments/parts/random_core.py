"""Does a random core decay while a distilled one stays in use? Activity of frozen rows through training.

The rows are those of the distilled core, or random ones in its place, at several norms, sparsities and lengths of
training, since with unit decoder rows the norm of a frozen row may decide what its direction is said to decide.
Detectors cannot decay: their activity is frozen, and stands beside the others for comparison.
"""

from dataclasses import replace

from dmsae.config import Json
from dmsae.cores.controls import RandomKind
from dmsae.cores.core import Core
from dmsae.cores.norms import CoreNorm
from dmsae.distillation.config import DistillConfig
from dmsae.experiments.grid import Grid, scaled
from dmsae.experiments.lab import Lab, curves
from dmsae.sae.config import CoreMode
from dmsae.training.result import TrainResult


def run(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return a row and the activity of the core through training for each source of rows, norm, k and length."""
    config = replace(lab.base, seed=seed)
    core = lab.distill(config).distilled
    rows, through = [], {}
    for k, norm, tokens in _settings(config, grid):
        results = _trained(lab, config, core, k, norm, tokens)
        for result, row in zip(results, lab.rows(results, config), strict=True):
            name = f"{row['sae']}-norm-{norm}" + (f"-tokens-{tokens}" if tokens != config.train.tokens else "")
            rows.append({**row, "sae": name, "k": k, "norm": norm, "tokens": tokens})
            through[name] = curves(result)
    return {"rows": rows, "curves": through, "n_core": len(core)}


def _settings(config: DistillConfig, grid: Grid) -> list[tuple[int, CoreNorm, int]]:
    """Return k, norm of the rows and activations of each training: one of the three departs from the first setting."""
    first, *other_ks = dict.fromkeys(scaled(config.k, factor) for factor in grid.random_k_factors)
    tokens, *longer = (round(config.train.tokens * factor) for factor in grid.random_token_factors)
    return [
        *((first, norm, tokens) for norm in grid.norms),
        *((k, "found", tokens) for k in other_ks),
        *((first, "found", more) for more in longer),
    ]


def _trained(lab: Lab, config: DistillConfig, core: Core, k: int, norm: CoreNorm, tokens: int) -> list[TrainResult]:
    """Train SAEs with the core and with random rows in its place; detectors too, whose rows are as found."""
    kinds = (RandomKind.NORM_MATCHED, RandomKind.COVARIANCE_MATCHED)
    chosen = lab.transfer_config(config, "random-core", k=(k,), core_norm=norm, random_cores=kinds)
    as_given = norm == "found" and tokens == config.train.tokens
    modes = (CoreMode.DENSE, CoreMode.DETECTOR) if as_given else (CoreMode.DENSE,)
    return lab.transfer(replace(chosen, core_modes=modes, train=replace(chosen.train, tokens=tokens)), core)
