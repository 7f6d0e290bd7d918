"""Activations made from known directions of unequal frequency, and short trainings on them: what the tests of the
training loop share.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmsae.activations.stream import ActivationStream
from dmsae.sae.sae import SAEConfig
from dmsae.training.learner import Member
from dmsae.training.schedule import TrainConfig
from dmsae.training.trainer import Trainer


class Zipf:
    """Sparse sums of random unit directions, as a source of activations held nowhere.

    Direction i is active on a token with probability 0.5 / (i + 1)^0.8, independently of the others, with a strength
    between 4 and 12; every token is shifted by the same offset and carries a little noise.
    """

    def __init__(self, d_model: int = 32, n_directions: int = 32, n_rows: int = 1500, n_groups: int = 2) -> None:
        self.d_model, self._n_rows, self._n_groups = d_model, n_rows, n_groups
        made = torch.Generator().manual_seed(7)
        directions = torch.randn(n_directions, d_model, generator=made)
        self.directions = directions / directions.norm(dim=1, keepdim=True)
        self.frequency = 0.5 / torch.arange(1, n_directions + 1) ** 0.8
        self._offset = 2 * torch.randn(d_model, generator=made)

    def rows(self, n_rows: int, seed: int) -> Tensor:
        """Return fresh activations."""
        made = torch.Generator().manual_seed(seed)
        shape = (n_rows, len(self.directions))
        active = torch.rand(shape, generator=made) < self.frequency
        strength = active * (4 + 8 * torch.rand(shape, generator=made))
        return strength @ self.directions + self._offset + 0.05 * torch.randn(n_rows, self.d_model, generator=made)

    def group(self, epoch: int, index: int) -> Tensor | None:
        """Return one of the groups of an epoch; every epoch brings the same."""
        return self.rows(self._n_rows, index) if index < self._n_groups else None


SHORT: dict[str, Any] = {"tokens": 60 * 64, "batch_size": 64, "lr": 1e-3, "norm_batches": 3, "log_every": 7}
"""Settings of a training of 60 steps that takes a fraction of a second."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep so small tensors on one thread: more would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_sae(**changes: Any) -> SAEConfig:
    """Return an SAE of 48 latents in three groups for these activations; keywords change single settings."""
    settings: dict[str, Any] = {"d_model": 32, "width": 48, "k": 4, "prefixes": (8, 24, 48)}
    return SAEConfig(**settings | changes)


def trainer(directory: Path, *members: Member, source: Any = None, **changes: Any) -> Trainer:
    """Return a short training of one small SAE or of the members given; keywords change single settings."""
    config = TrainConfig(**SHORT | changes)
    stream = ActivationStream(source or Zipf(), config.batch_size, seed=3)
    return Trainer(members or [Member("sae", small_sae())], config, stream, directory, {"data": "zipf"})
