"""The first core as the paper selects it, frozen by direction and as detectors, beside random cores.

SAEs that keep nothing stand at L0 from k to k + core, and closely on both sides of the detectors, so that every core
has a price.
"""

from collections.abc import Sequence
from dataclasses import replace

from dmsae.config import Json
from dmsae.cores.core import Core
from dmsae.distillation.config import DistillConfig
from dmsae.distillation.transfer import Budget
from dmsae.evaluation.fidelity import kept_fidelity
from dmsae.experiments.grid import Grid
from dmsae.experiments.lab import Lab
from dmsae.sae.config import CoreMode
from dmsae.training.result import TrainResult


def run(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return the rows of one seed."""
    config = replace(lab.base, seed=seed)
    return {"rows": lab.rows(saes(lab, grid, config), config, [lab.held(lab.first_core(config), config)])}


def saes(lab: Lab, grid: Grid, config: DistillConfig) -> list[TrainResult]:
    """Train SAEs from the first core and from random ones, and SAEs that keep nothing."""
    core = lab.first_core(config)
    chosen = lab.transfer_config(
        config,
        "paper",
        core_modes=(CoreMode.DENSE, CoreMode.DETECTOR),
        random_cores=grid.random_cores,
        baselines=("unconstrained",),
    )
    results = lab.transfer(chosen, core)
    return results + _beside(lab, config, core, results)


def _beside(lab: Lab, config: DistillConfig, core: Core, results: Sequence[TrainResult]) -> list[TrainResult]:
    """Train SAEs that keep nothing at about the L0 of the detectors: their price is small, and a line across a long
    stretch of L0 is too low in its middle."""
    detectors = next(one for one in results if one.name.startswith(str(CoreMode.DETECTOR)))
    figures = kept_fidelity(detectors.directory, lab.store)
    return neighbours(lab, config, core, round(figures.l0_core + figures.l0_noncore)) if figures else []


def neighbours(lab: Lab, config: DistillConfig, core: Core, l0: int) -> list[TrainResult]:
    """Train SAEs that keep nothing on both sides of an L0, with a prefix-0 as large as core + prefix-0."""
    chosen = lab.transfer_config(
        config, "paper", k=(l0,), core_modes=(), budget=Budget.TOTAL, baselines=("unconstrained",)
    )
    return lab.transfer(chosen, core)
