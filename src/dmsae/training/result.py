"""How the training of an SAE ended, as its directory tells it."""

import json
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from dmsae.config import from_dict
from dmsae.disk import layout
from dmsae.errors import CheckpointError, ConfigError
from dmsae.training.metrics import StepMetrics


class TrainState(StrEnum):
    """Whether an SAE is still in training, and if not, how it ended."""

    TRAINING = "training"
    FINISHED = "finished"
    COLLAPSED = "collapsed"
    DIVERGED = "diverged"
    OVER_BUDGET = "over budget"
    """Trained to the end, but its core alone is more active than the total budget allows."""


class TrainResult(NamedTuple):
    """How the training of one SAE ended."""

    name: str
    directory: Path
    state: TrainState
    step: int
    """Steps taken."""
    cause: str
    """Why it did not finish, empty when it did."""
    metrics: StepMetrics | None
    """The last line of its metrics, if it got that far."""


def read_result(directory: Path) -> TrainResult:
    """Return how the training of the SAE in a directory ended."""
    path = directory / layout.STATUS
    try:
        status = json.loads(path.read_text(encoding="utf8"))
        state = TrainState(status["state"])
        metrics = from_dict(StepMetrics, status["metrics"]) if status["metrics"] else None
        return TrainResult(directory.name, directory, state, status["step"], status["cause"], metrics)
    except FileNotFoundError:
        raise CheckpointError(f"{directory} holds no finished training: {path} is missing.") from None
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        raise CheckpointError(f"{path} is not the status of a training run: {error!r}.") from error
