"""The training loop: many SAEs from one stream, and everything that can go wrong with it."""

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dmsae.activations.store import Split, StoreWriter, shard_file
from dmsae.activations.stream import ActivationStream, StoreGroups
from dmsae.errors import CheckpointError, ConfigError, TrainingError
from dmsae.sae.objective import BatchResult, backward_, step_
from dmsae.sae.sae import SAE, CoreMode, load_sae
from dmsae.training import learner as learner_module
from dmsae.training.learner import Member, State
from dmsae.training.metrics import read_metrics
from dmsae.training.schedule import TrainConfig
from dmsae.training.trainer import CHECKPOINT, Trainer, geometric_median, read_outcome
from zipf import SHORT, Zipf, one_thread, small_sae, trainer

CORE = 0.3 * torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
WITH_CORE: dict[str, Any] = {"n_core": 5, "prefixes": (13, 29, 48)}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with one_thread():
        yield


def weights(directory: Path) -> bytes:
    return (directory / "sae.safetensors").read_bytes()


def members() -> list[Member]:
    return [
        Member("plain", small_sae()),
        Member("dense", small_sae(**WITH_CORE), CORE),
        Member("sparse", small_sae(**WITH_CORE, core_mode=CoreMode.SPARSE), CORE),
        Member("batchtopk", small_sae(prefixes=(48,), k=7)),
    ]


def test_many_saes_in_one_run_are_what_each_is_alone(tmp_path: Path) -> None:
    together = trainer(tmp_path / "all", *members()).run()
    assert [outcome.state for outcome in together] == [State.FINISHED] * 4
    for member, outcome in zip(members(), together, strict=True):
        (alone,) = trainer(tmp_path / member.name, member).run()
        assert weights(outcome.directory) == weights(alone.directory)
        assert read_metrics(outcome.directory) == read_metrics(alone.directory)
        assert outcome._replace(directory=alone.directory) == alone


@pytest.mark.parametrize("looking", [{"log_every": 1}, {"log_every": 1000}, {"checkpoint_seconds": 0.0}])
def test_looking_and_saving_change_nothing(tmp_path: Path, looking: dict[str, Any]) -> None:
    (one,) = trainer(tmp_path / "one").run()
    (other,) = trainer(tmp_path / "other", **looking).run()
    assert weights(one.directory) == weights(other.directory)
    assert one.metrics == other.metrics


@pytest.mark.parametrize("mode", CoreMode)
def test_the_core_is_the_same_to_the_bit(tmp_path: Path, mode: CoreMode) -> None:
    config = small_sae(**WITH_CORE, core_mode=mode)
    (outcome,) = trainer(tmp_path / "run", Member("sae", config, CORE)).run()
    sae = load_sae(outcome.directory)
    assert torch.equal(sae.W_enc_core, CORE)
    fresh = SAE.init(config, torch.Generator().manual_seed(0), CORE)
    assert not torch.equal(sae.W_dec[:5], fresh.W_dec[:5])
    assert sae.b_enc[:5].abs().min() > 0  # all but the rows learns
    assert (sae.threshold[:5] == 0).all() == (mode is CoreMode.DENSE)
    assert (sae.threshold[5:] == sae.threshold[-1]).all()


def test_the_same_command_again_does_nothing_more(tmp_path: Path) -> None:
    class Untouchable(Zipf):
        def group(self, epoch: int, index: int) -> Tensor | None:
            raise AssertionError("a finished run read data")

    first = trainer(tmp_path / "run").run()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*.*s*")}
    assert trainer(tmp_path / "run", source=Untouchable()).run() == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*.*s*")} == before
    assert not (tmp_path / "run" / CHECKPOINT).exists()


def test_training_from_a_store_on_disk(tmp_path: Path) -> None:
    """Stored as float32, the activations are the same as from memory, and so is the SAE, over several epochs."""
    source = Zipf(n_rows=700)
    writer = StoreWriter(tmp_path / "store", {"model": {}})
    for index in range(2):
        rows = source.group(0, index)
        assert rows is not None
        writer.add(shard_file(Split.TRAIN, index), {"x": rows}, {})
    store = writer.finish(32)
    config = TrainConfig(**SHORT)

    class InOrder(StoreGroups):
        def group(self, epoch: int, index: int) -> Tensor | None:
            return super().group(0, index)  # the source in memory keeps its order too

    stream = ActivationStream(InOrder(store, seed=3, mix_shards=1), 64, seed=3)
    (disk,) = Trainer([Member("sae", small_sae())], config, stream, tmp_path / "disk", {}).run()
    stream.close()
    (memory,) = trainer(tmp_path / "memory", source=source).run()
    assert weights(disk.directory) == weights(memory.directory)


def test_metrics_hold_what_a_run_is_judged_by(tmp_path: Path) -> None:
    config = small_sae(**WITH_CORE)
    (outcome,) = trainer(tmp_path / "run", Member("sae", config, CORE), log_every=10, warmup_steps=15).run()
    lines = read_metrics(outcome.directory)
    assert [line["step"] for line in lines] == [10, 20, 30, 40, 50, 60]
    assert outcome.metrics == lines[-1]
    assert set(lines[0]) == {
        "step",
        "tokens",
        "loss",
        "aux_loss",
        "fve",
        "fve_prefixes",
        "l0_core",
        "l0_noncore",
        "l0_core_inference",
        "l0_noncore_inference",
        "fve_inference",
        "dead_groups",
        "threshold",
        "grad_norm",
        "lr",
    }
    schedule = TrainConfig(**SHORT, warmup_steps=15).schedule()
    for line in lines:
        assert line["tokens"] == 64 * line["step"]
        assert len(line["fve_prefixes"]) == 3
        assert line["fve"] == line["fve_prefixes"][-1]
        assert all(low < high for low, high in pairwise(line["fve_prefixes"]))
        assert line["l0_noncore"] == 4
        assert 0 < line["l0_core"] <= 5
        assert len(line["dead_groups"]) == 4
        assert line["lr"] == pytest.approx(1e-3 * schedule.lr_factor(line["step"] - 1))
        assert line["grad_norm"] > 0
    assert lines[-1]["loss"] < lines[0]["loss"]
    timing = [json.loads(line) for line in (outcome.directory / "timing.jsonl").read_text().splitlines()]
    assert [line["step"] for line in timing] == [10, 20, 30, 40, 50, 60]
    assert all(line["tokens_per_second"] > 0 for line in timing)


def test_saved_threshold_is_the_logged_one(tmp_path: Path) -> None:
    (outcome,) = trainer(tmp_path / "run").run()
    assert load_sae(outcome.directory).threshold.unique().item() == pytest.approx(outcome.metrics["threshold"])


def test_scale_is_folded_back(tmp_path: Path) -> None:
    """Activations of another unit give the same SAE in that unit: rows equal, biases and thresholds scaled."""

    class Louder(Zipf):
        def group(self, epoch: int, index: int) -> Tensor | None:
            rows = super().group(epoch, index)
            return None if rows is None else 1024 * rows  # a power of two, so that rounding stays the same

    (one,) = trainer(tmp_path / "one").run()
    (loud,) = trainer(tmp_path / "loud", source=Louder()).run()
    a, b = load_sae(one.directory), load_sae(loud.directory)
    for name in ("W_enc_free", "W_dec"):
        assert torch.equal(getattr(a, name), getattr(b, name))
    for name in ("b_enc", "b_dec", "threshold"):
        assert torch.equal(1024 * getattr(a, name), getattr(b, name))


class Spoiled(Zipf):
    """One row of the second group is not finite."""

    def __init__(self, value: float, group: int = 1) -> None:
        super().__init__()
        self._value, self._spoiled = value, group

    def group(self, epoch: int, index: int) -> Tensor | None:
        rows = super().group(epoch, index)
        if rows is not None and index == self._spoiled:
            rows[100, 3] = self._value
        return rows


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_activations_are_named_and_nothing_before_them_is_lost(tmp_path: Path, value: float) -> None:
    stream = ActivationStream(Spoiled(value), 64, seed=3)
    step = next(n for n, x in enumerate(stream, start=1) if not x.isfinite().all())
    assert step > 3
    with pytest.raises(TrainingError, match=f"The batch of step {step} holds activations that are not finite"):
        trainer(tmp_path / "run", source=Spoiled(value)).run()
    assert (tmp_path / "run" / CHECKPOINT).is_file()
    (mended,) = trainer(tmp_path / "run").run()
    (whole,) = trainer(tmp_path / "whole").run()
    assert weights(mended.directory) == weights(whole.directory)
    assert read_metrics(mended.directory) == read_metrics(whole.directory)


def test_bad_activations_in_the_first_batches(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"The batch of step \d+ holds activations that are not finite"):
        trainer(tmp_path / "nan", source=Spoiled(math.nan, group=0), norm_batches=30).run()

    class Silent(Zipf):
        def group(self, epoch: int, index: int) -> Tensor | None:
            return torch.zeros(500, 32)

    with pytest.raises(TrainingError, match="first 3 batches are all zero"):
        trainer(tmp_path / "zero", source=Silent()).run()


def test_a_batch_without_variance(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"The 1 activations of step 1 are all the same.*larger batch_size"):
        trainer(tmp_path / "run", batch_size=1, tokens=10).run()


def test_one_diverges_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (alone,) = trainer(tmp_path / "alone").run()
    bad = Member("bad", small_sae(width=40, prefixes=(8, 40)))
    before: list[dict[str, Tensor]] = []

    def spoiled(sae: SAE, *args: Any) -> BatchResult:
        result = backward_(sae, *args)
        if sae.config.width != 40:
            return result
        before.append({name: tensor.clone() for name, tensor in sae.state_dict().items()})
        return result._replace(loss=math.nan) if len(before) > 17 else result

    monkeypatch.setattr(learner_module, "backward_", spoiled)
    outcomes = trainer(tmp_path / "run", bad, Member("sae", small_sae())).run()
    assert [outcome.state for outcome in outcomes] == [State.DIVERGED, State.FINISHED]
    assert outcomes[0].step == 17
    assert "loss nan" in outcomes[0].cause
    assert outcomes[0].metrics["step"] == 14
    assert read_outcome(tmp_path / "run" / "bad") == outcomes[0]
    assert weights(outcomes[1].directory) == weights(alone.directory)
    assert len(before) == 18
    for name in ("W_enc_free", "W_dec"):
        assert torch.equal(getattr(load_sae(outcomes[0].directory), name), before[-1][name])


def test_all_diverged_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"diverged after step \d+: loss .*Try a lower lr"):
        trainer(tmp_path / "run", lr=1e30).run()
    assert read_outcome(tmp_path / "run" / "sae").state is State.DIVERGED
    with pytest.raises(TrainingError, match="diverged after step"):
        trainer(tmp_path / "run", lr=1e30).run()


def test_a_collapse_is_recorded_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def muting(sae: SAE, *args: Any) -> None:
        step_(sae, *args)
        if sae.config.width == 40 and next(calls) > 12:
            with torch.no_grad():
                sae.b_enc.fill_(-100.0)

    calls = iter(range(1000))
    monkeypatch.setattr(learner_module, "step_", muting)
    mute = Member("mute", small_sae(width=40, prefixes=(8, 40)))
    outcomes = trainer(tmp_path / "run", Member("sae", small_sae()), mute, log_every=50).run()
    assert [outcome.state for outcome in outcomes] == [State.FINISHED, State.COLLAPSED]
    status = json.loads((tmp_path / "run" / "mute" / "status.json").read_text())
    assert status["state"] == "collapsed"
    assert status["step"] == status["metrics"]["step"] == 14 + 21  # its end is logged, whatever the interval
    assert "explained variance below 0.02" in status["cause"]
    assert load_sae(tmp_path / "run" / "mute").config == mute.sae
    monkeypatch.undo()
    (alone,) = trainer(tmp_path / "alone").run()
    assert weights(outcomes[0].directory) == weights(alone.directory)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([Member("a", small_sae(d_model=31))], r"a: d_model = 31, but the activations have width 32"),
        ([Member("a", small_sae()), Member("a", small_sae())], r"name of its own.*\['a', 'a'\]"),
        ([Member("", small_sae())], r"\['']"),
        ([Member("a/b", small_sae())], r"\['a/b'\]"),
        ([Member("..", small_sae())], r"\['\.\.'\]"),
        ([Member("config.json", small_sae())], r"\['config\.json'\]"),
        ([Member(CHECKPOINT, small_sae())], r"\['checkpoint\.safetensors'\]"),
    ],
)
def test_impossible_members_are_named_before_anything_is_written(
    tmp_path: Path, bad: list[Member], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path / "run", *bad)
    assert list(tmp_path.iterdir()) == []


def test_no_members_and_other_batches_are_refused(tmp_path: Path) -> None:
    stream = ActivationStream(Zipf(), 32)
    with pytest.raises(ConfigError, match=r"got \[\]"):
        Trainer([], TrainConfig(), stream, tmp_path / "run", {})
    with pytest.raises(ConfigError, match="batch_size = 64, but the stream gives 32 at a time"):
        Trainer([Member("a", small_sae())], TrainConfig(batch_size=64), stream, tmp_path / "run", {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"lr": 2e-3}, "train.lr: was 0.001, now 0.002"),
        ({"tokens": 70 * 64}, "train.tokens: was 3840, now 4480"),
        ({"seed": 1}, "train.seed: was 0, now 1"),
    ],
)
def test_a_directory_of_other_settings_is_refused(tmp_path: Path, changes: dict[str, Any], difference: str) -> None:
    (outcome,) = trainer(tmp_path / "run").run()
    before = weights(outcome.directory)
    with pytest.raises(ConfigError, match=difference):
        trainer(tmp_path / "run", **changes).run()
    assert weights(outcome.directory) == before


def test_another_core_is_another_run(tmp_path: Path) -> None:
    config = small_sae(**WITH_CORE)
    trainer(tmp_path / "run", Member("sae", config, CORE)).run()
    trainer(tmp_path / "run", Member("sae", config, CORE.clone())).run()
    with pytest.raises(ConfigError, match=r"saes\.sae\.core_sha256"):
        trainer(tmp_path / "run", Member("sae", config, CORE + 1)).run()


def interrupted(directory: Path, **changes: Any) -> Path:
    """Leave a run that stopped half-way, and return its checkpoint."""
    with pytest.raises(TrainingError):
        trainer(directory, source=Spoiled(math.nan), **changes).run()
    return directory / CHECKPOINT


def test_a_damaged_checkpoint_is_named_and_left_alone(tmp_path: Path) -> None:
    path = interrupted(tmp_path / "run")
    data = path.read_bytes()
    for damaged in (data[:-100], data[:-2] + bytes([data[-2] ^ 4]) + data[-1:]):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"run/checkpoint\.safetensors"):
            trainer(tmp_path / "run").run()
        assert path.read_bytes() == damaged
    path.write_bytes(data)
    assert trainer(tmp_path / "run").run()[0].state is State.FINISHED


def test_the_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    mine, other = interrupted(tmp_path / "mine"), interrupted(tmp_path / "other", lr=2e-3)
    mine.write_bytes(other.read_bytes())
    with pytest.raises(CheckpointError, match="belongs to another run"):
        trainer(tmp_path / "mine").run()


def test_an_outcome_that_is_not_there_or_not_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no finished training"):
        read_outcome(tmp_path)
    for text in ("{", "{}", '{"state": "happy", "step": 1, "cause": "", "metrics": {}}'):
        (tmp_path / "status.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"status\.json is not the status of a training run"):
            read_outcome(tmp_path)


def test_geometric_median_resists_outliers() -> None:
    x = torch.randn(201, 4, generator=torch.Generator().manual_seed(0))
    x[:20] += 1000
    median = geometric_median(x)
    assert median.norm() < 0.5
    assert x.mean(0).norm() > 50

    def distance(point: Tensor) -> float:
        return float((x - point).norm(dim=1).sum())

    for shift in 0.05 * torch.eye(4):
        assert distance(median) < min(distance(median + shift), distance(median - shift))
