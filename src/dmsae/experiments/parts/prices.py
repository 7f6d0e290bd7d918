"""What distilled cores cost after some cycles, all of them or every other number: in every freeze mode, by every rule.

Rows that were distilled dense are kept dense and in sparse mode; detectors are distilled and kept as such. Other rules
choose as many latents as the core has from the candidates of the last cycle, of which the core holds only those that
were frozen already. Each core has random controls and SAEs that keep nothing beside it. What cores cost before any
cycle is in the parts `capped` and `uncapped`.
"""

from collections.abc import Sequence

from dmsae.config import Json
from dmsae.cores.controls import RandomKind
from dmsae.experiments.grid import Grid
from dmsae.experiments.lab import Lab
from dmsae.experiments.parts.cycles import selected
from dmsae.experiments.pricing import priced, selected_after
from dmsae.sae.config import CoreMode

_MODES = {CoreMode.DENSE: (CoreMode.DENSE, CoreMode.SPARSE), CoreMode.DETECTOR: (CoreMode.DETECTOR,)}
"""How the cores of each kind of distillation are kept."""


def run(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return the rows of one seed, why a distillation failed, and which cores did not fit the budget."""
    return _after(lab, grid, seed, grid.priced_cycles)


def others(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return the same after those numbers of cycles that `run` passes over."""
    return _after(lab, grid, seed, [n for n in range(1, grid.cycles + 1) if n not in grid.priced_cycles])


def _after(lab: Lab, grid: Grid, seed: int, priced_cycles: Sequence[int]) -> Json:
    """Price the cores of every distillation after so many cycles."""
    figures: Json = {"rows": [], "priced_cycles": list(priced_cycles), "failures": {}, "left_out": {}}
    for config in selected(lab, grid, seed):
        found = lab.follow(config)
        if found.failure:  # a cycle that fails is a result
            figures["failures"][str(config.core_mode)] = found.failure
        for cycles in priced_cycles:
            if (after := selected_after(found, cycles)) is None:
                continue
            beginning = f"after-{cycles}-"
            for mode in _MODES[config.core_mode]:
                random_rows = (RandomKind.NORM_MATCHED,) if mode is CoreMode.DETECTOR else grid.random_cores
                rows, left_out = priced(lab, config, mode, after, grid.rules, random_rows)
                figures["rows"] += [row | {"sae": beginning + row["sae"], "cycles": cycles} for row in rows]
                figures["left_out"] |= {beginning + name: why for name, why in left_out.items()}
    return figures
