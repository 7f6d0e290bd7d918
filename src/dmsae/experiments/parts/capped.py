"""Detectors of latents that do not fire often, at a total L0 of k, beside every other way to choose as many.

Random detectors have the same firing rates and mean activations. Other rules choose among the same candidates.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from dmsae.config import Json
from dmsae.cores.attribution import Attribution
from dmsae.cores.controls import RandomKind, Rule, core_by_rule
from dmsae.cores.core import Core, Provenance
from dmsae.distillation.config import DistillConfig
from dmsae.distillation.transfer import Budget, TransferConfig, sae_specs
from dmsae.errors import ConfigError
from dmsae.experiments.grid import Grid
from dmsae.experiments.lab import Lab
from dmsae.sae.config import CoreMode
from dmsae.sae.sae import SAE


def run(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return the rows of one seed, how many candidates there were, and why a rule's core did not fit the budget."""
    config = replace(lab.base, seed=seed, max_rate=grid.max_rate)
    first, chosen = first_selected(lab, config), detectors(lab, config, "capped")
    others, unable = by_rules(lab, config, grid.rules, first)
    beside, without_room = fitting(lab, chosen, others)
    known = [lab.held(one, config) for one in (first.core, *beside.values())]
    rows = lab.rows(lab.transfer(chosen, first.core, beside), config, known, losses=False)
    n_candidates = len(_eligible(first.scores, config).latents_P)
    return {"rows": rows, "n_candidates": n_candidates, "left_out": unable | without_room}


class Selected(NamedTuple):
    """A core and what it was selected from."""

    core: Core
    sae: SAE
    scores: Attribution


def first_selected(lab: Lab, config: DistillConfig) -> Selected:
    """Return the core that is selected after cycle 0."""
    start = lab.start(config)
    return Selected(lab.first_core(config), start.sae, start.attribution)


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
    pool, provenance = _eligible(like.scores, config), Provenance.of(lab.store, config.result_settings())
    facts = (len(like.core), lab.store, provenance, config.seed, like.core.cycle)
    found, without = {}, {}
    for rule in rules:
        try:
            found[str(rule)] = core_by_rule(rule, like.sae, pool, *facts)
        except ConfigError as error:
            without[str(rule)] = str(error)
    return found, without


def _eligible(scores: Attribution, config: DistillConfig) -> Attribution:
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
