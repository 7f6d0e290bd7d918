"""The experiments: a question each, and the parts that answer it.

A part runs for one seed and is kept by itself; experiments share parts.
"""

from collections.abc import Callable
from typing import NamedTuple

from dmsae.config import Json, to_dict
from dmsae.experiments.grid import Grid
from dmsae.experiments.lab import Lab
from dmsae.experiments.parts import (
    benchmark,
    capped,
    consensus,
    consistency,
    cycles,
    paper,
    random_core,
    regime,
    selection,
    sparsity,
    tau,
)


class Experiment(NamedTuple):
    """A question, and the parts that answer it."""

    question: str
    parts: tuple[str, ...]


PARTS: dict[str, Callable[[Lab, Grid, int], Json]] = {
    "cycles": cycles.run,
    "tau": tau.run,
    "sparsity": sparsity.run,
    "random-core": random_core.run,
    "paper": paper.run,
    "capped": capped.run,
    "consensus": consensus.run,
    "selection": selection.run,
    "benchmark": benchmark.run,
    "consistency": consistency.run,
    "regime": regime.run,
    "confirmation": regime.confirm,
}

EXPERIMENTS = {
    "cycles": Experiment("Does a subset of the first core persist, more than from a random start?", ("cycles",)),
    "tau": Experiment("How much attribution must a core hold?", ("tau",)),
    "sparsity": Experiment("At which k is most carried over from cycle to cycle?", ("sparsity",)),
    "random-core": Experiment("Does a random core decay while a distilled one stays in use?", ("random-core",)),
    "selection": Experiment("What does gradient × activation buy over simpler rules?", ("capped", "selection")),
    "benchmark": Experiment(
        "What is an SAE from a distilled core worth, against its measured L0, beside those people use?", ("benchmark",)
    ),
    "price": Experiment(
        "How many latents can be kept, holding how much of the attribution, at what price?",
        ("paper", "capped", "consensus", "cycles"),
    ),
    "consistency": Experiment(
        "Do independent distillations find the same core, more than their prefix-0s agree?", ("consistency",)
    ),
    "regime": Experiment(
        "Where do detectors beat every control at matched L0, with fresh seeds?", ("regime", "confirmation")
    ),
}


def settings_of(lab: Lab, grid: Grid) -> Json:
    """Return all that the figures of a part depend on, besides its seed."""
    return {
        "store": lab.store.key,
        "model": f"{lab.store.model.name} at {lab.store.model.hook}",
        "distill": lab.base.result_settings(),
        "grid": to_dict(grid),
    }
