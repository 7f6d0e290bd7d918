"""The first core as the paper selects it, frozen by direction and as detectors, beside random cores.

SAEs that keep nothing stand at L0 from k to k + core, so that every core has a price.
"""

from dataclasses import replace

from dmsae.config import Json
from dmsae.experiments.grid import Grid
from dmsae.experiments.lab import Lab
from dmsae.sae.config import CoreMode


def run(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return the rows of one seed."""
    config = replace(lab.base, seed=seed)
    core = lab.first_core(config)
    chosen = lab.transfer_config(
        config,
        "paper",
        core_modes=(CoreMode.DENSE, CoreMode.DETECTOR),
        random_cores=grid.random_cores,
        baselines=("unconstrained",),
    )
    return {"rows": lab.rows(lab.transfer(chosen, core), config, [lab.held(core, config)])}
