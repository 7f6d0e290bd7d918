"""The training loop: many SAEs from one stream, and everything that can go wrong with it."""

import json
import math
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dmsae.activations.sources import StoreSource
from dmsae.activations.splits import Split
from dmsae.activations.store import StoreWriter
from dmsae.activations.stream import ActivationStream
from dmsae.disk.layout import CHECKPOINT, shard_file
from dmsae.errors import CheckpointError, ConfigError, TrainingError
from dmsae.sae.config import DenseCore, SparseCore
from dmsae.sae.objective import BatchResult, backward_
from dmsae.sae.optimiser import step_
from dmsae.sae.sae import SAE, read_made_from
from dmsae.seeds import generator
from dmsae.training import learner as learner_module
from dmsae.training.config import TrainConfig
from dmsae.training.learner import SAESpec
from dmsae.training.metrics import StepMetrics, read_metrics
from dmsae.training.result import TrainResult, TrainState, read_result
from dmsae.training.trainer import Trainer, train, train_together
from planted import REQUEST
from zipf import DENSE, SHORT, SPARSE, Zipf, small_sae, trainer

pytestmark = pytest.mark.usefixtures("one_thread")

CORE = 0.3 * torch.randn(5, 32, generator=torch.Generator().manual_seed(1))

both_cores = pytest.mark.parametrize("core", [DENSE, SPARSE], ids=["dense", "sparse"])


def weights(directory: Path) -> bytes:
    return (directory / "sae.safetensors").read_bytes()


def metrics_of(result: TrainResult) -> StepMetrics:
    assert result.metrics is not None
    return result.metrics


def specs() -> list[SAESpec]:
    return [
        SAESpec("plain", small_sae()),
        SAESpec("dense", small_sae(DENSE), CORE),
        SAESpec("sparse", small_sae(SPARSE), CORE),
        SAESpec("batchtopk", small_sae(prefixes=(48,), k=7)),
    ]


def test_saes_that_share_a_run_come_out_as_if_alone(tmp_path: Path) -> None:
    together = trainer(tmp_path / "all", *specs()).run()
    assert [result.state for result in together] == [TrainState.FINISHED] * 4
    for spec, result in zip(specs(), together, strict=True):
        (alone,) = trainer(tmp_path / spec.name, spec).run()
        assert weights(result.directory) == weights(alone.directory)
        assert read_metrics(result.directory) == read_metrics(alone.directory)
        assert result._replace(directory=alone.directory) == alone


@pytest.mark.parametrize("how", [{"log_every": 1}, {"log_every": 1000}, {"checkpoint_seconds": 0.0}])
def test_logging_and_saving_change_nothing(tmp_path: Path, how: dict[str, Any]) -> None:
    (one,) = trainer(tmp_path / "one").run()
    (other,) = trainer(tmp_path / "other", **how).run()
    assert weights(one.directory) == weights(other.directory)
    assert one.metrics == other.metrics


@both_cores
def test_everything_but_the_frozen_rows_learns(tmp_path: Path, core: DenseCore | SparseCore) -> None:
    config = small_sae(core)
    (result,) = trainer(tmp_path / "run", SAESpec("sae", config, CORE)).run()
    sae = SAE.load(result.directory)
    assert torch.equal(sae.W_enc_core, CORE)
    start = SAE.init(config, generator(0, "init"), CORE)  # what a training with seed 0 starts from
    for now, then in ((sae.W_dec, start.W_dec), (sae.W_enc_noncore, start.W_enc_noncore)):
        assert (now - then).norm(dim=1).min() > 1e-3
    assert (sae.W_dec[:5] - start.W_dec[:5]).norm(dim=1).max() < 1.0
    assert sae.b_enc.abs().min() > 0
    assert (sae.threshold[:5] == 0).all() == isinstance(core, DenseCore)
    assert (sae.threshold[5:] == sae.threshold[-1]).all()


@both_cores
def test_core_decoders_start_at_random(tmp_path: Path, core: DenseCore | SparseCore) -> None:
    """At a learning rate of next to nothing, what is saved is what the run started from."""
    config = TrainConfig(**SHORT | {"lr": 1e-30})
    with_core = train(small_sae(core), Zipf(), tmp_path / "core", config, CORE)
    without = train(small_sae(), Zipf(), tmp_path / "plain", config)
    W_dec = SAE.load(with_core.directory).W_dec
    assert torch.equal(W_dec, SAE.load(without.directory).W_dec)
    cosines = torch.nn.functional.cosine_similarity(W_dec[:5, None], CORE[None], dim=2)
    assert cosines.abs().max() < 0.6


def test_what_an_sae_was_made_from_is_recorded(tmp_path: Path) -> None:
    config = TrainConfig(**SHORT)
    alone = train(small_sae(), Zipf(), tmp_path / "alone", config)
    (result,) = train_together([SAESpec("a", small_sae(SPARSE), CORE)], Zipf(), tmp_path / "run", config, {"cycle": 3})
    assert read_made_from(alone.directory) == read_made_from(tmp_path / "alone") == {"data": "zipf", "core": None}
    core_sha256 = SAESpec("a", small_sae(SPARSE), CORE).core_sha256()
    assert read_made_from(result.directory) == {"data": "zipf", "cycle": 3, "core": core_sha256}
    assert alone.directory == tmp_path / "alone" / "sae"


def test_a_finished_run_does_nothing_when_it_is_run_again(tmp_path: Path) -> None:
    class Untouchable(Zipf):
        def block(self, epoch: int, index: int, seed: int) -> Tensor | None:
            raise AssertionError("a finished run read data")

    first = trainer(tmp_path / "run").run()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*.*s*")}
    assert trainer(tmp_path / "run", source=Untouchable()).run() == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*.*s*")} == before
    assert not (tmp_path / "run" / CHECKPOINT).exists()


def test_training_from_a_store_on_disk(tmp_path: Path) -> None:
    """Stored as float32, the activations are the same as from memory, and so is the SAE, over several epochs."""
    source = Zipf(n_rows=700)
    writer = StoreWriter(tmp_path / "store", REQUEST)
    for index in range(2):
        rows = source.block(0, index, seed=3)
        assert rows is not None
        writer.add(shard_file(Split.TRAIN, index), {"x": rows}, {})
    store = writer.finish(32)
    config = TrainConfig(**SHORT)

    class InOrder(StoreSource):
        def block(self, epoch: int, index: int, seed: int) -> Tensor | None:
            return super().block(0, index, seed)  # the source in memory keeps its order too

    stream = ActivationStream(InOrder(store, mix_shards=1), 64, seed=3)
    (disk,) = Trainer([SAESpec("sae", small_sae())], config, stream, tmp_path / "disk", {}).run()
    stream.close()
    (memory,) = trainer(tmp_path / "memory", source=source).run()
    assert weights(disk.directory) == weights(memory.directory)


def test_metrics_describe_the_run(tmp_path: Path) -> None:
    config = small_sae(DENSE)
    (result,) = trainer(tmp_path / "run", SAESpec("sae", config, CORE), log_every=10, warmup_steps=15).run()
    lines = read_metrics(result.directory)
    assert [line.step for line in lines] == [1, 10, 20, 30, 40, 50, 60]
    assert result.metrics == lines[-1]
    assert set(asdict(lines[0])) == {
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
        assert line.tokens == 64 * line.step
        assert len(line.fve_prefixes) == 3
        assert line.fve == line.fve_prefixes[-1]
        assert all(low < high for low, high in pairwise(line.fve_prefixes))
        assert line.l0_noncore == 4
        assert 0 < line.l0_core <= 5
        assert len(line.dead_groups) == 4
        assert line.lr == pytest.approx(1e-3 * schedule.lr_factor(line.step - 1))
        assert line.grad_norm > 0
    assert lines[-1].loss < lines[0].loss
    timing = [json.loads(line) for line in (result.directory / "timing.jsonl").read_text().splitlines()]
    assert [line["step"] for line in timing] == [1, 10, 20, 30, 40, 50, 60]
    assert all(line["tokens_per_second"] > 0 for line in timing)


def test_the_saved_threshold_is_the_logged_one(tmp_path: Path) -> None:
    (result,) = trainer(tmp_path / "run").run()
    assert SAE.load(result.directory).threshold.unique().item() == pytest.approx(metrics_of(result).threshold)


def test_the_scale_is_folded_back(tmp_path: Path) -> None:
    """Activations of another unit give the same SAE in that unit: rows equal, biases and thresholds scaled."""

    class Louder(Zipf):
        def block(self, epoch: int, index: int, seed: int) -> Tensor | None:
            rows = super().block(epoch, index, seed)
            return None if rows is None else 1024 * rows  # a power of two, so that rounding stays the same

    (one,) = trainer(tmp_path / "one").run()
    (loud,) = trainer(tmp_path / "loud", source=Louder()).run()
    a, b = SAE.load(one.directory), SAE.load(loud.directory)
    for name in ("W_enc_noncore", "W_dec"):
        assert torch.equal(getattr(a, name), getattr(b, name))
    for name in ("b_enc", "b_dec", "threshold"):
        assert torch.equal(1024 * getattr(a, name), getattr(b, name))


class Spoiled(Zipf):
    """One row of a block, of the second unless told otherwise, is not finite."""

    def __init__(self, value: float, spoiled: int = 1) -> None:
        super().__init__()
        self._value, self._spoiled = value, spoiled

    def block(self, epoch: int, index: int, seed: int) -> Tensor | None:
        rows = super().block(epoch, index, seed)
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
    (resumed,) = trainer(tmp_path / "run").run()
    (whole,) = trainer(tmp_path / "whole").run()
    assert weights(resumed.directory) == weights(whole.directory)
    assert read_metrics(resumed.directory) == read_metrics(whole.directory)


def test_bad_activations_in_the_first_batches(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"The batch of step \d+ holds activations that are not finite"):
        trainer(tmp_path / "nan", source=Spoiled(math.nan, spoiled=0), norm_batches=30).run()

    class Silent(Zipf):
        def block(self, epoch: int, index: int, seed: int) -> Tensor | None:
            return torch.zeros(500, 32)

    with pytest.raises(TrainingError, match="first 3 batches are all zero"):
        trainer(tmp_path / "zero", source=Silent()).run()


def test_a_batch_without_variance(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"The 1 activations of step 1 are all the same.*larger batch_size"):
        trainer(tmp_path / "run", batch_size=1, tokens=10).run()


def test_one_diverges_and_the_others_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (alone,) = trainer(tmp_path / "alone").run()
    bad = SAESpec("bad", small_sae(width=40, prefixes=(8, 40)))
    before: list[dict[str, Tensor]] = []

    def spoiled(sae: SAE, *args: Any) -> BatchResult:
        result = backward_(sae, *args)
        if sae.config.width != 40:
            return result
        before.append({name: tensor.clone() for name, tensor in sae.state_dict().items()})
        return result._replace(loss=math.nan) if len(before) > 17 else result

    monkeypatch.setattr(learner_module, "backward_", spoiled)
    results = trainer(tmp_path / "run", bad, SAESpec("sae", small_sae())).run()
    assert [result.state for result in results] == [TrainState.DIVERGED, TrainState.FINISHED]
    assert results[0].step == 17
    assert "loss nan" in results[0].cause
    assert metrics_of(results[0]).step == 14
    assert read_result(tmp_path / "run" / "bad") == results[0]
    assert weights(results[1].directory) == weights(alone.directory)
    assert len(before) == 18
    for name in ("W_enc_noncore", "W_dec"):
        assert torch.equal(getattr(SAE.load(results[0].directory), name), before[-1][name])


def test_all_diverged_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"diverged after step \d+: loss .*Try a lower lr"):
        trainer(tmp_path / "run", lr=1e30).run()
    assert read_result(tmp_path / "run" / "sae").state is TrainState.DIVERGED
    with pytest.raises(TrainingError, match="diverged after step"):
        trainer(tmp_path / "run", lr=1e30).run()


def test_a_collapse_is_recorded_and_the_others_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def muting(sae: SAE, *args: Any) -> None:
        step_(sae, *args)
        if sae.config.width == 40 and next(calls) > 12:
            with torch.no_grad():
                sae.b_enc.fill_(-100.0)

    calls = iter(range(1000))
    monkeypatch.setattr(learner_module, "step_", muting)
    mute = SAESpec("mute", small_sae(width=40, prefixes=(8, 40)))
    results = trainer(tmp_path / "run", SAESpec("sae", small_sae()), mute, log_every=50).run()
    assert [result.state for result in results] == [TrainState.FINISHED, TrainState.COLLAPSED]
    status = json.loads((tmp_path / "run" / "mute" / "status.json").read_text())
    assert status["state"] == "collapsed"
    assert status["step"] == status["metrics"]["step"] == 14 + 21  # its end is logged, whatever the interval
    assert "explained variance below 0.02" in status["cause"]
    assert SAE.load(tmp_path / "run" / "mute").config == mute.sae
    monkeypatch.undo()
    (alone,) = trainer(tmp_path / "alone").run()
    assert weights(results[0].directory) == weights(alone.directory)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([SAESpec("a", small_sae(d_model=31))], r"a: d_model = 31, but the activations have width 32"),
        ([SAESpec("a", small_sae()), SAESpec("a", small_sae())], r"name of its own.*\['a', 'a'\]"),
        ([SAESpec("", small_sae())], r"\['']"),
        ([SAESpec("a/b", small_sae())], r"\['a/b'\]"),
        ([SAESpec("..", small_sae())], r"\['\.\.'\]"),
        ([SAESpec("config.json", small_sae())], r"\['config\.json'\]"),
        ([SAESpec(CHECKPOINT, small_sae())], r"\['checkpoint\.safetensors'\]"),
    ],
)
def test_impossible_specs_are_named_before_anything_is_written(
    tmp_path: Path, bad: list[SAESpec], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path / "run", *bad)
    assert list(tmp_path.iterdir()) == []


def test_no_specs_and_another_batch_size_are_refused(tmp_path: Path) -> None:
    stream = ActivationStream(Zipf(), 32)
    with pytest.raises(ConfigError, match=r"got \[\]"):
        Trainer([], TrainConfig(), stream, tmp_path / "run", {})
    with pytest.raises(ConfigError, match="batch_size = 64, but the stream gives 32 at a time"):
        Trainer([SAESpec("a", small_sae())], TrainConfig(batch_size=64), stream, tmp_path / "run", {})
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
    (result,) = trainer(tmp_path / "run").run()
    before = weights(result.directory)
    with pytest.raises(ConfigError, match=difference):
        trainer(tmp_path / "run", **changes).run()
    assert weights(result.directory) == before


def test_another_core_is_another_run(tmp_path: Path) -> None:
    config = small_sae(DENSE)
    trainer(tmp_path / "run", SAESpec("sae", config, CORE)).run()
    trainer(tmp_path / "run", SAESpec("sae", config, CORE.clone())).run()
    with pytest.raises(ConfigError, match=r"saes\.sae\.core_sha256"):
        trainer(tmp_path / "run", SAESpec("sae", config, CORE + 1)).run()


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
    assert trainer(tmp_path / "run").run()[0].state is TrainState.FINISHED


def test_the_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    mine, other = interrupted(tmp_path / "mine"), interrupted(tmp_path / "other", lr=2e-3)
    mine.write_bytes(other.read_bytes())
    with pytest.raises(CheckpointError, match="belongs to another run"):
        trainer(tmp_path / "mine").run()
