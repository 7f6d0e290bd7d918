"""Scores by several processes that share the pairs: those of one process, to the bit."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dmsae.activations.harvest import harvest
from dmsae.activations.request import HarvestConfig
from dmsae.activations.splits import Split
from dmsae.activations.store import Store, StoreWriter
from dmsae.cores.attribution import Attribution, AttributionConfig, QuantileOver, attribute
from dmsae.disk.layout import shard_file
from dmsae.sae.config import DenseCore, SAEConfig
from dmsae.sae.sae import SAE
from mesh_stages import score_here
from meshes import Meshes, meshes
from planted import REQUEST, planted_store

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Meshes]:
    with meshes() as opened:
        yield opened


def make_sae(d_model: int) -> SAE:
    made = torch.Generator().manual_seed(3)
    config = SAEConfig(d_model, 64, 6, (21, 40, 64), DenseCore(5, 4))
    sae = SAE.init(config, made, torch.randn(5, d_model, generator=made))
    with torch.no_grad():
        sae.b_dec.normal_(std=0.1, generator=made)
    return sae


def require_equal(one: Attribution, other: Attribution) -> None:
    for field in fields(Attribution):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        assert torch.equal(mine, theirs) if isinstance(mine, Tensor) else mine == theirs, field.name


@pytest.mark.parametrize("shape", [(2, 1), (2, 2)])
def test_a_mesh_gives_the_scores_of_one_process(
    mesh: Meshes, tiny_config: Callable[..., HarvestConfig], tmp_path: Path, shape: tuple[int, int]
) -> None:
    """With text and without; an odd number of batches, the last smaller; fewer batches than ranks."""
    stores = [harvest(tiny_config(pair_tokens=400), tmp_path / "stores"), planted_store(tmp_path / "planted").store]
    assert ["context" in next(store.batches(Split.PAIRS, 1)) for store in stores] == [True, False]
    for store in stores:
        sae = make_sae(store.d_model)
        sae.save(tmp_path / store.key)
        for over, batch_size in ((QuantileOver.ALL, 90), (QuantileOver.ACTIVE, 137), (QuantileOver.ALL, 10_000)):
            config = AttributionConfig(0.95, over, batch_size, n_bootstrap=20)
            alone = attribute(sae, store, config)
            together, *others = mesh.run(shape, score_here, tmp_path / store.key, store.path, config)
            assert others == [None] * (shape[0] * shape[1] - 1)
            require_equal(alone, together)


def test_pairs_that_are_not_finite_are_an_error_wherever_they_are(mesh: Meshes, tmp_path: Path) -> None:
    x = torch.randn(60, 32)
    x[25] = float("inf")  # in the second batch, which the second rank looks at
    writer = StoreWriter(tmp_path / "store", REQUEST)
    writer.add(shard_file(Split.PAIRS, 0), {"x": x, "g": torch.randn(60, 32)}, {})
    store: Store = writer.finish(32)
    make_sae(32).save(tmp_path / "sae")
    first, other = mesh.run((2, 1), score_here, tmp_path / "sae", store.path, AttributionConfig(batch_size=20))
    assert first == "AttributionError: The store store holds (x, g) pairs that are not finite. Harvest it again."
    assert other == f"MeshError: Rank 0 of 2: {first.removeprefix('AttributionError: ')}"
