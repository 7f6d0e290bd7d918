"""One stream of batches: the same for the same seed, each row once per epoch, and exactly resumable."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dmsae.activations.harvest import Harvest, harvest
from dmsae.activations.request import HarvestConfig
from dmsae.activations.sources import LiveSource, StoreSource
from dmsae.activations.splits import Split
from dmsae.activations.store import Store, StoreWriter
from dmsae.activations.stream import ActivationStream
from dmsae.disk.layout import shard_file
from dmsae.errors import ConfigError, StoreCorruptError, StoreError
from planted import REQUEST

pytestmark = pytest.mark.usefixtures("one_thread")
D = 3
SIZES = (40, 25, 0, 33, 40, 7, 18)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Shards of uneven sizes, one of them empty, whose rows are numbered in their first column."""
    writer = StoreWriter(tmp_path_factory.mktemp("stores") / "numbered", REQUEST)
    first = 0
    for index, size in enumerate(SIZES):
        rows = torch.arange(first, first + size, dtype=torch.float32)[:, None].expand(-1, D)
        writer.add(shard_file(Split.TRAIN, index), {"x": rows.half()}, {})
        first += size
    return writer.finish(D)


def stream_of(store: Store, batch_size: int = 10, seed: int = 0, mix_shards: int = 2) -> ActivationStream:
    return ActivationStream(StoreSource(store, mix_shards), batch_size, seed)


def numbers(batches: list[Tensor]) -> list[int]:
    return torch.cat(batches)[:, 0].int().tolist()


@given(st.integers(1, sum(SIZES)), st.integers(1, 8), st.integers(0, 5))
def test_each_epoch_is_a_permutation_up_to_its_tail(store: Store, batch_size: int, mix_shards: int, seed: int) -> None:
    stream = stream_of(store, batch_size, seed, mix_shards)
    per_epoch = sum(SIZES) // batch_size
    epochs = [numbers(list(islice(stream, per_epoch))) for _ in range(3)]
    stream.close()
    for epoch in epochs:
        assert len(epoch) == len(set(epoch)) == per_epoch * batch_size
        assert set(epoch) <= set(range(sum(SIZES)))
    assert stream.cursor.epoch in (2, 3)
    if per_epoch * batch_size > 20:
        assert epochs[0] != epochs[1] != epochs[2]


def test_batches_are_float32_rows_of_the_store(store: Store) -> None:
    stream = stream_of(store)
    batch = next(stream)
    assert (batch.shape, batch.dtype) == ((10, D), torch.float32)
    assert (batch == batch[:, :1]).all()
    assert stream.d_model == D


def test_order_depends_on_the_seed_and_mixes_documents_apart(store: Store) -> None:
    first, again, other = (numbers(list(islice(stream_of(store, seed=seed), 30))) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    # From the second epoch on, which shards meet in a block changes too.
    source = StoreSource(store, mix_shards=2)

    def meetings(epoch: int, seed: int) -> set[tuple[float, ...]]:
        blocks = (source.block(epoch, index, seed) for index in range(4))
        return {tuple(sorted(block[:, 0].tolist())) for block in blocks if block is not None}

    assert meetings(0, 0) == meetings(0, 1)
    assert meetings(0, 0) != meetings(1, 0) != meetings(1, 1)


@given(st.integers(0, 45), st.integers(1, 60), st.integers(1, 4))
def test_a_restored_cursor_resumes_exactly(store: Store, n_before: int, batch_size: int, mix_shards: int) -> None:
    straight = stream_of(store, batch_size, mix_shards=mix_shards)
    list(islice(straight, n_before))
    cursor = straight.cursor
    expected = list(islice(straight, 12))
    assert straight.cursor != cursor
    fresh = stream_of(store, batch_size, mix_shards=mix_shards)
    fresh.seek(cursor)
    assert fresh.cursor == cursor
    assert all(torch.equal(a, b) for a, b in zip(expected, islice(fresh, 12), strict=True))
    # Also in the middle of another place.
    straight.seek(cursor)
    assert torch.equal(next(straight), expected[0])
    straight.close()
    fresh.close()


def test_a_restored_cursor_resumes_exactly_in_another_process(store: Store) -> None:
    stream = stream_of(store)
    list(islice(stream, 21))
    code = (
        "import sys\nfrom itertools import islice\nfrom pathlib import Path\nimport torch\n"
        "from dmsae.activations.sources import StoreSource\n"
        "from dmsae.activations.stream import ActivationStream, Cursor\n"
        "from dmsae.activations.store import Store\n"
        "stream = ActivationStream(StoreSource(Store.open(Path(sys.argv[1])), 2), 10, 0)\n"
        "stream.seek(Cursor(*map(int, sys.argv[2:])))\n"
        "print(torch.cat(list(islice(stream, 20)))[:, 0].int().tolist())\n"
    )
    at = stream.cursor
    command = [sys.executable, "-c", code, str(store.path), str(at.epoch), str(at.block), str(at.row)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.strip() == str(numbers(list(islice(stream, 20))))


def test_too_few_rows_or_none_are_an_error(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"fewer activations than batch_size = {sum(SIZES) + 1}"):
        next(stream_of(store, sum(SIZES) + 1))
    with pytest.raises(ConfigError, match="batch_size = 0; it must be a whole number of at least 1"):
        stream_of(store, 0)
    writer = StoreWriter(tmp_path / "empty", REQUEST)
    with pytest.raises(StoreError, match="The store empty holds no training activations"):
        StoreSource(writer.finish(D))


def test_a_damaged_shard_is_named_when_its_turn_comes(store: Store, tmp_path: Path) -> None:
    path = Path(shutil.copytree(store.path, tmp_path / "damaged"))
    shard = path / shard_file(Split.TRAIN, 3)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    stream = stream_of(Store.open(path))
    assert len(next(stream)) == 10
    with pytest.raises(StoreCorruptError, match=r"00003\.safetensors is damaged"):
        list(islice(stream, 20))


@pytest.fixture
def both(
    tiny_config: Callable[..., HarvestConfig], tmp_path: Path
) -> Callable[[], tuple[ActivationStream, ActivationStream]]:
    """Return a function that makes a stream from disk and a live one of the same request."""
    config = tiny_config(train_tokens=1500)
    on_disk = harvest(config, tmp_path)

    def make() -> tuple[ActivationStream, ActivationStream]:
        live = LiveSource(Harvest(config, tmp_path / "unused"), mix_shards=2)
        return ActivationStream(StoreSource(on_disk, 2), 60, 0), ActivationStream(live, 60, 0)

    return make


Both = Callable[[], tuple[ActivationStream, ActivationStream]]


def test_live_and_disk_give_the_same_batches(both: Both, tmp_path: Path) -> None:
    disk, live = both()
    assert disk.d_model == live.d_model == 16
    epochs = [(list(islice(disk, 25)), list(islice(live, 25))) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*epochs[0], strict=True))
    assert not (tmp_path / "unused").exists()
    # Later epochs hold the same rows, each source in an order of its own.
    first, *later = (torch.cat(rows)[torch.cat(rows)[:, 0].argsort()] for rows in (epochs[0][0], *epochs[1]))
    assert all(torch.equal(first, rows) for rows in later)
    assert not torch.equal(torch.cat(epochs[1][1]), torch.cat(epochs[0][1]))


@pytest.mark.parametrize("n_before", [0, 5, 17, 23, 30])
def test_live_resumes_exactly(n_before: int, both: Both) -> None:
    straight, fresh = both()[1], both()[1]
    list(islice(straight, n_before))
    fresh.seek(straight.cursor)
    assert all(torch.equal(a, b) for a, b in zip(islice(straight, 8), islice(fresh, 8), strict=True))
