"""Detectors of latents that do not fire often, at a total L0 of k, beside every other way to choose as many.

Random detectors have the same firing rates and mean activations. Other rules choose among the same candidates.
"""

from collections.abc import Sequence
from dataclasses import replace

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


def run(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return the rows of one seed, how many candidates there were, and why a rule's core did not fit the budget."""
    config = replace(lab.base, seed=seed, max_rate=grid.max_rate)
    core = lab.first_core(config)
    chosen = detectors(lab, config, "capped")
    beside, left_out = fitting(lab, chosen, by_rules(lab, config, grid.rules, len(core)))
    known = [lab.held(one, config) for one in (core, *beside.values())]
    rows = lab.rows(lab.transfer(chosen, core, beside), config, known)
    return {"rows": rows, "n_candidates": len(candidates(lab, config).latents_P), "left_out": left_out}


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


def by_rules(lab: Lab, config: DistillConfig, rules: Sequence[Rule], n: int) -> dict[str, Core]:
    """Return the cores of n latents that other rules choose among the candidates below the cap of a distillation."""
    sae, pool = lab.start(config).sae, candidates(lab, config)
    provenance = Provenance.of(lab.store, config.result_settings())
    return {str(rule): core_by_rule(rule, sae, pool, n, lab.store, provenance, config.seed) for rule in rules}


def candidates(lab: Lab, config: DistillConfig) -> Attribution:
    """Return the scores of those latents of cycle 0 that a core may have: they fire no more often than the cap."""
    scores = lab.start(config).attribution
    return scores.among(scores.firing_rates_P <= (1.0 if config.max_rate is None else config.max_rate))


def fitting(lab: Lab, chosen: TransferConfig, cores: dict[str, Core]) -> tuple[dict[str, Core], Json]:
    """Return the cores that fit the total budget, and why the others do not."""
    found, left_out = {}, {}
    for name, core in cores.items():
        try:
            sae_specs(chosen, core, lab.store)
            found[name] = core
        except ConfigError as error:
            left_out[name] = str(error)
    return found, left_out
