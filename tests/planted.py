"""Stores with a known answer: sparse sums of orthonormal directions, of which the loss reads only some."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.activations.identity import ModelIdentity
from dmsae.activations.request import ImportRequest, StoreRequest
from dmsae.activations.splits import Split
from dmsae.activations.store import Store, StoreWriter
from dmsae.disk.layout import shard_file, token_file

MODEL = ModelIdentity("planted", "", "0" * 64, "1" * 64, "nowhere", "float32")
"""The model that all stores made by hand claim to be of."""
REQUEST: StoreRequest = ImportRequest("by hand", MODEL, "2" * 64, shard_rows=1, dtype="float32", seed=0)
"""What all stores made by hand claim to be made from."""

Sample = Callable[[int], tuple[Tensor, Tensor]]
"""Draws n rows: activations and loss gradients."""


class Planted(NamedTuple):
    store: Store
    directions: Tensor
    """Orthonormal rows."""
    n_read: int
    """How many of them, from the first on, matter to the loss."""


def planted_store(path: Path, d_model: int = 32, n_read: int = 8, n_rows: int = 8192, seed: int = 0) -> Planted:
    """Make a store in which 2·n_read directions fire equally often and only the first half matter to the loss."""
    generator = torch.Generator().manual_seed(seed)
    directions = _orthonormal(2 * n_read, d_model, generator)

    def sample(n: int) -> tuple[Tensor, Tensor]:
        on = torch.rand(n, 2 * n_read, generator=generator) < 0.12
        strength = (1 + torch.rand(n, 2 * n_read, generator=generator)) * on
        noise = 0.01 * torch.randn(n, d_model, generator=generator)
        slopes = 0.5 + torch.rand(n, n_read, generator=generator)
        return strength @ directions + noise, slopes @ directions[:n_read]

    return Planted(_store_of(path, sample, n_rows), directions, n_read)


def misleading_store(path: Path, d_model: int = 32, n_each: int = 6, n_rows: int = 16_384, seed: int = 0) -> Planted:
    """Make a store in which neither the strength of a direction nor the gradient along it says whether it matters.

    A third of the directions, the first, are quiet and read: they fire on a tenth of the rows, and carry gradient
    where they fire and a coin says so. A third, the lures, fire as often and as strongly, and carry gradient of the
    same size, nine times as often, but only where they do not fire. The last third fire on a quarter of the rows and
    twice as strongly, and carry none.
    """
    generator = torch.Generator().manual_seed(seed)
    directions = _orthonormal(3 * n_each, d_model, generator)
    rates = torch.tensor([0.1, 0.1, 0.25]).repeat_interleave(n_each)
    loudness = torch.tensor([1.0, 1.0, 2.0]).repeat_interleave(n_each)

    def sample(n: int) -> tuple[Tensor, Tensor]:
        shape = n, 3 * n_each
        on = torch.rand(shape, generator=generator) < rates
        strength = (1 + torch.rand(shape, generator=generator)) * loudness * on
        slopes = 0.5 + torch.rand(shape, generator=generator)
        coin = torch.rand(shape, generator=generator) < 0.5
        slopes[:, :n_each] *= on[:, :n_each] & coin[:, :n_each]
        slopes[:, n_each:] *= ~on[:, n_each:] & coin[:, n_each:]
        slopes[:, 2 * n_each :] = 0
        noise = 0.01 * torch.randn(2, n, d_model, generator=generator)
        return strength @ directions + noise[0], slopes @ directions + noise[1]

    return Planted(_store_of(path, sample, n_rows), directions, n_each)


def _orthonormal(n: int, d_model: int, generator: torch.Generator) -> Tensor:
    basis: Tensor = torch.linalg.qr(torch.randn(d_model, d_model, generator=generator)).Q
    return basis[:n]


def _store_of(path: Path, sample: Sample, n_rows: int) -> Store:
    """Write 2048 pairs, 64 held-out rows and four shards of training rows."""
    writer = StoreWriter(path, REQUEST)
    n_contexts = 64
    for split in Split:
        tokens = torch.arange(2 * n_contexts, dtype=torch.int32).view(n_contexts, 2)
        writer.add(token_file(split), {"tokens": tokens, "starts": tokens % 2 == 0}, {})
    x, g = sample(2048)
    writer.add(shard_file(Split.PAIRS, 0), {"x": x, "g": g}, {})
    x, _ = sample(n_contexts)
    where = {
        "context": torch.arange(n_contexts, dtype=torch.int32),
        "position": torch.ones(n_contexts, dtype=torch.int32),
    }
    writer.add(shard_file(Split.HELDOUT, 0), {"x": x, **where}, {})
    for index in range(4):
        writer.add(shard_file(Split.TRAIN, index), {"x": sample(n_rows // 4)[0]}, {})
    return writer.finish(x.shape[1])
