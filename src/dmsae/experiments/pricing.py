"""A core and what it was selected from; what it costs, beside the cores of other rules, random ones and none."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from dmsae.config import Json
from dmsae.cores.attribution import Attribution
from dmsae.cores.controls import RandomKind, Rule, core_by_rule
from dmsae.cores.core import Core, Provenance
from dmsae.cores.selection import distilled_core
from dmsae.disk import layout
from dmsae.distillation.config import DistillConfig
from dmsae.distillation.prices import Held
from dmsae.distillation.transfer import Budget, TransferConfig, above, below, sae_specs
from dmsae.errors import ConfigError
from dmsae.evaluation.fidelity import Half, kept_fidelity
from dmsae.evaluation.price import attribution_share
from dmsae.experiments.lab import Followed, Lab
from dmsae.sae.config import CoreMode, core_first
from dmsae.sae.sae import SAE
from dmsae.training.learner import SAESpec
from dmsae.training.result import TrainResult

_PURPOSE = "capped"
"""Determines the seed of training: that of the part of this name, so that detectors can be compared."""
_APART = (str(Rule.PRINCIPAL_COMPONENTS), f"random-{RandomKind.COVARIANCE_MATCHED}")
"""How the names of SAEs begin whose cores may have an L0 far from that of the others."""


class Selected(NamedTuple):
    """A core and what it was selected from."""

    core: Core
    sae: SAE
    scores: Attribution


def first_selected(lab: Lab, config: DistillConfig) -> Selected:
    """Return the core that is selected after cycle 0."""
    start = lab.start(config)
    return Selected(lab.first_core(config), start.sae, start.attribution)


def selected_after(found: Followed, cycles: int) -> Selected | None:
    """Return the core that a distillation of so many cycles gives; nothing if it is empty, or if a cycle failed."""
    if found.directory is None or cycles >= len(found.cores):
        return None
    here = layout.cycle_directory(found.directory, cycles)
    core = distilled_core(found.cores[cycles], found.cores[cycles - 1])
    return Selected(core, SAE.load(here / layout.SAE), Attribution.load(here)) if len(core) else None


def detectors(lab: Lab, config: DistillConfig, purpose: str) -> TransferConfig:
    """Return a transfer of detectors at a total L0 of k, beside random ones and SAEs that keep nothing."""
    return lab.transfer_config(
        config,
        purpose,
        core_modes=(CoreMode.DETECTOR,),
        budget=Budget.TOTAL,
        random_cores=(RandomKind.NORM_MATCHED,),
        baselines=("unconstrained",),
    )


def by_rules(
    lab: Lab, config: DistillConfig, rules: Sequence[Rule], like: Selected
) -> tuple[dict[str, Core], dict[str, str]]:
    """Return the cores that other rules choose: as many latents as a core has, among the same candidates; and why a
    rule cannot choose as many, as there are no more principal components than dimensions."""
    pool, provenance = eligible(like.scores, config), Provenance.of(lab.store, config.result_settings())
    facts = (len(like.core), lab.store, provenance, config.seed, like.core.cycle)
    found, without = {}, {}
    for rule in rules:
        try:
            found[str(rule)] = core_by_rule(rule, like.sae, pool, *facts)
        except ConfigError as error:
            without[str(rule)] = str(error)
    return found, without


def eligible(scores: Attribution, config: DistillConfig) -> Attribution:
    """Return the scores of those candidates that a core may have: they fire no more often than the cap."""
    return scores.among(scores.firing_rates_P <= (1.0 if config.max_rate is None else config.max_rate))


def fitting(lab: Lab, chosen: TransferConfig, cores: dict[str, Core]) -> tuple[dict[str, Core], dict[str, str]]:
    """Return the cores that fit the total budget, and why the others do not."""
    alone, found, left_out = replace(chosen, random_cores=(), baselines=()), {}, {}
    for name, core in cores.items():
        try:
            sae_specs(alone, core, lab.store)
            found[name] = core
        except ConfigError as error:
            left_out[name] = str(error)
    return found, left_out


def priced(
    lab: Lab,
    config: DistillConfig,
    mode: CoreMode,
    chosen: Selected,
    rules: Sequence[Rule],
    random_cores: tuple[RandomKind, ...] = (RandomKind.NORM_MATCHED,),
    half: Half | None = None,
) -> tuple[list[Json], Json]:
    """Return the rows of a core in one mode beside other rules' cores, random ones and SAEs that keep nothing, measured
    on all held-out activations or a half of them; and why a rule could not choose as many latents, or left no room in
    the budget."""
    transfer = replace(detectors(lab, config, _PURPOSE), core_modes=(mode,), random_cores=random_cores)
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
    rows = lab.rows(results, config, known, losses=False, half=half)
    return [_named(row, config.k, mode) for row in rows], left_out


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

    Principal components, and random rows with the covariance of the activations, may fire much less or more often than
    other cores. What the others are compared with does not depend on them. Below that range, 3 is just below their L0
    and 4 just above; beyond it, 5 is just above and 6 just below. 4 and 6 are left out where 1 and 2 are as close.
    """
    apart = [l0 for name, l0 in l0s.items() if name.startswith(_APART)]
    others = [l0 for name, l0 in l0s.items() if not name.startswith(_APART)] or apart
    ks = {1: below(min(others)), 2: above(max(others))}
    lowest, highest = min(apart, default=ks[1]), max(apart, default=ks[2])
    if lowest < ks[1]:
        ks |= {3: below(lowest)} | ({4: above(lowest)} if above(lowest) < ks[1] else {})
    if highest > ks[2]:
        ks |= {5: above(highest)} | ({6: below(highest)} if below(highest) > ks[2] else {})
    return ks
