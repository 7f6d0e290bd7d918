"""Where the metrics of a training go."""

import importlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from dmsae.errors import CheckpointError, ConfigError
from dmsae.training.metrics import MetricsLog, SinkName, StepMetrics, read_metrics
from zipf import trainer

pytestmark = pytest.mark.usefixtures("one_thread")

LINE = StepMetrics(
    step=1,
    tokens=64,
    loss=0.5,
    aux_loss=0.0,
    fve=0.2,
    fve_prefixes=[0.1, 0.2],
    l0_core=0.0,
    l0_noncore=4.0,
    l0_core_inference=0.0,
    l0_noncore_inference=3.5,
    fve_inference=0.15,
    dead_groups=[0, 1, 2],
    threshold=None,
    grad_norm=0.25,
    lr=1e-3,
)


def events(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard reads from a directory: the steps and values of each name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(directory))
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_lines_come_back(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, "a", (), {})
    log.write(LINE, 10.0)
    log.write(replace(LINE, step=2), 11.26)
    log.close()
    assert read_metrics(tmp_path) == [LINE, replace(LINE, step=2)]
    timing = [json.loads(line) for line in (tmp_path / "timing.jsonl").read_text().splitlines()]
    assert timing == [{"step": 1, "tokens_per_second": 10.0}, {"step": 2, "tokens_per_second": 11.3}]
    assert read_metrics(tmp_path / "nowhere") == []


def test_every_number_has_a_name_of_its_own() -> None:
    scalars = LINE.scalars()
    assert (scalars["fve_prefixes/1"], scalars["dead_groups/2"]) == (0.2, 2)
    assert "threshold" not in scalars  # there is none yet
    single = {key for key, value in asdict(LINE).items() if not isinstance(value, list)} - {"threshold"}
    assert set(scalars) - single == {"fve_prefixes/0", "fve_prefixes/1", *(f"dead_groups/{i}" for i in range(3))}


@pytest.mark.parametrize("damaged", ['{"step": 1', '{"step": "one"}', '{"step": 1, "mood": 3}', "[]"])
def test_a_damaged_line_is_named(tmp_path: Path, damaged: str) -> None:
    MetricsLog(tmp_path, "a").write(LINE, 1.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(damaged + "\n")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl is damaged"):
        read_metrics(tmp_path)


def test_what_came_after_the_checkpoint_is_dropped(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, "a", (), {})
    assert log.mark().size_bytes == 0
    log.write(LINE, 1.0)
    mark = log.mark()
    log.write(replace(LINE, step=2), 1.0)
    assert log.mark().size_bytes > mark.size_bytes
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # cut short by a kill
    MetricsLog(tmp_path, "a", (), {}, step=1, mark=mark).write(replace(LINE, step=2, loss=0.4), 1.0)
    assert read_metrics(tmp_path) == [LINE, replace(LINE, step=2, loss=0.4)]
    assert MetricsLog(tmp_path, "a", (), {}).mark().size_bytes == 0


@pytest.mark.parametrize("now", ["", '{"step": 1}\n', None])
def test_lost_or_changed_metrics_are_named_and_do_not_stop_a_run(tmp_path: Path, now: str | None) -> None:
    log = MetricsLog(tmp_path, "a", (), {})
    log.write(LINE, 1.0)
    mark = log.mark()
    (tmp_path / "metrics.jsonl").unlink()
    if now is not None:
        (tmp_path / "metrics.jsonl").write_text(now)
    resumed = MetricsLog(tmp_path, "a", (), {}, step=5, mark=mark)
    assert resumed.lost == tmp_path / "metrics.jsonl"
    resumed.write(replace(LINE, step=6), 1.0)
    assert read_metrics(tmp_path) == [replace(LINE, step=6)]
    assert MetricsLog(tmp_path, "a", (), {}, step=6, mark=resumed.mark()).lost is None


def test_tensorboard_shows_what_the_lines_hold(tmp_path: Path) -> None:
    (result,) = trainer(tmp_path / "run", log_to=("tensorboard",), log_every=20).run()
    logged = events(result.directory / "tensorboard")
    lines = read_metrics(result.directory)
    expected: dict[str, list[float | None]] = {
        name: [getattr(line, name) for line in lines]
        for name in ("loss", "fve", "l0_core", "l0_noncore_inference", "threshold", "grad_norm", "lr")
    }
    expected |= {f"fve_prefixes/{i}": [line.fve_prefixes[i] for line in lines] for i in range(3)}
    expected |= {f"dead_groups/{i}": [line.dead_groups[i] for line in lines] for i in range(4)}
    assert expected["threshold"].pop(0) is None, "there is none yet in the first step"
    for name, values in expected.items():
        assert [value for _, value in logged[name]] == pytest.approx(values)
    for name in (*expected, "tokens_per_second"):
        assert [step for step, _ in logged[name]] == [1, 20, 40, 60][name == "threshold" :]


def test_tensorboard_drops_what_a_resumed_run_repeats(tmp_path: Path) -> None:
    first = MetricsLog(tmp_path, "a", ("tensorboard",), {})
    for step in range(1, 6):
        first.write(replace(LINE, step=step, loss=1.0), 1.0)
    first.close()
    second = MetricsLog(tmp_path, "a", ("tensorboard",), {}, step=3)
    for step in range(4, 7):
        second.write(replace(LINE, step=step, loss=2.0), 1.0)
    second.close()
    values = [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0)]
    assert events(tmp_path / "tensorboard")["loss"] == values


class FakeWandb:
    """The part of Weights & Biases that is used."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.finished = False

    def init(self, **settings: Any) -> "FakeWandb":
        self.settings = settings
        return self

    def log(self, scalars: dict[str, float], step: int) -> None:
        self.lines.append((step, scalars))

    def finish(self) -> None:
        self.finished = True


def test_wandb_gets_a_run_with_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setattr(importlib, "import_module", lambda name: {"wandb": wandb}[name])
    (result,) = trainer(tmp_path / "run", log_to=("wandb",), log_every=20).run()
    assert wandb.settings["name"] == "sae"
    assert wandb.settings["config"]["train"]["lr"] == 1e-3
    assert [step for step, _ in wandb.lines] == [1, 20, 40, 60]
    last = wandb.lines[-1][1]
    assert result.metrics is not None
    assert last["loss"] == result.metrics.loss
    assert last["fve_prefixes/0"] == result.metrics.fve_prefixes[0]
    assert wandb.finished


@pytest.mark.parametrize("sink", ["tensorboard", "wandb"])
def test_a_sink_that_is_not_installed_is_named_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sink: SinkName
) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ConfigError, match=rf"log_to names '{sink}'.*pip install 'dmsae\[{sink}\]'"):
        trainer(tmp_path / "run", log_to=(sink,))
    assert list(tmp_path.iterdir()) == []
