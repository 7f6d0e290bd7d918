"""Distillations of both kinds, and the same from a random start: how much of the first core persists.

Then SAEs from the distilled cores, beside their random controls and SAEs that keep nothing.
"""

from dataclasses import replace

from dmsae.config import Json
from dmsae.cores.attribution import Attribution
from dmsae.cores.controls import RandomKind
from dmsae.cores.core import Core
from dmsae.disk import layout
from dmsae.distillation.config import DistillConfig
from dmsae.distillation.prices import Held
from dmsae.distillation.transfer import Budget
from dmsae.evaluation.price import attribution_share
from dmsae.experiments.grid import Grid
from dmsae.experiments.lab import Followed, Lab
from dmsae.experiments.parts.capped import detectors
from dmsae.sae.config import CoreMode


def run(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return the cores of every cycle for one seed, and the rows of the distilled ones."""
    figures: Json = {"cycles": [], "rows": [], "failures": {}}
    for mode, max_rate in ((CoreMode.DENSE, None), (CoreMode.DETECTOR, grid.max_rate)):
        for kind in (None, RandomKind.NORM_MATCHED):
            name = f"{mode}-{'random' if kind else 'selected'}"
            config = replace(
                lab.base, seed=seed, cycles=grid.cycles, core_mode=mode, max_rate=max_rate, random_start=kind
            )
            found = lab.follow(config)
            figures["cycles"] += [{"run": name, **cycle} for cycle in by_cycle(found)]
            if found.failure:  # a cycle that fails is a result
                figures["failures"][name] = found.failure
            elif kind is None and found.distilled:
                scores = Attribution.load(layout.cycle_directory(found.directory, found.distilled.cycle))
                figures["rows"] += _rows(lab, config, found.distilled, scores)
    return figures


def by_cycle(found: Followed) -> list[Json]:
    """Return, for each cycle of a distillation, its core's size, births and how much of the first and last is in it."""
    first, rows = set(found.cores[0].identities if found.cores else ()), []
    for core, report in zip(found.cores, found.reports, strict=True):
        rows.append(
            {
                "cycle": report.cycle,
                "size": len(core),
                "births": {str(cycle): count for cycle, count in core.births().items()},
                "kept": report.core.kept,
                "of_first": len(first.intersection(core.identities)),
                "l0_core": report.l0_core,
                "fve": report.heldout_fve,
                "norms": report.row_norms._asdict() if report.row_norms else None,
                "share_selected": report.selection.share_selected if report.selection else None,
                "median_rate": report.selection.median_rate if report.selection else None,
            }
        )
    return rows


def _rows(lab: Lab, config: DistillConfig, core: Core, scores: Attribution) -> list[Json]:
    """Return the rows of a distilled core beside its random control and SAEs that keep nothing."""
    budget = Budget.TOTAL if config.core_mode is CoreMode.DETECTOR else Budget.NONCORE
    chosen = replace(detectors(lab, config, "cycles"), core_modes=(config.core_mode,), budget=budget)
    known = [Held(core, attribution_share(core, scores))]
    return lab.rows(lab.transfer(chosen, core), config, known)
