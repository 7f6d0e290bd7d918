"""A store gives back what was put into it, or says which file is not what was written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import Recorder
from dmsae.activations.harvest import Harvest, harvest
from dmsae.activations.request import HarvestConfig, HarvestRequest
from dmsae.activations.splits import Split
from dmsae.activations.store import Store, StoreWriter, open_store
from dmsae.disk.files import canonical_hash, sha256_of
from dmsae.disk.layout import shard_file, token_file
from dmsae.errors import StoreCorruptError, StoreError
from planted import MODEL, REQUEST

pytestmark = pytest.mark.usefixtures("one_thread")


def make(path: Path, n_shards: int = 2) -> Store:
    writer = StoreWriter(path, REQUEST)
    for split in Split:
        if token_file(split) not in writer.records:
            writer.add(token_file(split), {"tokens": torch.arange(8, dtype=torch.int32).view(2, 4)}, {})
    for index in range(n_shards):
        x = torch.arange(6.0).view(3, 2) + 10 * index
        writer.add(shard_file(Split.TRAIN, index), {"x": x.half()}, {"padding": index + 1})
    return writer.finish(d_model=2)


def reseal(path: Path, changes: dict[str, Any]) -> None:
    """Seal a store with other facts."""
    facts = json.loads((path / "store.json").read_text()) | changes
    del facts["facts_sha256"]
    (path / "store.json").write_text(json.dumps(facts | {"facts_sha256": canonical_hash(facts)}))


def read_all(path: Path) -> None:
    """Use a store in every way that reading knows."""
    store = Store.open(path)
    for record in store.records:
        store.read(record)


def test_round_trip(tmp_path: Path) -> None:
    make(tmp_path / "key")
    store = Store.open(tmp_path / "key")
    assert (store.key, store.d_model, store.request, store.model) == ("key", 2, REQUEST, MODEL)
    assert [record.file for record in store.shards(Split.TRAIN)] == [
        "train/00000.safetensors",
        "train/00001.safetensors",
    ]
    assert (store.n_rows(Split.TRAIN), store.n_rows(Split.PAIRS)) == (6, 0)
    assert store.dropped(Split.TRAIN) == {"padding": 3}
    assert store.tokens(Split.HELDOUT)["tokens"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    batches = list(store.batches(Split.TRAIN, 4))
    assert [len(batch["x"]) for batch in batches] == [4, 2]
    assert all(batch["x"].dtype == torch.float32 for batch in batches)
    assert torch.cat([batch["x"] for batch in batches])[:, 0].tolist() == [0, 2, 4, 10, 12, 14]
    assert [problem for _, problem in store.verify()] == [None] * 5


def test_a_bit_flip_in_any_file_is_named(tmp_path: Path) -> None:
    make(tmp_path / "whole")
    files = [path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*") if path.is_file()]
    assert len(files) == 8
    for file in files:
        data = (tmp_path / "whole" / file).read_bytes()
        for at in {0, len(data) // 3, len(data) // 2, len(data) - 1}:
            for bit in (0, 5):
                damaged = bytearray(data)
                damaged[at] ^= 1 << bit
                path = Path(shutil.copytree(tmp_path / "whole", tmp_path / "damaged"))
                (path / file).write_bytes(damaged)
                with pytest.raises(StoreCorruptError, match=rf"{file.name}.*dmsae store remove damaged"):
                    read_all(path)
                shutil.rmtree(path)


@pytest.mark.parametrize("file", ["store.json", "request.json", "shards.jsonl"])
def test_every_bit_of_the_small_files_counts(file: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    make(path, n_shards=1)
    data = (path / file).read_bytes()

    @given(st.integers(0, 8 * len(data) - 1))
    def flip(bit: int) -> None:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        (path / file).write_bytes(damaged)
        with pytest.raises(StoreCorruptError, match=file):
            Store.open(path)

    flip()
    (path / file).write_bytes(data)
    read_all(path)


@pytest.mark.parametrize("file", ["train/00001.safetensors", "tokens/pairs.safetensors", "shards.jsonl"])
def test_missing_or_shortened_files_are_named(file: str, tmp_path: Path) -> None:
    make(tmp_path / "key")
    path = tmp_path / "key" / file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreCorruptError, match=path.name):
        read_all(tmp_path / "key")
    path.unlink()
    with pytest.raises(StoreCorruptError, match=path.name):
        read_all(tmp_path / "key")


def test_verify_continues_after_a_damaged_file(tmp_path: Path) -> None:
    store = make(tmp_path / "key")
    (store.path / shard_file(Split.TRAIN, 0)).write_bytes(b"")
    problems = {record.file: problem for record, problem in store.verify()}
    assert [file for file, problem in problems.items() if problem] == ["train/00000.safetensors"]


def test_only_complete_stores_of_this_format_open(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="There is no store at"):
        Store.open(tmp_path / "absent")
    StoreWriter(tmp_path / "begun", REQUEST)
    with pytest.raises(StoreError, match=r"not complete\. Run the same 'dmsae harvest' or 'dmsae store import' again"):
        Store.open(tmp_path / "begun")
    old = make(tmp_path / "old").path
    reseal(old, {"format": 2})
    with pytest.raises(StoreError, match=r"has format 2; this version of dmsae reads format 3\. Run the same .* again"):
        Store.open(old)


def test_writer_resumes_after_a_line_cut_short(tmp_path: Path) -> None:
    whole = make(tmp_path / "whole")
    path = tmp_path / "key"
    writer = StoreWriter(path, REQUEST)
    writer.add(token_file(Split.PAIRS), {"tokens": torch.arange(8, dtype=torch.int32).view(2, 4)}, {})
    with (path / "shards.jsonl").open("a") as journal:
        journal.write('{"file": "tokens/he')
    assert list(StoreWriter(path, REQUEST).records) == ["tokens/pairs.safetensors"]
    make(path)
    assert {p.name: p.read_bytes() for p in path.glob("*.json*")} == {
        p.name: p.read_bytes() for p in whole.path.glob("*.json*")
    }


def test_a_flip_in_the_journal_of_an_unfinished_store_is_named_and_its_file_made_again(tmp_path: Path) -> None:
    path = make(tmp_path / "key").path
    data = (path / "shards.jsonl").read_bytes()
    intact = StoreWriter(path, REQUEST).records
    ends = [at for at, byte in enumerate(data) if byte == ord("\n")]

    @given(st.integers(0, 8 * len(data) - 1))
    def flip(bit: int) -> None:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        (path / "shards.jsonl").write_bytes(damaged)
        seen = Recorder()
        records = StoreWriter(path, REQUEST, seen).records
        assert records.items() <= intact.items()
        lost = len(intact) - len(records)
        assert lost == len(seen.warnings) or bit // 8 in ends
        line = sum(end < bit // 8 for end in ends) + 1
        assert all(f"shards.jsonl, line {line} is damaged" in warning for warning in seen.warnings)

    flip()


def test_a_journal_line_of_an_earlier_version_counts_only_under_a_seal(tmp_path: Path) -> None:
    path = make(tmp_path / "key").path
    lines = [json.loads(line) for line in (path / "shards.jsonl").read_text().splitlines()]
    for line in lines:
        del line["line_sha256"]
    (path / "shards.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    reseal(path, {"journal_sha256": sha256_of(path / "shards.jsonl")})
    assert len(Store.open(path).records) == len(lines)
    (path / "store.json").unlink()
    assert not StoreWriter(path, REQUEST).records


def test_a_store_without_text_says_so(tmp_path: Path) -> None:
    assert make(tmp_path / "with").has_text
    writer = StoreWriter(tmp_path / "without", REQUEST)
    for split in Split:
        writer.add(token_file(split), {"tokens": torch.zeros(0, 1, dtype=torch.int32)}, {})
    store = writer.finish(d_model=2)
    assert not store.has_text
    with pytest.raises(StoreError, match=r"The store without holds activations without their text.*'dmsae harvest'"):
        store.tokens(Split.HELDOUT)


def test_a_store_opens_by_its_key_or_its_path(tmp_path: Path) -> None:
    path = make(tmp_path / "abcd").path
    assert open_store("ab", tmp_path).path == open_store(path).path == path
    assert open_store(path).root == tmp_path


def test_documents_are_counted_when_tokens_are_written(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "key", REQUEST)
    tokens = torch.arange(8, dtype=torch.int32).view(2, 4)
    for split, every in ((Split.PAIRS, 4), (Split.HELDOUT, 2)):
        writer.add(token_file(split), {"tokens": tokens, "starts": tokens % every == 0}, {})
    writer.add(shard_file(Split.PAIRS, 0), {"x": torch.zeros(3, 2)}, {})
    writer.finish(2)
    assert [Store.open(tmp_path / "key").n_documents(split) for split in Split] == [2, 4, 0]


def test_the_request_is_read_back_as_it_was(tiny_config: Callable[..., HarvestConfig], tmp_path: Path) -> None:
    job = Harvest(tiny_config(max_norm_ratio=None), tmp_path)
    store = StoreWriter(job.path, job.request).finish(d_model=16)
    assert isinstance(store.request, HarvestRequest)
    assert store.request == job.request
    assert store.request.key == store.key


def test_a_request_of_another_version_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path / "key").path
    values = json.loads((path / "request.json").read_text())
    (path / "request.json").write_text(json.dumps(values | {"colour": "red"}))
    reseal(path, {"request_sha256": sha256_of(path / "request.json")})
    with pytest.raises(StoreError, match=r"request\.json is not a request that this version .* Unknown setting colour"):
        Store.open(path)


def test_a_harvested_store_holds_what_its_layout_says(
    tiny_config: Callable[..., HarvestConfig], tmp_path: Path
) -> None:
    store = harvest(tiny_config(dtype="bfloat16"), tmp_path)
    names = {split: set(store.read(store.shards(split)[0])) for split in Split}
    assert names == {
        Split.PAIRS: {"x", "g", "context", "position"},
        Split.HELDOUT: {"x", "context", "position"},
        Split.TRAIN: {"x"},
    }
    pairs = store.read(store.shards(Split.PAIRS)[0])
    assert (pairs["x"].dtype, pairs["g"].dtype) == (torch.bfloat16, torch.float32)
    assert json.loads((store.path / "request.json").read_text())["model"]["hook"] == "model.layers.0"


@pytest.mark.parametrize("batch_size", [1, 3, 4, 7, 100])
def test_batches_run_across_shards(tmp_path: Path, batch_size: int) -> None:
    """Batches do not show where shards end: only the last one is smaller, and the rows are in order."""
    writer = StoreWriter(tmp_path / "store", REQUEST)
    rows = torch.arange(20, dtype=torch.float16)[:, None]
    for index, part in enumerate(rows.split([6, 1, 9, 4])):
        writer.add(shard_file(Split.HELDOUT, index), {"x": part, "context": part[:, 0].int()}, {})
    batches = [batch["x"] for batch in writer.finish(1).batches(Split.HELDOUT, batch_size)]
    assert torch.equal(torch.cat(batches), rows.float())
    assert all(len(batch) == batch_size for batch in batches[:-1])
