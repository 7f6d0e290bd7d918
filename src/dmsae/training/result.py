"""How the training of an SAE ended, as its directory tells it."""

from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from dmsae.config import from_dict
from dmsae.disk import layout
from dmsae.disk.artifact import read_sealed
from dmsae.errors import CheckpointError, ConfigError, TrainingError
from dmsae.training.metrics import StepMetrics, require_written_metrics


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
    if not path.is_file():
        raise CheckpointError(f"{directory} holds no finished training: {path} is missing.")
    remedy = "Restore it; or remove it, and the same command trains this SAE again."
    status = read_sealed(path, remedy, must_be_sealed=False)
    try:
        state = TrainState(status["state"])
        metrics = from_dict(StepMetrics, status["metrics"]) if status["metrics"] else None
        step, cause = int(status["step"]), str(status["cause"])
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        raise CheckpointError(f"{path} is not the status of a training run: {error!r}. {remedy}") from error
    require_written_metrics(directory, status.get("metrics_sha256"))
    return TrainResult(directory.name, directory, state, step, cause, metrics)


def require_one_usable(results: list[TrainResult]) -> list[TrainResult]:
    """Return the results, unless every training diverged."""
    first = results[0]
    if all(result.state is TrainState.DIVERGED for result in results):
        raise TrainingError(
            f"Training diverged after step {first.step}: {first.cause}. The SAE as it was after that step is saved in "
            f"{first.directory}. Try a lower lr, a longer warm-up, or a smaller k, in a new directory."
        )
    return results
