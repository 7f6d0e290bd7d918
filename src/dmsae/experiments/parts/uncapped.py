"""The first core as the paper selects it, kept dense and in sparse mode, beside every other way to choose as many.

In sparse mode its rows compete with all other latents for k. Other rules choose among the same candidates. Detectors of
latents that do not fire often are the part `capped`, and what cores cost after some cycles `prices`.
"""

from dataclasses import replace

from dmsae.config import Json
from dmsae.experiments.grid import Grid
from dmsae.experiments.lab import Lab
from dmsae.experiments.pricing import first_selected, priced
from dmsae.sae.config import CoreMode


def run(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return the rows of one seed, and which cores did not fit the budget."""
    config = replace(lab.base, seed=seed, core_mode=CoreMode.DENSE, max_rate=None)
    first = first_selected(lab, config)
    figures: Json = {"rows": [], "left_out": {}}
    for mode in (CoreMode.DENSE, CoreMode.SPARSE):
        rows, left_out = priced(lab, config, mode, first, grid.rules)
        figures["rows"] += rows
        figures["left_out"] |= left_out
    return figures
