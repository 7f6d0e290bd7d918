"""Distillations of both kinds, and the same from a random start: how much of the first core persists."""

from dataclasses import replace

from dmsae.config import Json
from dmsae.cores.controls import RandomKind
from dmsae.distillation.config import DistillConfig
from dmsae.experiments.grid import Grid
from dmsae.experiments.lab import Followed, Lab
from dmsae.sae.config import CoreMode


def run(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return the cores of every cycle for one seed."""
    figures: Json = {"rows": [], "cycles": [], "failures": {}}
    for config in selected(lab, grid, seed):
        for kind in (None, RandomKind.NORM_MATCHED):
            name = f"{config.core_mode}-{'random' if kind else 'selected'}"
            found = lab.follow(replace(config, random_start=kind))
            figures["cycles"] += [{"run": name, **cycle} for cycle in by_cycle(found)]
            if found.failure:  # a cycle that fails is a result
                figures["failures"][name] = found.failure
    return figures


def selected(lab: Lab, grid: Grid, seed: int) -> list[DistillConfig]:
    """Return the distillations of both kinds that start from a selected core."""
    base = replace(lab.base, seed=seed, cycles=grid.cycles)
    modes = ((CoreMode.DENSE, None), (CoreMode.DETECTOR, grid.max_rate))
    return [replace(base, core_mode=mode, max_rate=max_rate) for mode, max_rate in modes]


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
