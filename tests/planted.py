"""A store with a known answer: sparse sums of orthonormal directions, half of which carry loss gradient."""

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


class Planted(NamedTuple):
    store: Store
    directions: Tensor
    """Orthonormal rows; the first `n_loud` carry gradient."""
    n_loud: int


def planted_store(path: Path, d_model: int = 32, n_loud: int = 8, n_rows: int = 8192, seed: int = 0) -> Planted:
    """Make a store in which 2·n_loud directions fire equally often and only the first half matter to the loss."""
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(d_model, d_model, generator=generator))
    directions = basis[: 2 * n_loud]
    loud = directions[:n_loud]

    def sample(n: int) -> tuple[Tensor, Tensor]:
        on = torch.rand(n, 2 * n_loud, generator=generator) < 0.12
        strength = (1 + torch.rand(n, 2 * n_loud, generator=generator)) * on
        noise = 0.01 * torch.randn(n, d_model, generator=generator)
        slopes = 0.5 + torch.rand(n, n_loud, generator=generator)
        return strength @ directions + noise, slopes @ loud

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
    return Planted(writer.finish(d_model), directions, n_loud)
