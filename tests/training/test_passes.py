"""SAEs that do not fit together train on passes of their own, to the same bytes, however a run is interrupted."""

from pathlib import Path

import pytest
import torch

from dmsae.activations.sources import as_source
from dmsae.disk.checkpoint import read_state
from dmsae.errors import CheckpointError, ConfigError
from dmsae.sae.config import CoreMode, SAEConfig
from dmsae.training import passes, trainer
from dmsae.training.config import TrainConfig
from dmsae.training.learner import SAESpec
from dmsae.training.trainer import train_together

ROWS = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
SOURCE = as_source(torch.randn(1024, 16, generator=torch.Generator().manual_seed(0)).relu())
SPECS = [
    SAESpec("dense", SAEConfig(16, 64, 4, (12, 64), CoreMode.DENSE.core(4, 3)), ROWS),
    *(SAESpec(f"plain-{k}", SAEConfig(16, 64, k, (8, 64))) for k in (2, 3, 4, 5)),
]


def config(at_once: int | None, **settings: float) -> TrainConfig:
    return TrainConfig(tokens=64 * 20, batch_size=64, device="cpu", saes_at_once=at_once, log_every=5, **settings)  # type: ignore[arg-type]


def content(run: Path) -> dict[str, bytes]:
    files = (path for path in sorted(run.rglob("*")) if path.is_file() and path.name not in ("timing.jsonl", ".lock"))
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("together") / "run"
    train_together(SPECS, SOURCE, place, config(None))
    return place


@pytest.mark.parametrize("at_once", [1, 2, 5, 9])
def test_passes_give_what_one_pass_gives(together: Path, tmp_path: Path, at_once: int) -> None:
    results = train_together(SPECS, SOURCE, tmp_path / "run", config(at_once))
    assert [result.name for result in results] == [spec.name for spec in SPECS]
    assert content(tmp_path / "run") == content(together)


class _Interrupted(Exception):
    pass


@pytest.mark.parametrize("stop_at", [3, 20, 27, 41])
def test_a_pass_that_was_interrupted_goes_on_even_if_more_would_fit_now(
    together: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    """Two SAEs to a pass of 20 steps; every step is saved, and the run dies just after one."""
    taken, save = 0, passes.Pass._save

    def save_and_die(self: passes.Pass) -> None:
        nonlocal taken
        save(self)
        taken += 1
        if taken == stop_at:
            raise _Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(passes.Pass, "_save", save_and_die)
        with pytest.raises(_Interrupted):
            train_together(SPECS, SOURCE, tmp_path / "run", config(2, checkpoint_seconds=0))
    begun = set(read_state(tmp_path / "run" / "checkpoint.safetensors")["learners"])
    assert begun == {spec.name for spec in SPECS[2 * ((stop_at - 1) // 20) :][:2]}
    train_together(SPECS, SOURCE, tmp_path / "run", config(3))
    assert content(tmp_path / "run") == content(together)


def test_a_checkpoint_of_a_finished_pass_is_passed_over(
    together: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run dies after the first pass has written its SAEs, before its last checkpoint is gone."""
    calls = 0
    next_pass = trainer.Trainer._next_pass

    def die_later(self: trainer.Trainer) -> list[str]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise _Interrupted
        return next_pass(self)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_next_pass", die_later)
        with pytest.raises(_Interrupted):
            train_together(SPECS, SOURCE, tmp_path / "run", config(2, checkpoint_seconds=0))
    assert (tmp_path / "run" / "checkpoint.safetensors").is_file()
    train_together(SPECS, SOURCE, tmp_path / "run", config(2))
    assert content(tmp_path / "run") == content(together)


def test_a_checkpoint_of_another_run_is_not_thrown_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(passes.Pass, "_finish", lambda _self: (_ for _ in ()).throw(_Interrupted))
        for name, specs in (("one", SPECS[:1]), ("other", SPECS[1:])):
            with pytest.raises(_Interrupted):
                train_together(specs, SOURCE, tmp_path / name, config(1, checkpoint_seconds=0))
    foreign, place = (tmp_path / name / "checkpoint.safetensors" for name in ("one", "other"))
    foreign.replace(place)
    before = place.read_bytes()
    with pytest.raises(CheckpointError, match="belongs to another run"):
        train_together(SPECS[1:], SOURCE, tmp_path / "other", config(1))
    assert place.read_bytes() == before


def test_at_least_one_sae_trains_at_a_time() -> None:
    with pytest.raises(ConfigError, match="saes_at_once = 0"):
        config(0)
