"""Data ranks read different shards, and together get the batches of one process."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dmsae.activations.harvest import Harvest, harvest
from dmsae.activations.request import HarvestConfig
from dmsae.activations.sources import LiveSource, StoreSource
from dmsae.activations.splits import Split
from dmsae.activations.store import Store, StoreWriter
from dmsae.activations.stream import Cursor
from dmsae.disk.layout import shard_file
from dmsae.sae.comms import ALONE
from mesh_streams import Streamed, hear_of_stream, read_stream, train_on_store
from meshes import Meshes, meshes
from planted import REQUEST, planted_store

pytestmark = pytest.mark.usefixtures("one_thread")
D = 3
SIZES = (40, 25, 0, 33, 40, 7, 18)
SHAPES = [(2, 1), (1, 2), (2, 2), (4, 1)]
MakeConfig = Callable[..., HarvestConfig]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Meshes]:
    with meshes() as opened:
        yield opened


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Shards of uneven sizes, one of them empty."""
    writer = StoreWriter(tmp_path_factory.mktemp("stores") / "uneven", REQUEST)
    made = torch.Generator().manual_seed(0)
    for index, size in enumerate(SIZES):
        writer.add(shard_file(Split.TRAIN, index), {"x": torch.randn(size, D, generator=made).half()}, {})
    return writer.finish(D)


def source(path: Path, mix_shards: int) -> StoreSource:
    return StoreSource(Store.open(path), mix_shards)


def live(config: HarvestConfig, root: Path) -> LiveSource:
    return LiveSource(Harvest(config, root), mix_shards=2)


def union(ranks: list[Streamed], shape: tuple[int, int]) -> list[Tensor]:
    """Return the batches of all data ranks together, having seen that ranks with other latents have the same."""
    for rank, one in enumerate(ranks):
        first = ranks[rank - rank % shape[1]]
        assert all(torch.equal(a, b) for a, b in zip(one.batches, first.batches, strict=True))
        assert one.cursor == ranks[0].cursor
    return [torch.cat(parts) for parts in zip(*(one.batches for one in ranks[:: shape[1]]), strict=True)]


@pytest.mark.parametrize("mix_shards", [1, 2, 4, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_union_of_ranks_gets_the_batches_of_one_process(
    mesh: Meshes, store: Store, shape: tuple[int, int], mix_shards: int
) -> None:
    """Over several epochs, also where a block has fewer shards than there are ranks; batches lie across blocks."""
    make = partial(source, store.path, mix_shards)
    alone = read_stream(ALONE, make, 12, 40)
    ranks = mesh.run(shape, read_stream, make, 12, 40)
    assert alone.cursor.epoch == 3
    assert alone.cursor == ranks[0].cursor
    assert {len(batch) for one in ranks for batch in one.batches} == {12 // shape[0]}
    for theirs, expected in zip(union(ranks, shape), alone.batches, strict=True):
        assert torch.equal(theirs, expected)


@pytest.mark.parametrize("shape", [(2, 1), (4, 1)])
@pytest.mark.parametrize("mix_shards", [2, 4])
def test_each_shard_is_read_and_verified_by_one_data_rank(
    mesh: Meshes, store: Store, shape: tuple[int, int], mix_shards: int
) -> None:
    n_in_epoch = sum(SIZES) // 12
    ranks = mesh.run(shape, read_stream, partial(source, store.path, mix_shards), 12, n_in_epoch)
    read = [file for one in ranks for file in one.read]
    assert sorted(read) == [shard_file(Split.TRAIN, index) for index in range(len(SIZES))]
    assert {len(one.read) for one in ranks} == {len(SIZES) // shape[0], len(SIZES) // shape[0] + 1}


@pytest.mark.parametrize(("before", "after"), [((2, 1), (2, 1)), ((1, 1), (2, 2)), ((2, 2), (4, 1)), ((4, 1), (1, 1))])
def test_any_mesh_resumes_at_the_cursor_of_any_other(
    mesh: Meshes, store: Store, before: tuple[int, int], after: tuple[int, int]
) -> None:
    make = partial(source, store.path, 2)
    whole = read_stream(ALONE, make, 12, 30)

    def run(shape: tuple[int, int], n: int, at: Cursor | None = None) -> list[Streamed]:
        arguments = make, 12, n, at
        return [read_stream(ALONE, *arguments)] if shape == (1, 1) else mesh.run(shape, read_stream, *arguments)

    for n_before in (3, 14):
        cursor = run(before, n_before)[0].cursor
        rest = union(run(after, 30 - n_before, cursor), after)
        assert all(torch.equal(a, b) for a, b in zip(rest, whole.batches[n_before:], strict=True))


def test_live_each_model_sees_its_own_contexts(mesh: Meshes, tiny_config: MakeConfig, tmp_path: Path) -> None:
    """Live and from disk, alone and on a mesh: the same batches."""
    config = tiny_config(train_tokens=1500)
    on_disk = harvest(config, tmp_path / "stores")
    alone = read_stream(ALONE, partial(source, on_disk.path, 2), 60, 25)
    ranks = mesh.run((2, 1), read_stream, partial(live, config, tmp_path / "unused"), 60, 25)
    for theirs, expected in zip(union(ranks, (2, 1)), alone.batches, strict=True):
        assert torch.equal(theirs, expected)
    seen = [int(index) for one in ranks for index in one.read]
    assert sorted(seen) == list(range(len(on_disk.shards(Split.TRAIN))))
    assert all(len(one.read) > 1 for one in ranks)


@pytest.mark.parametrize("shape", [(2, 1), (2, 2)])
def test_a_damaged_shard_is_named_on_all_ranks(
    mesh: Meshes, store: Store, tmp_path: Path, shape: tuple[int, int]
) -> None:
    path = Path(shutil.copytree(store.path, tmp_path / "damaged"))
    (path / shard_file(Split.TRAIN, 3)).write_bytes(b"")
    heard = mesh.run(shape, hear_of_stream, partial(source, path, 2), 10, 20)
    assert len(heard) == shape[0] * shape[1]
    for one in heard:
        assert one.startswith(f"MeshError: Rank {shape[1]} of {len(heard)}: ")
        assert "00003.safetensors is damaged" in one


def test_more_data_ranks_than_shards_are_refused_on_all(mesh: Meshes, tmp_path: Path) -> None:
    whole = planted_store(tmp_path / "four").store
    writer = StoreWriter(tmp_path / "three", REQUEST)
    for record in whole.shards(Split.TRAIN)[:3]:
        writer.add(record.file, whole.read(record), {})
    writer.finish(whole.d_model)
    first, *others = mesh.run((4, 1), train_on_store, tmp_path / "three", tmp_path / "run")
    assert first.startswith("ConfigError: mesh.data = 4; it must be at most 3, the training shards of the store")
    assert "start fewer, or harvest with a smaller shard_tokens" in first
    assert others == [first.replace("ConfigError: ", "MeshError: Rank 0 of 4: ")] * 3
    assert not (tmp_path / "run").exists()
    assert mesh.run((2, 2), train_on_store, tmp_path / "three", tmp_path / "run") == ["nothing"] * 4
