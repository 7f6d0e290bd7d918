"""How a distillation ends: with more cycles than it began with, or with a cycle that fails."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from dmsae.cores.attribution import AttributionConfig
from dmsae.cores.core import Core
from dmsae.disk.files import sha256_of
from dmsae.distillation.distill import Distillation, DistillConfig, distill
from dmsae.distillation.status import StageState, stages
from dmsae.errors import AttributionError, ConfigError, StoreError, TrainingError
from dmsae.sae.objective import BatchResult
from dmsae.training.config import TrainConfig
from dmsae.training.learner import Learner
from dmsae.training.result import TrainState
from planted import Planted, planted_store

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = DistillConfig(
    width=64,
    k=2,
    nesting=(16, 64),
    cycles=1,
    train=TrainConfig(tokens=60 * 64, batch_size=64, lr=3e-3, log_every=5, device="cpu"),
    attribution=AttributionConfig(quantile=0.95, batch_size=64),
)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return planted_store(tmp_path_factory.mktemp("planted") / "store")


def summary(run: Path, name: str = "summary.json") -> dict[str, object]:
    read: dict[str, object] = json.loads((run / name).read_text())
    return read


def hashes(run: Path) -> dict[str, str]:
    return {str(file.relative_to(run)): sha256_of(file) for file in run.rglob("*.safetensors")}


def test_more_cycles_continue_a_finished_run_and_keep_what_it_gave(planted: Planted, tmp_path: Path) -> None:
    run = tmp_path / "run"
    short = distill(CONFIG, planted.store, run)
    before, first_summary = hashes(run), summary(run)
    longer = distill(replace(CONFIG, cycles=3), planted.store, run)
    whole = distill(replace(CONFIG, cycles=3), planted.store, tmp_path / "whole")
    assert longer.distilled.digest() == whole.distilled.digest() == Core.load(run).digest()
    assert summary(run) == summary(tmp_path / "whole")
    assert summary(run, "summary-1.json") == first_summary
    assert Core.load(run / "distilled-1").digest() == short.distilled.digest()
    after = hashes(run)
    kept = {name: digest for name, digest in before.items() if not name.startswith("distilled")}
    assert kept.items() <= after.items(), "a finished cycle was made again"
    assert {core.provenance.config.get("cycles") for core in longer.cores} == {None}, "cores of one run would differ"
    assert all(stage.state is StageState.DONE for stage in stages(run))


def test_a_run_that_was_killed_while_it_put_its_results_aside_ends_the_same(planted: Planted, tmp_path: Path) -> None:
    run = tmp_path / "run"
    distill(CONFIG, planted.store, run)
    (run / "distilled").rename(run / "distilled-1")  # killed here, before the summary was moved
    distill(replace(CONFIG, cycles=2), planted.store, run)
    assert sorted(file.name for file in run.glob("[ds]*")) == [
        "distilled",
        "distilled-1",
        "summary-1.json",
        "summary.json",
    ]
    assert Core.load(run / "distilled-1").cycle == 1
    assert Core.load(run).cycle == 2


def test_fewer_cycles_than_there_are_is_an_error(planted: Planted, tmp_path: Path) -> None:
    distill(replace(CONFIG, cycles=2), planted.store, tmp_path / "run")
    before = summary(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"cycles = 1; it must be at least 2, because .* has already begun cycle 2"):
        distill(CONFIG, planted.store, tmp_path / "run")
    assert summary(tmp_path / "run") == before


def doomed(monkeypatch: pytest.MonkeyPatch, at_cycle: int, state: TrainState) -> list[int]:
    """Make every training from some cycle on collapse or diverge; return a list that grows with each step taken."""
    steps: list[int] = []
    seen: list[Learner] = []
    advance = Learner.advance

    def watched(learner: Learner, step: int, x_BD: Tensor, batch_variance: float) -> BatchResult:
        if not any(one is learner for one in seen):
            seen.append(learner)
        steps.append(step)
        if seen.index(learner) < at_cycle:
            return advance(learner, step, x_BD, batch_variance)
        if state is TrainState.DIVERGED:
            x_BD = x_BD * float("inf")
        return advance(learner, step, x_BD, 1e-9 * batch_variance)  # of so little it explains nothing

    monkeypatch.setattr(Learner, "advance", watched)
    return steps


def failed(
    planted: Planted, run: Path, monkeypatch: pytest.MonkeyPatch, at_cycle: int, state: TrainState
) -> tuple[str, list[int]]:
    """Run a distillation of three cycles, one of which fails; return what it says, and its steps."""
    steps = doomed(monkeypatch, at_cycle, state)
    with pytest.raises(TrainingError) as error:
        distill(replace(CONFIG, cycles=3), planted.store, run)
    return str(error.value), steps


@pytest.mark.parametrize("state", [TrainState.COLLAPSED, TrainState.DIVERGED])
def test_a_failure_in_a_late_cycle_keeps_what_the_others_gave(
    state: TrainState, planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    error, steps = failed(planted, run, monkeypatch, 2, state)
    assert f"Cycle 2 {state} at step" in error
    assert f"cycles 0 and 1 agree on: {run / 'distilled'}" in error
    core = Core.load(run)
    assert core.cycle == 1
    told = summary(run)
    assert told["n_distilled"] == len(core)
    assert isinstance(told["cycles"], list)
    assert len(told["cycles"]) == 2
    assert isinstance(told["failure"], dict)
    assert told["failure"]["cycle"] == 2
    assert told["failure"]["cause"].startswith(f"{state} at step")

    listed = {stage.name: stage for stage in stages(run)}
    assert listed["cycle 2: train"].state is StageState.FAILED
    assert listed["distilled core"].state is StageState.DONE
    assert "cycle 3: train" not in listed
    assert not any(stage.is_open for stage in listed.values())

    before, n_steps = hashes(run), len(steps)
    with pytest.raises(TrainingError) as again:
        distill(replace(CONFIG, cycles=3), planted.store, run)
    assert str(again.value) == error
    assert len(steps) == n_steps, "the cycle that collapsed was trained again"
    assert hashes(run) == before


@pytest.mark.parametrize(("cycle", "message"), [(0, "There is no core"), (1, "The core of cycle 0 is in")])
def test_a_collapse_before_two_cores_leaves_no_distilled_core(
    cycle: int, message: str, planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, _ = failed(planted, tmp_path / "run", monkeypatch, cycle, TrainState.COLLAPSED)
    assert message in error
    assert not (tmp_path / "run" / "distilled").exists()
    assert summary(tmp_path / "run")["n_distilled"] is None
    assert [one.state for one in stages(tmp_path / "run")][-2:] == [StageState.FAILED, StageState.FAILED]


def test_scores_that_select_nothing_end_the_run_like_a_collapse(
    planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = distill(CONFIG, planted.store, tmp_path / "run")
    assert isinstance(done, Distillation)

    def zero(*_: object) -> None:
        raise AttributionError("The attribution of all 16 candidate latents is zero")

    monkeypatch.setattr("dmsae.distillation.distill.attribute_on", zero)
    with pytest.raises(TrainingError, match="Cycle 2 cannot be scored: The attribution of all 16"):
        distill(replace(CONFIG, cycles=2), planted.store, tmp_path / "run")
    assert Core.load(tmp_path / "run").digest() == done.distilled.digest()
    assert len(Core.load(tmp_path / "run")) == summary(tmp_path / "run")["n_distilled"]


def test_a_start_that_fails_leaves_no_directory(planted: Planted, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine"
    with pytest.raises(StoreError, match="fewer activations than batch_size"):
        distill(replace(CONFIG, train=TrainConfig(tokens=10_000, batch_size=9_000)), planted.store, run)
    assert not run.parent.exists()
    distill(CONFIG, planted.store, run)


def test_a_store_without_pairs_is_refused_before_anything_is_trained(planted: Planted, tmp_path: Path) -> None:
    store = planted_store(tmp_path / "store").store
    store.records = [record for record in store.records if not record.file.startswith("pairs/")]
    with pytest.raises(StoreError, match=r"holds no \(x, g\) pairs"):
        distill(CONFIG, store, tmp_path / "run")
    assert not (tmp_path / "run").exists()
