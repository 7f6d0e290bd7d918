"""Evaluations on a mesh, importable by its ranks."""

import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from dictionaries import random_sae
from dmsae.activations.store import Store
from dmsae.errors import DmsaeError, StoreError
from dmsae.evaluation.evaluate import EvaluateConfig, evaluate
from dmsae.evaluation.measures import MEASURES
from dmsae.evaluation.redundancy import RedundancyConfig
from dmsae.evaluation.scores import Evaluation
from dmsae.sae.comms import Comms
from dmsae.sae.config import SAEConfig
from dmsae.training.crew import run_on_all
from dmsae.training.mesh import MeshConfig
from mesh_ranks import be_rank

QUICK = EvaluateConfig(
    measures=("fidelity", "redundancy", "activity"), settings={"redundancy": RedundancyConfig(meta_steps=20)}
)
"""Measures that take no time."""


class Evaluated(NamedTuple):
    """What a rank has after an evaluation."""

    evaluation: Evaluation | str
    """What it is given, or what it hears."""
    calls: list[str]
    """The subjects whose redundancy it measured."""


def evaluate_here(
    comms: Comms,
    store: Path,
    out: Path,
    names: tuple[str, ...],
    failing: int | None = None,
    pause: float = 0.0,
    max_width: int = 1 << 15,
) -> Evaluated:
    """Evaluate random SAEs; one rank may be unable to measure redundancy, and no rank to fit a decoder."""
    calls: list[str] = []
    measure = MEASURES["redundancy"]

    def noted(subjects: Any, **given: Any) -> Any:
        time.sleep(pause)
        if comms.both.rank == failing:
            raise StoreError(f"rank {failing} is out of luck")
        calls.extend(subject.name for subject in subjects)
        return measure.function(subjects, **given)

    saes = {name: random_sae(SAEConfig(32, 64, 4, (16, 64)), seed, 0.2) for seed, name in enumerate(names)}
    with (
        patch.dict(MEASURES, {"redundancy": measure._replace(function=noted)}),
        patch("dmsae.evaluation.ridge._MAX_WIDTH", max_width),
    ):
        return Evaluated(evaluate(saes, Store.open(store), out, QUICK, everyone=comms.both), calls)


def hear_of_evaluation(comms: Comms, *args: Any) -> str:
    """Evaluate, and return what each rank hears."""
    try:
        evaluate_here(comms, *args)
    except DmsaeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def evaluate_as_rank(rank: int, port: int, shape: tuple[int, int], store: Path, out: Path, pause: float) -> None:
    """Evaluate as a rank that may be killed; it pauses, so that there is a middle to be killed in."""
    mesh = MeshConfig(*shape, timeout_seconds=20)

    def command(comms: Comms) -> None:
        evaluate_here(comms, store, out, ("a", "b"), None, pause)

    be_rank(rank, port, mesh, out.parent, command, run_on_all)
