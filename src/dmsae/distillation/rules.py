"""Cores that other rules take from the SAE of cycle 0 of a distillation, to train beside its own."""

from collections.abc import Sequence
from pathlib import Path

from dmsae.activations.identity import ModelIdentity
from dmsae.activations.store import Store
from dmsae.config import from_dict, require
from dmsae.cores.attribution import Attribution
from dmsae.cores.controls import Rule, core_by_rule
from dmsae.cores.core import Core, Provenance
from dmsae.disk import layout
from dmsae.disk.run import require_distillation
from dmsae.sae.sae import SAE


def cores_by_rule(run: Path, rules: Sequence[Rule], n: int, store: Store, seed: int) -> dict[str, Core]:
    """Return, by the name of each rule, the core of n latents that it takes from cycle 0 of a run."""
    require(len(set(rules)) == len(rules), "rules", [str(rule) for rule in rules], "name nothing twice")
    settings = require_distillation(run)
    first = layout.cycle_directory(run, 0)
    attribution, sae = Attribution.load(first), SAE.load(first / layout.SAE)
    model = from_dict(ModelIdentity, settings["model"])
    provenance = Provenance(model, settings["store"], settings["distill"])
    return {str(rule): core_by_rule(rule, sae, attribution, n, store, provenance, seed) for rule in rules}
