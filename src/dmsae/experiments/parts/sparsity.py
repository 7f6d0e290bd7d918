"""Sparsity k: what a distillation at each k carries over from cycle to cycle (the paper's Appendix D)."""

from dataclasses import replace

from dmsae.config import Json
from dmsae.errors import TrainingError
from dmsae.experiments.grid import Grid, scaled
from dmsae.experiments.lab import Lab
from dmsae.experiments.parts.cycles import by_cycle


def run(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return the cores of every cycle at each k; a k at which a cycle fails is named with the cause."""
    cycles, failures = [], {}
    for k in dict.fromkeys(scaled(lab.base.k, factor) for factor in grid.k_factors):
        try:
            done, _ = lab.distill(replace(lab.base, seed=seed, k=k, cycles=grid.sparsity_cycles))
        except TrainingError as error:  # a collapse is marked, not hidden
            failures[str(k)] = str(error)
            continue
        cycles += [{"run": f"k={k}", "k": k, "n_distilled": len(done.distilled), **one} for one in by_cycle(done)]
    return {"rows": [], "cycles": cycles, "failures": failures}
