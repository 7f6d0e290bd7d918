"""What cores cost after no cycle, after some and after all of them: in every freeze mode, by several rules.

Rows that were distilled dense are kept dense, and in sparse mode, in which they compete with the others for k.
Detectors are distilled and kept as such; before any cycle they are the part `capped`. Other rules choose as many
latents as the core has, from the candidates of its last cycle: a first core is chosen from the same ones, but a
distilled core holds only latents that were frozen there. Sparse mode and the other rules are tried only at the smallest
and largest number of cycles. Each core has a random control and SAEs that keep nothing beside it.
"""

from collections.abc import Sequence
from dataclasses import replace

from dmsae.config import Json
from dmsae.cores.attribution import Attribution
from dmsae.cores.controls import Rule
from dmsae.cores.core import Core
from dmsae.cores.selection import distilled_core
from dmsae.disk import layout
from dmsae.distillation.config import DistillConfig
from dmsae.distillation.prices import Held
from dmsae.distillation.transfer import Budget, above, below
from dmsae.evaluation.fidelity import kept_fidelity
from dmsae.evaluation.price import attribution_share
from dmsae.experiments.grid import Grid
from dmsae.experiments.lab import Followed, Lab
from dmsae.experiments.parts.capped import Selected, by_rules, detectors, fitting
from dmsae.experiments.parts.cycles import selected
from dmsae.sae.config import CoreMode, core_first
from dmsae.sae.sae import SAE
from dmsae.training.learner import SAESpec
from dmsae.training.result import TrainResult


def run(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return the rows of one seed, why a distillation failed, and which cores did not fit the budget."""
    figures: Json = {"rows": [], "priced_cycles": list(grid.priced_cycles), "failures": {}, "left_out": {}}
    for config in selected(lab, grid, seed):
        found = lab.follow(config)
        if found.failure:  # a cycle that fails is a result
            figures["failures"][str(config.core_mode)] = found.failure
        for cycles in grid.priced_cycles:
            if (after := _after(found, cycles)) is None:
                continue
            at_end = cycles in (min(grid.priced_cycles), max(grid.priced_cycles))
            others = by_rules(lab, config, [one for one in grid.rules if at_end and one in _CHOOSING], after)
            for mode in _modes(config, cycles, at_end):
                rows, left_out = _priced(lab, config, mode, after, others)
                figures["rows"] += [_named(row, config.k, mode, cycles) for row in rows]
                figures["left_out"] |= {f"after-{cycles}-{rule}-{mode}": why for rule, why in left_out.items()}
    return figures


def _named(row: Json, k: int, mode: CoreMode, cycles: int) -> Json:
    """Return a row whose name says after how many cycles its core is from, or, without a core, what it is compared
    with: the k of SAEs that keep nothing follows measured L0s, which differ between seeds."""
    name = row["sae"] if row["n_core"] else f"unconstrained-{mode}-{row['sae'].split('-')[1]}-k{k}"
    return {**row, "sae": f"after-{cycles}-{name}", "cycles": cycles}


_PURPOSE = "capped"
"""Determines the seed of training: that of the detectors before any cycle, in the part of this name."""
_CHOOSING = (Rule.FIRING_RATE, Rule.MEAN_ACTIVATION, Rule.RANDOM_SUBSET)
"""Rules that choose among an SAE's latents. Principal components are the same after any cycle."""


def _modes(config: DistillConfig, cycles: int, at_end: bool) -> tuple[CoreMode, ...]:
    """Return how the cores of a distillation are kept after so many cycles."""
    if config.core_mode is CoreMode.DETECTOR:
        return (CoreMode.DETECTOR,) if cycles else ()
    return (CoreMode.DENSE, CoreMode.SPARSE) if at_end else (CoreMode.DENSE,)


def _after(found: Followed, cycles: int) -> Selected | None:
    """Return the core that a distillation of so many cycles gives, the first after none; nothing if it is empty, or if
    a cycle before that failed."""
    if cycles >= len(found.cores):
        return None
    here = layout.cycle_directory(found.directory, cycles)
    core = found.cores[cycles] if not cycles else distilled_core(found.cores[cycles], found.cores[cycles - 1])
    return Selected(core, SAE.load(here / layout.SAE), Attribution.load(here)) if len(core) else None


def _priced(
    lab: Lab, config: DistillConfig, mode: CoreMode, after: Selected, others: dict[str, Core]
) -> tuple[list[Json], Json]:
    """Return the rows of a core in one mode beside other rules' cores, a random one and SAEs that keep nothing, and
    which rules' cores left no room in the budget."""
    chosen = replace(detectors(lab, config, _PURPOSE), core_modes=(mode,))
    if mode is CoreMode.DENSE:  # its own activity is known only after training
        chosen = replace(chosen, budget=Budget.NONCORE, baselines=())
    beside, left_out = fitting(lab, chosen, {str(Rule.ATTRIBUTION): after.core, **others})
    if beside.pop(str(Rule.ATTRIBUTION), None) is None:
        return [], left_out
    results = lab.transfer(chosen, after.core, beside)
    if mode is CoreMode.DENSE:
        results += _around(lab, config, len(after.core), results)
    known = [Held(core, attribution_share(core, after.scores)) for core in (after.core, *beside.values())]
    return lab.rows(results, config, known, losses=False), left_out


def _around(lab: Lab, config: DistillConfig, n_core: int, results: Sequence[TrainResult]) -> list[TrainResult]:
    """Train SAEs that keep nothing just outside the range of L0 that those with a core have."""
    found = [kept_fidelity(one.directory, lab.store) for one in results]
    l0s = [figures.l0_core + figures.l0_noncore for figures in found if figures is not None]
    if not l0s:
        return []
    free = config.sae(lab.store.d_model, 0)
    free = replace(free, prefixes=core_first(free.prefixes, n_core))
    ks = (below(min(l0s)), above(max(l0s)))
    specs = [SAESpec(f"unconstrained-{i}-k{k}", replace(free, k=k)) for i, k in enumerate(ks, start=1)]
    return lab.train(specs, lab.transfer_config(config, _PURPOSE).train)
