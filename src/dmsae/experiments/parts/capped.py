"""Detectors of latents that do not fire often, at a total L0 of k, beside every other way to choose as many.

Random detectors have the same firing rates and mean activations. Other rules choose among the same candidates.
"""

from dataclasses import replace

from dmsae.config import Json
from dmsae.experiments.grid import Grid
from dmsae.experiments.lab import Lab
from dmsae.experiments.pricing import by_rules, detectors, eligible, first_selected, fitting


def run(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return the rows of one seed, how many candidates there were, and why a rule's core did not fit the budget."""
    config = replace(lab.base, seed=seed, max_rate=grid.max_rate)
    first, chosen = first_selected(lab, config), detectors(lab, config, "capped")
    others, unable = by_rules(lab, config, grid.rules, first)
    beside, without_room = fitting(lab, chosen, others)
    known = [lab.held(one, config) for one in (first.core, *beside.values())]
    rows = lab.rows(lab.transfer(chosen, first.core, beside), config, known, losses=False)
    n_candidates = len(eligible(first.scores, config).latents_P)
    return {"rows": rows, "n_candidates": n_candidates, "left_out": unable | without_room}
