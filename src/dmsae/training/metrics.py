"""What a training run tells while it runs: JSON lines always, TensorBoard and Weights & Biases on request.

`metrics.jsonl` holds only what the numbers of the run determine, so that a run that was killed and resumed writes the
same bytes as one that never was. What the clock says stands apart, in `timing.jsonl`.
"""

import importlib
import json
import os
from pathlib import Path
from typing import Any, Literal

from dmsae.errors import ConfigError

Sink = Literal["tensorboard", "wandb"]
_METRICS, _TIMING = "metrics.jsonl", "timing.jsonl"
_MODULES: dict[Sink, str] = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


class MetricsLog:
    """The metrics of one SAE in training, from the beginning or from a checkpoint on."""

    def __init__(
        self,
        directory: Path,
        name: str,
        sinks: tuple[Sink, ...],
        settings: dict[str, Any],
        step: int = 0,
        size_bytes: int = 0,
    ) -> None:
        """Forget what was written after `step`, when the file had `size_bytes`; W&B gets a new run for the rest."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._tensorboard: Any = None
        self._wandb: Any = None
        path = directory / _METRICS
        path.touch()
        os.truncate(path, min(size_bytes, path.stat().st_size))
        if "tensorboard" in sinks:
            writer = _import("tensorboard").SummaryWriter
            self._tensorboard = writer(os.fspath(directory / "tensorboard"), purge_step=step + 1)
        if "wandb" in sinks:
            self._wandb = _import("wandb").init(
                project="dmsae", name=name, dir=os.fspath(directory), config=settings, reinit="create_new"
            )

    def mark(self) -> int:
        """Bring what was written to the disk, and return its size: what a checkpoint has to remember."""
        with (self._directory / _METRICS).open("rb") as file:
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_size

    def write(self, metrics: dict[str, Any], tokens_per_second: float) -> None:
        """Note the state of one step."""
        _append(self._directory / _METRICS, metrics)
        _append(self._directory / _TIMING, {"step": metrics["step"], "tokens_per_second": round(tokens_per_second, 1)})
        scalars = _scalars(metrics) | {"tokens_per_second": tokens_per_second}
        if self._tensorboard is not None:
            for key, value in scalars.items():
                self._tensorboard.add_scalar(key, value, metrics["step"])
        if self._wandb is not None:
            self._wandb.log(scalars, step=metrics["step"])

    def close(self) -> None:
        """Flush what goes elsewhere."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def require_sinks(sinks: tuple[Sink, ...]) -> None:
    """Raise unless all of them are installed."""
    for sink in sinks:
        _import(sink)


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Return the metrics in a training directory, oldest first."""
    path = directory / _METRICS
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()]


def _append(path: Path, record: dict[str, Any]) -> None:
    with path.open("a", encoding="utf8") as file:
        file.write(json.dumps(record) + "\n")


def _scalars(metrics: dict[str, Any]) -> dict[str, float]:
    flat: dict[str, float] = {}
    for key, value in metrics.items():
        if isinstance(value, list):
            flat |= {f"{key}/{i}": item for i, item in enumerate(value)}
        elif isinstance(value, int | float):
            flat[key] = value
    return flat


def _import(sink: Sink) -> Any:
    try:
        return importlib.import_module(_MODULES[sink])
    except ImportError as error:
        raise ConfigError(f"log_to names {sink!r}, which is not installed. Run: pip install 'dmsae[{sink}]'") from error
