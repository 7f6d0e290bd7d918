"""What a training run reports while it runs: JSON lines always, TensorBoard and Weights & Biases on request.

`metrics.jsonl` holds only what the run's numbers determine, so a run that was killed and resumed writes the same bytes
as one that never was. Timings are kept separate, in `timing.jsonl`.
"""

import hashlib
import importlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from dmsae.config import Json, from_dict
from dmsae.disk import layout
from dmsae.disk.artifact import read_sealed
from dmsae.disk.files import append_text, parse_json
from dmsae.errors import CheckpointError, ConfigError, first_line

SinkName = Literal["tensorboard", "wandb"]
_MODULES: dict[SinkName, str] = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What is logged of one SAE at one step."""

    step: int
    tokens: int
    loss: float
    """The objective."""
    aux_loss: float
    fve: float
    """Fraction of the batch's variance that the full reconstruction explains, with BatchTopK."""
    fve_prefixes: list[float]
    """The same for each prefix."""
    l0_core: float
    l0_noncore: float
    l0_core_inference: float
    """Active core latents per token with inference thresholds, on a part of the batch."""
    l0_noncore_inference: float
    fve_inference: float
    dead_groups: list[int]
    """Dead latents in the core and in each prefix group."""
    threshold: float | None
    """The inference threshold so far, for raw activations."""
    grad_norm: float
    lr: float

    def scalars(self) -> dict[str, float]:
        """Return every number under a name of its own."""
        flat: dict[str, float] = {}
        for key, value in asdict(self).items():
            if isinstance(value, list):
                flat |= {f"{key}/{i}": item for i, item in enumerate(value)}
            elif value is not None:
                flat[key] = value
        return flat


class Mark(NamedTuple):
    """What `metrics.jsonl` was at some moment."""

    size_bytes: int
    sha256: str | None
    """None: an earlier version did not record it."""


class Sink(Protocol):
    """Somewhere that the metrics of one SAE go."""

    def write(self, metrics: StepMetrics, tokens_per_second: float) -> None:
        """Take in the metrics of one step."""

    def close(self) -> None:
        """Flush what is left."""


class JsonLines:
    """`metrics.jsonl` and `timing.jsonl` in a training directory."""

    def __init__(self, directory: Path, mark: "Mark | None" = None) -> None:
        """Go back to what `metrics.jsonl` was at a mark; to nothing without one, or when it is not what it was."""
        directory.mkdir(parents=True, exist_ok=True)
        self.path, self._timing = directory / layout.METRICS, directory / layout.TIMING
        self.path.touch()
        there = _mark(self.path, mark.size_bytes) if mark else None
        self.lost = there is not None and mark is not None and mark.sha256 not in (None, there.sha256)
        os.truncate(self.path, there.size_bytes if there and not self.lost else 0)

    def write(self, metrics: StepMetrics, tokens_per_second: float) -> None:
        """Append a line to each file."""
        _append(self.path, asdict(metrics))
        _append(self._timing, {"step": metrics.step, "tokens_per_second": round(tokens_per_second, 1)})

    def mark(self) -> Mark:
        """Sync `metrics.jsonl` to the disk and return what a checkpoint has to remember of it."""
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
        return _mark(self.path)

    def close(self) -> None:
        """Do nothing: every line is written as it comes."""


class TensorBoard:
    """Event files in a training directory; those after `step` are purged on resuming."""

    def __init__(self, directory: Path, step: int) -> None:
        writer = _import("tensorboard").SummaryWriter
        self._writer = writer(os.fspath(directory / layout.TENSORBOARD), purge_step=step + 1)

    def write(self, metrics: StepMetrics, tokens_per_second: float) -> None:
        """Add every scalar."""
        for key, value in (metrics.scalars() | {"tokens_per_second": tokens_per_second}).items():
            self._writer.add_scalar(key, value, metrics.step)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class Wandb:
    """A Weights & Biases run; resuming a training starts a new one for the rest."""

    def __init__(self, directory: Path, name: str, settings: Json) -> None:
        self._run = _import("wandb").init(
            project="dmsae", name=name, dir=os.fspath(directory), config=settings, reinit="create_new"
        )

    def write(self, metrics: StepMetrics, tokens_per_second: float) -> None:
        """Log every scalar."""
        self._run.log(metrics.scalars() | {"tokens_per_second": tokens_per_second}, step=metrics.step)

    def close(self) -> None:
        """End the W&B run."""
        self._run.finish()


class MetricsLog:
    """All sinks of one SAE in training, from the beginning or from a checkpoint on."""

    def __init__(
        self,
        directory: Path,
        name: str,
        sinks: tuple[SinkName, ...] = (),
        settings: Json | None = None,
        step: int = 0,
        mark: Mark | None = None,
    ) -> None:
        """Forget what was written after `step`, when `metrics.jsonl` was as marked."""
        self._lines = JsonLines(directory, mark)
        self._sinks: list[Sink] = [self._lines]
        if "tensorboard" in sinks:
            self._sinks.append(TensorBoard(directory, step))
        if "wandb" in sinks:
            self._sinks.append(Wandb(directory, name, settings or {}))

    def write(self, metrics: StepMetrics, tokens_per_second: float) -> None:
        """Send the metrics of one step to every sink."""
        for sink in self._sinks:
            sink.write(metrics, tokens_per_second)

    @property
    def lost(self) -> Path | None:
        """The `metrics.jsonl` that is no longer what it was at the checkpoint, and has been started again."""
        return self._lines.path if self._lines.lost else None

    def mark(self) -> Mark:
        """Return what `metrics.jsonl` is now, synced to the disk."""
        return self._lines.mark()

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


def require_sinks(sinks: tuple[SinkName, ...]) -> None:
    """Raise unless all of them are installed."""
    for sink in sinks:
        _import(sink)


def read_metrics(directory: Path) -> list[StepMetrics]:
    """Return the metrics in a training directory, oldest first; none when it has none."""
    path, status = directory / layout.METRICS, directory / layout.STATUS
    if status.is_file():
        require_written_metrics(directory, read_sealed(status, must_be_sealed=False).get("metrics_sha256"))
    if not path.exists():
        return []
    try:
        return [from_dict(StepMetrics, parse_json(line)) for line in path.read_text(encoding="utf8").splitlines()]
    except (ValueError, ConfigError) as error:
        raise CheckpointError(f"{path} is damaged: {first_line(error)}. Restore it.") from error


def require_written_metrics(directory: Path, sha256: str | None) -> None:
    """Raise unless the metrics of a finished training are as they were written; None: that was not recorded."""
    path = directory / layout.METRICS
    if sha256 is not None and not path.is_file():
        raise CheckpointError(f"{path} is missing. Restore it.")
    if sha256 is not None and _mark(path).sha256 != sha256:
        raise CheckpointError(f"{path} has changed since the training ended. Restore it.")


def _mark(path: Path, size_bytes: int = -1) -> Mark:
    """Return what a file, or its beginning, is."""
    with path.open("rb") as file:
        data = file.read(size_bytes)
    return Mark(len(data), hashlib.sha256(data).hexdigest())


def _append(path: Path, record: Json) -> None:
    append_text(path, json.dumps(record) + "\n")


def _import(sink: SinkName) -> Any:
    try:
        return importlib.import_module(_MODULES[sink])
    except ImportError as error:
        raise ConfigError(f"log_to names {sink!r}, which is not installed. Run: pip install 'dmsae[{sink}]'") from error
