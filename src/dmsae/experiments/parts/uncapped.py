"""The first core as the paper selects it, kept dense and in sparse mode, beside every other way to choose as many.

In sparse mode its rows compete with all other latents for k. Other rules choose among the same candidates. Detectors of
latents that do not fire often are the part `capped`, and what cores cost after some cycles `prices`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dmsae.config import Json
from dmsae.cores.controls import Rule
from dmsae.distillation.config import DistillConfig
from dmsae.distillation.prices import Held
from dmsae.distillation.transfer import Budget, above, below
from dmsae.evaluation.fidelity import kept_fidelity
from dmsae.evaluation.price import attribution_share
from dmsae.experiments.grid import Grid
from dmsae.experiments.lab import Lab
from dmsae.experiments.parts.capped import Selected, by_rules, detectors, first_selected, fitting
from dmsae.sae.config import CoreMode, core_first
from dmsae.training.learner import SAESpec
from dmsae.training.result import TrainResult

_PURPOSE = "capped"
"""Determines the seed of training: that of the part of this name, so that detectors can be compared."""


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


def priced(
    lab: Lab, config: DistillConfig, mode: CoreMode, chosen: Selected, rules: Sequence[Rule]
) -> tuple[list[Json], Json]:
    """Return the rows of a core in one mode beside other rules' cores, a random one and SAEs that keep nothing; and why
    a rule could not choose as many latents, or left no room in the budget."""
    transfer = replace(detectors(lab, config, _PURPOSE), core_modes=(mode,))
    if mode is CoreMode.DENSE:  # its own activity is known only after training
        transfer = replace(transfer, budget=Budget.NONCORE, baselines=())
    others, unable = by_rules(lab, config, rules, chosen)
    beside, without_room = fitting(lab, transfer, {str(Rule.ATTRIBUTION): chosen.core, **others})
    left_out = {f"{rule}-{mode}": why for rule, why in (unable | without_room).items()}
    if beside.pop(str(Rule.ATTRIBUTION), None) is None:
        return [], left_out
    results = lab.transfer(transfer, chosen.core, beside)
    if mode is CoreMode.DENSE:
        results += _around(lab, config, len(chosen.core), results)
    known = [Held(core, attribution_share(core, chosen.scores)) for core in (chosen.core, *beside.values())]
    return [_named(row, config.k, mode) for row in lab.rows(results, config, known, losses=False)], left_out


def _named(row: Json, k: int, mode: CoreMode) -> Json:
    """Return a row whose name says, if it has no core, what it is compared with: the k of SAEs that keep nothing
    follows measured L0s, which differ between seeds."""
    return row if row["n_core"] else row | {"sae": f"unconstrained-{mode}-{row['sae'].split('-')[1]}-k{k}"}


def _around(lab: Lab, config: DistillConfig, n_core: int, results: Sequence[TrainResult]) -> list[TrainResult]:
    """Train SAEs that keep nothing around the L0s of those with a core."""
    found = {one.name: kept_fidelity(one.directory, lab.store) for one in results}
    l0s = {name: figures.l0_core + figures.l0_noncore for name, figures in found.items() if figures is not None}
    if not l0s:
        return []
    free = config.sae(lab.store.d_model, 0)
    free = replace(free, prefixes=core_first(free.prefixes, n_core))
    specs = [SAESpec(f"unconstrained-{i}-k{k}", replace(free, k=k)) for i, k in ks_around(l0s).items()]
    return lab.train(specs, lab.transfer_config(config, _PURPOSE).train)


def ks_around(l0s: Mapping[str, float]) -> dict[int, int]:
    """Return sparsities, numbered: 1 just below and 2 just above some measured L0s.

    Principal components may fire much less or more often than other cores. What the others are compared with does not
    depend on them. Below that range, 3 is just below their L0 and 4 just above; beyond it, 5 is just above and 6 just
    below. 4 and 6 are left out where 1 and 2 are as close.
    """
    components = [l0 for name, l0 in l0s.items() if name.startswith(Rule.PRINCIPAL_COMPONENTS)]
    others = [l0 for name, l0 in l0s.items() if not name.startswith(Rule.PRINCIPAL_COMPONENTS)] or components
    ks = {1: below(min(others)), 2: above(max(others))}
    lowest, highest = min(components, default=ks[1]), max(components, default=ks[2])
    if lowest < ks[1]:
        ks |= {3: below(lowest)} | ({4: above(lowest)} if above(lowest) < ks[1] else {})
    if highest > ks[2]:
        ks |= {5: above(highest)} | ({6: below(highest)} if below(highest) > ks[2] else {})
    return ks
