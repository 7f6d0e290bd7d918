"""Activations made from known directions of unequal frequency, and short trainings on them.

Shared by the tests of the training loop.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmsae.activations.sources import ActivationSource
from dmsae.activations.stream import ActivationStream
from dmsae.config import Json
from dmsae.sae.config import DenseCore, SAEConfig, SparseCore
from dmsae.training.config import TrainConfig
from dmsae.training.learner import SAESpec
from dmsae.training.trainer import Trainer


class Zipf:
    """Sparse sums of random unit directions, as a source of activations that are computed when they are asked for.

    Direction i is active on a token with probability 0.5 / (i + 1)^0.8, independently of the others, with a strength
    between 4 and 12; every token is shifted by the same offset and carries a little noise.
    """

    def __init__(self, d_model: int = 32, n_directions: int = 32, n_rows: int = 1500, n_blocks: int = 2) -> None:
        self.d_model, self._n_rows, self._n_blocks = d_model, n_rows, n_blocks
        self.facts: Json = {"data": "zipf"}
        made = torch.Generator().manual_seed(7)
        directions = torch.randn(n_directions, d_model, generator=made)
        self.directions: Tensor = directions / directions.norm(dim=1, keepdim=True)
        self.frequency: Tensor = 0.5 / torch.arange(1, n_directions + 1) ** 0.8
        self._offset: Tensor = 2 * torch.randn(d_model, generator=made)

    def rows(self, n_rows: int, seed: int) -> Tensor:
        """Return fresh activations."""
        made = torch.Generator().manual_seed(seed)
        shape = (n_rows, len(self.directions))
        active = torch.rand(shape, generator=made) < self.frequency
        strength: Tensor = active * (4 + 8 * torch.rand(shape, generator=made))
        noise: Tensor = 0.05 * torch.randn(n_rows, self.d_model, generator=made)
        return strength @ self.directions + self._offset + noise

    def block(self, epoch: int, index: int, seed: int) -> Tensor | None:
        """Return one block of an epoch; every epoch has the same blocks."""
        return self.rows(self._n_rows, index) if index < self._n_blocks else None


SHORT: dict[str, Any] = {"tokens": 60 * 64, "batch_size": 64, "lr": 1e-3, "norm_batches": 3, "log_every": 7}
"""Settings of a training of 60 steps that takes a fraction of a second."""

DENSE, SPARSE = DenseCore(5, k_noncore=4), SparseCore(5)
"""Both kinds of core that `small_sae` takes."""


def small_sae(core: DenseCore | SparseCore | None = None, **changes: Any) -> SAEConfig:
    """Return an SAE of 48 latents in three groups for these activations; keywords change single settings.

    With a core of five, the groups before the last keep their sizes.
    """
    settings: dict[str, Any] = {"d_model": 32, "width": 48, "k": 4, "core": core}
    settings["prefixes"] = (13, 29, 48) if core else (8, 24, 48)
    # Beside a dense core, k is only what was asked for: another value than k_noncore shows that nothing reads it.
    if isinstance(core, DenseCore):
        settings["k"] = 6
    return SAEConfig(**settings | changes)


def trainer(directory: Path, *specs: SAESpec, source: ActivationSource | None = None, **changes: Any) -> Trainer:
    """Return a short training of one small SAE or of those given; keywords change single settings."""
    config = TrainConfig(**SHORT | changes)
    source = source or Zipf()
    stream = ActivationStream(source, config.batch_size, seed=3)
    return Trainer(specs or [SAESpec("sae", small_sae())], config, stream, directory, source.facts)
