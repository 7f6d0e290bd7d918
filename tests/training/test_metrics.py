"""Where the metrics of a training go."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dmsae.errors import ConfigError
from dmsae.training.metrics import MetricsLog, read_metrics
from zipf import one_thread, trainer

LINE = {"step": 1, "loss": 0.5, "fve_prefixes": [0.1, 0.2], "threshold": None}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with one_thread():
        yield


def events(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard reads from a directory: the steps and values of each name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory))
    found.Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_lines_come_back(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, "a", (), {})
    log.write(LINE, 10.0)
    log.write(LINE | {"step": 2}, 11.26)
    log.close()
    assert read_metrics(tmp_path) == [LINE, LINE | {"step": 2}]
    timing = [json.loads(line) for line in (tmp_path / "timing.jsonl").read_text().splitlines()]
    assert timing == [{"step": 1, "tokens_per_second": 10.0}, {"step": 2, "tokens_per_second": 11.3}]
    assert read_metrics(tmp_path / "nowhere") == []


def test_what_came_after_the_checkpoint_is_forgotten(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, "a", (), {})
    assert log.mark() == 0
    log.write(LINE, 1.0)
    size = log.mark()
    log.write(LINE | {"step": 2}, 1.0)
    assert log.mark() > size
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # cut short by a kill
    MetricsLog(tmp_path, "a", (), {}, step=1, size_bytes=size).write(LINE | {"step": 2, "loss": 0.4}, 1.0)
    assert read_metrics(tmp_path) == [LINE, LINE | {"step": 2, "loss": 0.4}]
    assert MetricsLog(tmp_path, "a", (), {}).mark() == 0


def test_lost_metrics_do_not_stop_a_run(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, "a", (), {}, step=5, size_bytes=1000)
    log.write(LINE, 1.0)
    assert read_metrics(tmp_path) == [LINE]


def test_tensorboard_gets_what_the_lines_hold(tmp_path: Path) -> None:
    (outcome,) = trainer(tmp_path / "run", log_to=("tensorboard",), log_every=20).run()
    found = events(outcome.directory / "tensorboard")
    lines = read_metrics(outcome.directory)
    for name in ("loss", "fve", "l0_core", "l0_noncore_inference", "threshold", "grad_norm", "lr"):
        assert found[name] == [(line["step"], pytest.approx(line[name])) for line in lines]
    for name, n_items in (("fve_prefixes", 3), ("dead_groups", 4)):
        for i in range(n_items):
            assert found[f"{name}/{i}"] == [(line["step"], pytest.approx(line[name][i])) for line in lines]
    assert [step for step, _ in found["tokens_per_second"]] == [20, 40, 60]


def test_tensorboard_forgets_what_a_resumed_run_repeats(tmp_path: Path) -> None:
    first = MetricsLog(tmp_path, "a", ("tensorboard",), {})
    for step in range(1, 6):
        first.write({"step": step, "loss": 1.0}, 1.0)
    first.close()
    second = MetricsLog(tmp_path, "a", ("tensorboard",), {}, step=3)
    for step in range(4, 7):
        second.write({"step": step, "loss": 2.0}, 1.0)
    second.close()
    values = [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0)]
    assert events(tmp_path / "tensorboard")["loss"] == values


class StandIn:
    """As much of Weights & Biases as is used."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.finished = False

    def init(self, **settings: Any) -> "StandIn":
        self.settings = settings
        return self

    def log(self, scalars: dict[str, float], step: int) -> None:
        self.lines.append((step, scalars))

    def finish(self) -> None:
        self.finished = True


def test_wandb_gets_a_run_with_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = StandIn()
    monkeypatch.setattr(importlib, "import_module", lambda name: {"wandb": wandb}[name])
    (outcome,) = trainer(tmp_path / "run", log_to=("wandb",), log_every=20).run()
    assert wandb.settings["name"] == "sae"
    assert wandb.settings["config"]["train"]["lr"] == 1e-3
    assert [step for step, _ in wandb.lines] == [20, 40, 60]
    last = wandb.lines[-1][1]
    assert last["loss"] == outcome.metrics["loss"]
    assert last["fve_prefixes/0"] == outcome.metrics["fve_prefixes"][0]
    assert wandb.finished


@pytest.mark.parametrize("sink", ["tensorboard", "wandb"])
def test_a_sink_that_is_not_installed_is_named_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sink: str
) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ConfigError, match=rf"log_to names '{sink}'.*pip install 'dmsae\[{sink}\]'"):
        trainer(tmp_path / "run", log_to=(sink,))
    assert list(tmp_path.iterdir()) == []
