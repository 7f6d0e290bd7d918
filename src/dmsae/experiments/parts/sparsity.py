"""Sparsity k: what a distillation at each k carries over from cycle to cycle (the paper's Appendix D)."""

from dataclasses import replace

from dmsae.config import Json
from dmsae.experiments.grid import Grid, scaled
from dmsae.experiments.lab import Lab
from dmsae.experiments.parts.cycles import by_cycle


def run(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return the cores of every cycle at each k; a k at which a cycle fails is named with the cause."""
    cycles, failures = [], {}
    for k in dict.fromkeys(scaled(lab.base.k, factor) for factor in grid.k_factors):
        found = lab.follow(replace(lab.base, seed=seed, k=k, cycles=grid.sparsity_cycles))
        n_distilled = None if found.distilled is None else len(found.distilled)
        cycles += [{"run": f"k={k}", "k": k, "n_distilled": n_distilled, **one} for one in by_cycle(found)]
        if found.failure:  # a collapse is marked, not hidden
            failures[str(k)] = found.failure
    return {"rows": [], "cycles": cycles, "failures": failures}
