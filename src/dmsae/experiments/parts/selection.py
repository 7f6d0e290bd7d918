"""What gradient × activation buys: the latents that each rule chooses, judged by ablating them.

Ablation measures how much the loss changes without a latent, in place of a first-order estimate: it is the arbiter. So
that it favours no rule, it takes other text than the scores do, and the mean over contexts instead of their quantile.
SAEs that carry the cores of other rules are in the part `capped`.
"""

from dataclasses import replace

import torch

from dmsae.activations.splits import Split
from dmsae.config import Json
from dmsae.cores.ablation import AblationConfig, loss_changes
from dmsae.cores.attribution import Attribution
from dmsae.cores.controls import Rule
from dmsae.cores.ranking import spearman
from dmsae.distillation.inspection import load_model_of
from dmsae.experiments.grid import Grid
from dmsae.experiments.lab import Lab
from dmsae.progress import SILENT

_CRITERIA = (Rule.ATTRIBUTION, Rule.FIRING_RATE, Rule.MEAN_ACTIVATION)
"""Rules that rank candidates; the others choose any, or none of them."""


def run(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return how each rule's ranking agrees with ablation, and the loss that the latents it prefers account for."""
    config = replace(lab.base, seed=seed)
    start = lab.start(config)
    model = load_model_of(lab.store.model, SILENT)
    asked = AblationConfig(grid.ablation_contexts, grid.ablated, seed=seed)
    measured = loss_changes(start.sae, lab.store, model, start.attribution, asked, Split.HELDOUT)
    effect = measured.changes_RN.abs().mean(1)
    scored = start.attribution.among(torch.isin(start.attribution.latents_P, measured.latents_R))
    rules, half = [], max(1, len(effect) // 2)
    for rule in _CRITERIA:
        ranked = _criterion(rule, scored)
        best = ranked.argsort(descending=True, stable=True)[:half]
        share = float(effect[best].sum() / effect.sum())
        rules.append({"rule": str(rule), "spearman": spearman(ranked, effect), "share_of_effect": share})
    ceiling = float(effect.sort(descending=True).values[:half].sum() / effect.sum())
    chance = half / len(effect)
    return {"rows": [], "rules": rules, "n_ablated": len(effect), "chosen": half, "ceiling": ceiling, "chance": chance}


def _criterion(rule: Rule, scored: Attribution) -> torch.Tensor:
    if rule is Rule.ATTRIBUTION:
        return scored.scores_P
    if rule is Rule.FIRING_RATE or scored.mean_activations_P is None:
        return scored.firing_rates_P
    return scored.mean_activations_P * scored.firing_rates_P
