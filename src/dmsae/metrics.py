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


class MetricsLog:
    """The metrics of one SAE in training."""

    def __init__(self, directory: Path, name: str, sinks: tuple[Sink, ...], settings: dict[str, Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._tensorboard: Any = None
        self._wandb: Any = None
        if "tensorboard" in sinks:
            writer = _import("torch.utils.tensorboard", "tensorboard").SummaryWriter
            self._tensorboard = writer(os.fspath(directory / "tensorboard"))
        if "wandb" in sinks:
            self._wandb = _import("wandb", "wandb").init(
                project="dmsae", name=name, dir=os.fspath(directory), config=settings, reinit="create_new"
            )

    @property
    def size_bytes(self) -> int:
        """How much has been written: what a checkpoint has to remember."""
        path = self._directory / _METRICS
        return path.stat().st_size if path.exists() else 0

    def rewind(self, size_bytes: int) -> None:
        """Forget what was written after a checkpoint."""
        if self.size_bytes > size_bytes:
            os.truncate(self._directory / _METRICS, size_bytes)

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


def _import(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"log_to names {extra!r}, which is not installed. Run: pip install 'dmsae[{extra}]'"
        ) from error
