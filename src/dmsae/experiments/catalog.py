"""The experiments: a question each, and the parts that answer it.

A part runs for one seed and is kept by itself; experiments share parts.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dmsae.config import Json, to_dict
from dmsae.errors import CheckpointError
from dmsae.evaluation import nulls
from dmsae.evaluation.measures import MEASURES
from dmsae.experiments.grid import Grid
from dmsae.experiments.lab import Lab
from dmsae.experiments.parts import (
    benchmark,
    capped,
    consensus,
    consistency,
    cycles,
    longer,
    paper,
    prices,
    random_core,
    regime,
    selection,
    sparsity,
    tau,
    uncapped,
    worth,
)
from dmsae.experiments.results import read_results, result_file


class Experiment(NamedTuple):
    """A question, and the parts that answer it."""

    question: str
    parts: tuple[str, ...]


class Part(NamedTuple):
    """Something that runs for one seed, and what of the grid it depends on."""

    run: Callable[[Lab, Grid, int], Json]
    varies: tuple[str, ...]
    needs: tuple[str, ...] = ()
    """Parts whose figures of all seeds it reads."""
    version: int = 1
    """Raise it when the same settings give other figures than before: those that are kept are then refused."""


PARTS = {
    "cycles": Part(cycles.run, ("max_rate", "cycles")),
    "prices": Part(prices.run, ("max_rate", "cycles", "priced_cycles", "rules", "random_cores"), version=2),
    "every-cycle": Part(prices.others, ("max_rate", "cycles", "priced_cycles", "rules", "random_cores")),
    "tau": Part(tau.run, ("coverages",)),
    "sparsity": Part(sparsity.run, ("k_factors", "sparsity_cycles")),
    "random-core": Part(random_core.run, ("random_k_factors", "norms", "random_token_factors")),
    "paper": Part(paper.run, ("random_cores",)),
    "longer": Part(longer.run, (), needs=("paper",)),
    "capped": Part(capped.run, ("max_rate", "rules")),
    "uncapped": Part(uncapped.run, ("rules",), version=2),
    "consensus": Part(consensus.run, ("max_rate", "members", "consensus")),
    "selection": Part(selection.run, ("ablated", "ablation_contexts")),
    "worth": Part(worth.run, ("random_cores", "measures")),
    "benchmark": Part(benchmark.run, ("max_rate", "benchmark_k_factors", "measures"), version=2),
    "consistency": Part(consistency.run, ("max_rate", "token_factors", "members", "consensus", "repeats"), version=3),
    "regime": Part(regime.run, ("max_rate", "regimes", "rules", "random_cores"), version=3),
    "confirmation": Part(
        regime.confirm, ("max_rate", "regimes", "rules", "random_cores"), needs=("regime",), version=3
    ),
}

EXPERIMENTS = {
    "cycles": Experiment("Does a subset of the first core persist, more than from a random start?", ("cycles",)),
    "tau": Experiment("How much attribution must a core hold?", ("tau",)),
    "sparsity": Experiment("At which k is most carried over from cycle to cycle?", ("sparsity",)),
    "random-core": Experiment("Does a random core decay while a distilled one stays in use?", ("random-core",)),
    "selection": Experiment(
        "What does gradient × activation buy over simpler rules?", ("capped", "uncapped", "selection")
    ),
    "benchmark": Experiment(
        "What is an SAE from a distilled core worth, against its measured L0, beside those people use?", ("benchmark",)
    ),
    "worth": Experiment(
        "What are SAEs with the first core worth by every measure, beside nulls, random cores, MSAE and BatchTopK?",
        ("worth",),
    ),
    "price": Experiment(
        "How many latents can be kept, holding how much of the attribution, at what price?",
        ("capped", "uncapped", "prices"),
    ),
    "every-cycle": Experiment(
        "What does each cycle add to the price? (the numbers of cycles that `price` passes over)", ("every-cycle",)
    ),
    "first-core": Experiment(
        "What does the first core cost in variance, loss and training, frozen as in the paper and as detectors?",
        ("paper", "longer"),
    ),
    "consistency": Experiment(
        "Do independent distillations find the same core, more than prefix-0s agree? What does a consensus cost?",
        ("consistency", "consensus"),
    ),
    "regime": Experiment(
        "Where does a distilled core beat its controls at matched L0, with fresh seeds?", ("regime", "confirmation")
    ),
}

ALL = tuple(name for name in EXPERIMENTS if name != "worth")
"""What `all` means. The scores of `worth` are those of `benchmark`, which costs as much; it is for larger scales."""


class Results(NamedTuple):
    """The figures that there are, and those that cannot be read beside them."""

    current: list[Json]
    outdated: list[str]
    """Names of files that an earlier version of their part made. Statistics and figures are for the present one."""


def current_results(directory: Path) -> Results:
    """Return the results in a directory, without those of earlier versions of their parts."""
    results = Results([], [])
    for one in read_results(directory):
        part = PARTS.get(one["part"])
        if part and one.get("settings", {"version": part.version}).get("version", 1) == part.version:
            results.current.append(one)
        else:
            results.outdated.append(result_file(directory, one["part"], one["seed"]).name)
    if not results.current:
        raise CheckpointError(f"{directory} holds nothing that the present version made. {outdated_note(results)}")
    return results


def outdated_note(results: Results) -> str:
    """Return which results are left out and what to do, or nothing."""
    if not results.outdated:
        return ""
    return (
        f"Left out, because an earlier version of their part made them: {', '.join(results.outdated)}. "
        "Remove them and run the experiment again."
    )


def settings_of(part: str, lab: Lab, grid: Grid) -> Json:
    """Return all that the figures of a part depend on, besides its seed."""
    versions = {name: MEASURES[name].version for name in grid.measures} | {"nulls": nulls.VERSION}
    return {
        "store": lab.store.key,
        "model": f"{lab.store.model.name} at {lab.store.model.hook}",
        "distill": lab.base.result_settings(),
        "grid": {name: value for name, value in to_dict(grid).items() if name in PARTS[part].varies},
        **({"versions": versions} if "measures" in PARTS[part].varies else {}),
        **({"version": version} if (version := PARTS[part].version) > 1 else {}),
    }
