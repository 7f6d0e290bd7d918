"""The store holds what the model computes, is made once, and survives whatever interrupts its making."""

import json
import random
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.filesize import decimal as human_bytes

from conftest import Recorder, build_model
from dmsae.activations.base_model import BaseModel, ModelConfig
from dmsae.activations.contexts import split_of
from dmsae.activations.harvest import Harvest, harvest
from dmsae.activations.request import HarvestConfig
from dmsae.activations.shards import ShardMaker, to_stored_dtypes
from dmsae.activations.splits import Split
from dmsae.activations.store import Store, StoreWriter
from dmsae.config import to_dict
from dmsae.errors import BusyError, ConfigError, CorpusError, DiskSpaceError, ModelError, StoreError
from dmsae.text.corpus import TextConfig
from dmsae.text.tokens import TokenConfig

pytestmark = pytest.mark.usefixtures("one_thread")
MakeConfig = Callable[..., HarvestConfig]

# A real harvest in a process of its own; pauses after each batch so that there is a middle to be killed in.
SCRIPT = """
import json, sys, time
from pathlib import Path
import torch
from dmsae.activations.harvest import harvest
from dmsae.activations.request import HarvestConfig
from dmsae.activations.shards import ShardMaker
from dmsae.config import from_dict
from dmsae.errors import BusyError

torch.set_num_threads(1)
run = ShardMaker._run

def slow(self, *args):
    time.sleep(float(sys.argv[3]))
    return run(self, *args)

ShardMaker._run = slow
print("ready", flush=True)
try:
    harvest(from_dict(HarvestConfig, json.loads(sys.argv[1])), Path(sys.argv[2]))
except BusyError as error:
    print(error, flush=True)
    sys.exit(7)
"""


def start(config: HarvestConfig, root: Path, pause: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, json.dumps(to_dict(config)), str(root), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def content(store: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(store)): path.read_bytes()
        for path in sorted(store.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def test_store_holds_what_the_model_computes(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config()
    store = harvest(config, tmp_path)
    model = BaseModel.load(config.model)
    assert [store.n_rows(split) for split in Split] == [200, 300, 2000]
    for split in (Split.PAIRS, Split.HELDOUT):
        tokens_NL = store.tokens(split)["tokens"]
        expected = model.gradients(tokens_NL, store.counted_losses(split, model.keep_mask))
        seen = set()
        for rows in store.batches(split, 64):
            where = rows["context"].long(), rows["position"].long()
            torch.testing.assert_close(rows["x"], expected.x_NLD[where], atol=1e-5, rtol=1e-5)
            if split is Split.PAIRS:
                torch.testing.assert_close(rows["g"], expected.g_NLD[where], atol=1e-5, rtol=1e-4)
            assert model.keep_mask(tokens_NL)[where].all()
            seen |= set(zip(*(index.tolist() for index in where), strict=True))
        assert len(seen) == store.n_rows(split)
    # Training rows carry no place: compare as sets, sorted by their first coordinate.
    tokens_NL = store.tokens(Split.TRAIN)["tokens"]
    x_NLD, keep_NL = model.activations(tokens_NL), model.keep_mask(tokens_NL)
    expected_rows = x_NLD[keep_NL][:2000]
    stored = torch.cat([rows["x"] for rows in store.batches(Split.TRAIN, 100)])
    torch.testing.assert_close(
        stored[stored[:, 0].argsort()], expected_rows[expected_rows[:, 0].argsort()], atol=1e-5, rtol=1e-5
    )
    assert not torch.allclose(stored, expected_rows, atol=1e-3), "training rows are not shuffled"


@pytest.mark.parametrize("skip", [True, False])
def test_a_store_knows_which_losses_made_its_gradients(skip: bool, tiny_config: MakeConfig, tmp_path: Path) -> None:
    store = harvest(tiny_config(skip_boundary_targets=skip), tmp_path)
    mask = BaseModel.load(tiny_config().model).keep_mask
    tokens = store.tokens(Split.PAIRS)
    counted = store.counted_losses(Split.PAIRS, mask)
    assert counted[:, :-1][tokens["starts"][:, 1:]].any() == (not skip)
    assert counted[:, :-1][tokens["tokens"][:, 1:] == 1].any() == (not skip)


def test_splits_share_no_document(tiny_config: MakeConfig, tmp_path: Path) -> None:
    job = Harvest(tiny_config(), tmp_path)
    home = {document.text: split_of(document, job.config.text) for document in job.corpus.documents(0)}
    assert set(home.values()) == set(Split)
    store = job.run()
    for split in Split:
        tokens = store.tokens(split)
        ids, starts = tokens["tokens"].flatten().tolist(), tokens["starts"].flatten().nonzero()[:, 0].tolist()
        texts = [job.tokenizer.decode(ids[a:b]).removesuffix("</s>").strip() for a, b in pairwise(starts)]
        assert len(texts) > 5
        assert all(home[text] is split for text in texts)
        assert store.n_documents(split) == len(texts) + 1


def test_rows_and_drops_account_for_every_position(tiny_config: MakeConfig, tmp_path: Path) -> None:
    store = harvest(tiny_config(max_norm_ratio=1.2), tmp_path)
    for split in Split:
        positions = store.tokens(split)["tokens"].numel()
        assert store.n_rows(split) + sum(store.dropped(split).values()) == positions
    assert store.dropped(Split.TRAIN)["norm_outlier"] > 0
    assert store.dropped(Split.PAIRS)["no_loss_after"] > 0


def test_same_request_is_never_harvested_twice(
    tiny_config: MakeConfig, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = harvest(tiny_config(), tmp_path)
    before = content(first.path)
    monkeypatch.setattr(BaseModel, "load", lambda *_: pytest.fail("the model was loaded again"))
    elsewhere = Path(shutil.copytree(tiny_model, tmp_path / "renamed-model"))
    same = [
        tiny_config(),
        tiny_config(model=ModelConfig(name=str(tiny_model), hook="model.layers.0", device="cpu")),
        tiny_config(model=ModelConfig(name=str(elsewhere), hook=0)),
        tiny_config(batch_contexts=3),
    ]
    assert {harvest(config, tmp_path).key for config in same} == {first.key}
    assert content(first.path) == before


def test_what_content_depends_on_is_in_the_key(tiny_config: MakeConfig, tiny_model: Path, tmp_path: Path) -> None:
    base = tiny_config()
    others = [
        base,
        replace(base, model=replace(base.model, hook=1)),
        replace(base, model=replace(base.model, dtype="bfloat16")),
        replace(base, text=replace(base.text, heldout_fraction=0.3)),
        replace(base, text=replace(base.text, pairs_fraction=0.3)),
        replace(base, text=replace(base.text, txt_documents="file")),
        replace(base, tokens=replace(base.tokens, context_length=17)),
        replace(base, tokens=replace(base.tokens, prepend_bos=True)),
        replace(base, train_tokens=1999),
        replace(base, heldout_tokens=299),
        replace(base, pair_tokens=199),
        replace(base, max_contexts_per_document=3),
        replace(base, skip_boundary_targets=False),
        replace(base, dtype="float16"),
        replace(base, gradient_dtype="float16"),
        replace(base, shard_tokens=512),
        replace(base, max_norm_ratio=None),
        replace(base, seed=1),
    ]
    assert len({Harvest(config, tmp_path).path for config in others}) == len(others)


def test_too_small_a_corpus_is_an_error_before_the_model_is_loaded(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BaseModel, "load", lambda *_: pytest.fail("the model was loaded"))
    for run in (Harvest.run, Harvest.dry_run):
        with pytest.raises(
            CorpusError, match=r"too small .*pairs: 200 of 200, .*train: [\d,]+ of 10,000,000"
        ) as caught:
            run(Harvest(tiny_config(train_tokens=10_000_000), tmp_path))
        assert "The model has not been run" in str(caught.value)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_values_that_do_not_fit_are_an_error(tiny_config: MakeConfig, tmp_path: Path) -> None:
    shard = {"x": torch.tensor([[1e5, 1.0]]), "g": torch.tensor([[1e30, 1.0]]), "context": torch.tensor([3])}
    with pytest.raises(StoreError, match=r"x does not fit into float16: its largest value is 1e\+05\. Set dtype to"):
        to_stored_dtypes(shard, tiny_config(dtype="float16"))
    assert to_stored_dtypes(shard, tiny_config(dtype="bfloat16"))["x"].dtype == torch.bfloat16
    with pytest.raises(StoreError, match=r"g does not fit into float16.*Set gradient_dtype to"):
        to_stored_dtypes(shard, tiny_config(gradient_dtype="float16", dtype="float32"))


def test_fp16_overflow_ends_the_harvest(tiny_config: MakeConfig, tmp_path: Path) -> None:
    model = build_model()
    model.model.embed_tokens.weight.data *= 1e6
    path = tmp_path / "loud"
    model.save_pretrained(path)
    shutil.copy(Path(tiny_config().model.name) / "tokenizer.json", path)
    shutil.copy(Path(tiny_config().model.name) / "tokenizer_config.json", path)
    config = tiny_config(model=ModelConfig(name=str(path), hook=0, device="cpu"), dtype="float16", pair_tokens=0)
    with pytest.raises(StoreError, match="x does not fit into float16"):
        harvest(config, tmp_path / "stores")
    assert not list((tmp_path / "stores").rglob("store.json"))
    assert harvest(replace(config, dtype="float32"), tmp_path / "stores").n_rows(Split.TRAIN) == 2000


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_activations_that_are_no_numbers_are_never_dropped_as_outliers(
    bad: float, tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = BaseModel.activations

    def spoiled(self: BaseModel, tokens_NL: torch.Tensor) -> torch.Tensor:
        x_NLD = really(self, tokens_NL)
        x_NLD[0, 1, 0] = bad
        return x_NLD

    monkeypatch.setattr(BaseModel, "activations", spoiled)
    with pytest.raises(ModelError, match=r"activations at 'model\.layers\.0' are not finite"):
        harvest(tiny_config(pair_tokens=0), tmp_path)


def test_disk_too_small_is_refused_before_activations_are_written(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - (64 << 20) - 1000, (64 << 20) + 1000))
    for run in (Harvest.run, Harvest.dry_run):
        with pytest.raises(DiskSpaceError, match=r"The store [0-9a-f]{16} needs .* kB and .* only 67\.1 MB are free"):
            run(Harvest(tiny_config(), tmp_path))
    assert not list(tmp_path.rglob("0*.safetensors"))
    monkeypatch.undo()
    assert harvest(tiny_config(), tmp_path).n_rows(Split.TRAIN) == 2000


def test_estimate_is_what_the_store_takes(tiny_config: MakeConfig, tmp_path: Path) -> None:
    job = Harvest(tiny_config(), tmp_path)
    estimate = job.dry_run()
    assert not list(tmp_path.iterdir())
    store = job.run()
    assert {split: store.n_rows(split) for split in Split} == estimate.rows
    assert {split: store.n_documents(split) for split in Split} == estimate.documents
    assert estimate.d_model == store.d_model == 16
    shards = sum(path.stat().st_size for path in store.path.rglob("*.safetensors"))
    assert sum(estimate.size_bytes.values()) == pytest.approx(shards, rel=0.05)
    assert all(seconds > 0 for seconds in estimate.seconds.values())


def test_splits_that_are_not_wanted_cost_nothing(tiny_config: MakeConfig, tmp_path: Path) -> None:
    store = harvest(tiny_config(pair_tokens=0, heldout_tokens=0), tmp_path)
    assert [store.n_rows(split) for split in Split] == [0, 0, 2000]
    assert len(store.tokens(Split.PAIRS)["tokens"]) == 0


def test_pairs_come_in_smaller_files_because_each_costs_more(tiny_config: MakeConfig, tmp_path: Path) -> None:
    store = harvest(tiny_config(), tmp_path)
    most = {split: max(record.rows for record in store.shards(split)) for split in Split}
    assert most[Split.PAIRS] <= 256 // 8 < most[Split.HELDOUT] <= 256
    assert len(store.shards(Split.PAIRS)) >= 200 / 32


def test_a_resumed_harvest_reports_what_is_left(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(Exception):
        pass

    def broken(self: ShardMaker, split: Split, *args: Any) -> Any:
        if split is Split.TRAIN:
            raise Stopped
        return really(self, split, *args)

    really = ShardMaker._run
    job = Harvest(tiny_config(), tmp_path)
    estimate = job.dry_run()
    with monkeypatch.context() as patched:
        patched.setattr(ShardMaker, "_run", broken)
        patched.setattr(Harvest, "estimate", lambda *_: estimate)
        with pytest.raises(Stopped):
            job.run()
    recorder = Recorder()
    store = harvest(tiny_config(), tmp_path, recorder)
    n_done = len(store.shards(Split.PAIRS)) + len(store.shards(Split.HELDOUT))
    done_bytes = 200 * (16 * (4 + 4) + 8) + 300 * (16 * 4 + 8)
    left = human_bytes(sum(estimate.size_bytes.values()) - done_bytes)
    note = recorder.notes[-1]
    assert f"{n_done} shards were finished earlier, {left} to write, about" in note


def test_damaged_files_are_made_again(tiny_config: MakeConfig, tmp_path: Path) -> None:
    whole = harvest(tiny_config(), tmp_path / "whole")
    path = Path(shutil.copytree(whole.path, tmp_path / "damaged" / whole.key))
    (path / "store.json").unlink()
    (path / "pairs" / "00001.safetensors").unlink()
    (path / "tokens" / "heldout.safetensors").write_bytes(b"")
    flipped = path / "train" / "00002.safetensors"
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\x7f")
    assert content(harvest(tiny_config(), tmp_path / "damaged").path) == content(whole.path)


def test_a_missing_device_is_an_error_before_text_is_read(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config()
    monkeypatch.setattr(Harvest, "contexts", lambda _: pytest.fail("text was tokenised"))
    for run in (Harvest.run, Harvest.dry_run):
        with pytest.raises(ModelError, match=r"device = 'cuda:99' cannot be used"):
            run(Harvest(replace(config, model=replace(config.model, device="cuda:99")), tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_context_longer_than_the_models_positions_is_refused_before_anything_is_written(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"tokens\.context_length = 65; it must be at most 64, the positions that"):
        Harvest(tiny_config(tokens=TokenConfig(context_length=65)), tmp_path)
    assert not list(tmp_path.iterdir())
    Harvest(tiny_config(tokens=TokenConfig(context_length=64)), tmp_path)


def test_a_dry_run_says_that_it_measures(tiny_config: MakeConfig, tmp_path: Path) -> None:
    recorder = Recorder()
    Harvest(tiny_config(), tmp_path, recorder).dry_run()
    assert any("Measuring" in note for note in recorder.notes)


def test_the_same_bytes_read_as_another_kind_are_another_store(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config()
    keys = set()
    for name in ("a.jsonl", "b.jsonl", "a.txt"):
        (tmp_path / name).write_text('{"text": "one"}\n')
        text = replace(config.text, source=str(tmp_path / name))
        keys.add(Harvest(replace(config, text=text), tmp_path).path)
    assert len(keys) == 2, "a name alone is no difference, a kind is"


def test_stopped_after_every_file_ends_the_same(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(Exception):
        pass

    config = tiny_config(train_tokens=600)
    whole = harvest(config, tmp_path / "whole")
    really = StoreWriter.add
    written = [0]

    def one_file_only(self: StoreWriter, *args: Any) -> Any:
        if written[0]:
            raise Stopped
        written[0] += 1
        return really(self, *args)

    monkeypatch.setattr(StoreWriter, "add", one_file_only)
    n_stops = 0
    while not (tmp_path / "stopped" / whole.key / "store.json").exists():
        written[0] = 0
        try:
            harvest(config, tmp_path / "stopped")
        except Stopped:
            n_stops += 1
    assert n_stops == len(whole.records) - 1
    assert content(tmp_path / "stopped" / whole.key) == content(whole.path)


def test_killed_at_random_moments_ends_bit_identical(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config(train_tokens=1000, batch_contexts=4)
    whole = harvest(config, tmp_path / "whole")
    moments = random.Random(0)
    kills = 0
    while True:
        process = start(config, tmp_path / "killed", pause=0.02)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            # Only the last attempt is given all the time it wants.
            process.communicate(timeout=None if kills >= 5 else moments.uniform(0.05, 1.2))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
            continue
        assert process.returncode == 0
        break
    assert kills >= 1
    assert content(tmp_path / "killed" / whole.key) == content(whole.path)


def test_two_processes_at_once_damage_nothing(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config(train_tokens=400, pair_tokens=50, heldout_tokens=50)
    whole = harvest(config, tmp_path / "whole")
    path = tmp_path / "shared" / whole.key
    first = start(config, tmp_path / "shared", pause=0.3)
    deadline = time.monotonic() + 120
    while not (path / "shards.jsonl").exists():
        assert first.poll() is None, first.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(BusyError, match=f"in use by process {first.pid}"):
        harvest(config, tmp_path / "shared")
    second = start(config, tmp_path / "shared", pause=0.0)
    out, _ = second.communicate(timeout=120)
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 0, errors
    # The second one came while the first was at work, or (on a slow machine) found it finished.
    assert second.returncode in (0, 7)
    assert second.returncode == 0 or f"in use by process {first.pid}" in out
    assert content(path) == content(whole.path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_tokens": -1}, r"train_tokens = -1; it must be a whole number of at least 0"),
        ({"pair_tokens": 0.5}, r"pair_tokens = 0\.5; it must be a whole number of at least 0"),
        (
            {"train_tokens": 0, "heldout_tokens": 0, "pair_tokens": 0},
            r"train_tokens \+ heldout_tokens \+ pair_tokens = 0; it must be at least 1",
        ),
        ({"max_contexts_per_document": 0}, r"max_contexts_per_document = 0; it must be a whole number of at least 1"),
        ({"batch_contexts": 0}, r"batch_contexts = 0; it must be a whole number of at least 1"),
        ({"shard_tokens": 15}, r"shard_tokens = 15; it must hold a context of 16 tokens"),
        ({"max_norm_ratio": 1.0}, r"max_norm_ratio = 1\.0; it must be above 1, or None"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str, tiny_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(**settings)


def test_the_library_prints_nothing(tiny_config: MakeConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    harvest(tiny_config(), tmp_path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.real
def test_real_model_and_corpus(tmp_path: Path) -> None:
    config = HarvestConfig(
        text=TextConfig(exclude=("1[0-9]*", "[2-9][0-9]_*")), train_tokens=300, heldout_tokens=100, pair_tokens=50
    )
    store = harvest(config, tmp_path)
    assert [store.n_rows(split) for split in Split] == [50, 100, 300]
    assert store.d_model == 576
    norms = torch.cat([rows["x"] for rows in store.batches(Split.TRAIN, 100)]).norm(dim=1)
    # Position 0 has norms in the thousands; it must not be there.
    assert norms.max() < 10 * norms.median()
    assert Store.open(store.path).model.name == "smollm2-135m"
