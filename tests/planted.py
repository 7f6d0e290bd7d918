"""A store with a known answer: sparse sums of orthonormal directions, half of which carry loss gradient."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.activations.store import Split, Store, StoreWriter, shard_file, token_file

MODEL = {"name": "planted", "revision": "", "weights_sha256": "0" * 64, "hook": "nowhere"}


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

    writer = StoreWriter(path, {"model": MODEL, "source": "planted", "tokens": {"context_length": 2}, "seed": seed})
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
