"""SAEs from the distilled cores of the part `cycles`, beside random controls and SAEs that keep nothing."""

from dataclasses import replace

from dmsae.config import Json
from dmsae.cores.attribution import Attribution
from dmsae.cores.core import Core
from dmsae.disk import layout
from dmsae.distillation.config import DistillConfig
from dmsae.distillation.prices import Held
from dmsae.distillation.transfer import Budget
from dmsae.evaluation.price import attribution_share
from dmsae.experiments.grid import Grid
from dmsae.experiments.lab import Lab
from dmsae.experiments.parts.capped import detectors
from dmsae.experiments.parts.cycles import selected
from dmsae.sae.config import CoreMode


def run(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return the rows of one seed, and why a distillation failed."""
    figures: Json = {"rows": [], "failures": {}}
    for config in selected(lab, grid, seed):
        found = lab.follow(config)
        if found.failure:  # a cycle that fails is a result
            figures["failures"][str(config.core_mode)] = found.failure
        elif found.distilled:
            scores = Attribution.load(layout.cycle_directory(found.directory, found.distilled.cycle))
            figures["rows"] += _rows(lab, config, found.distilled, scores)
    return figures


def _rows(lab: Lab, config: DistillConfig, core: Core, scores: Attribution) -> list[Json]:
    """Return the rows of a distilled core beside its random control and SAEs that keep nothing.

    Rows that were distilled dense are kept in sparse mode, too, in which they compete with the others for k.
    """
    at_k = detectors(lab, config, "cycles")
    ways = [at_k]
    if config.core_mode is CoreMode.DENSE:
        dense = replace(at_k, core_modes=(CoreMode.DENSE,), budget=Budget.NONCORE)
        ways = [dense, replace(at_k, core_modes=(CoreMode.SPARSE,))]
    known = [Held(core, attribution_share(core, scores))]
    return [row for way in ways for row in lab.rows(lab.transfer(way, core), config, known)]
