"""How latents are used on text they have never seen: how many fire, which never do, which always do, and how often."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.config import require, require_whole
from dmsae.evaluation.subject import Dictionary, Subject, require_heldout
from dmsae.progress import SILENT, Progress
from dmsae.sae.sae import SAE


@dataclass(frozen=True, slots=True)
class ActivityConfig:
    """What counts as always on, and how firing rates are counted."""

    always_on: float = 0.5
    """A latent that fires on a larger share of tokens is always on: a linear unit rather than a feature."""
    bins_per_decade: int = 2
    """Bins of the histogram of firing rates for each factor of ten, from 1e-6 to 1."""
    batch_size: int = 2048
    """Tokens that compete in one BatchTopK, when sparsity is measured as in training."""

    def __post_init__(self) -> None:
        require(0 < self.always_on < 1, "always_on", self.always_on, "lie between 0 and 1")
        require_whole("bins_per_decade", self.bins_per_decade, 1)
        require_whole("batch_size", self.batch_size, 1)


class Sparsity(NamedTuple):
    """Latents that fire per token."""

    total: float
    core: float
    noncore: float


class ActivityResult(NamedTuple):
    """How the latents of a dictionary fire on held-out activations."""

    n_tokens: int
    l0: Sparsity
    """At inference: each activation against its latent's threshold."""
    l0_batchtopk: Sparsity | None
    """As in training: the largest of a batch. None for what is no SAE."""
    n_dead: int
    """Latents that never fire. On few tokens, rare ones are among them."""
    n_dead_core: int
    n_always_on: int
    n_always_on_core: int
    share_dead: float
    share_always_on: float
    median_rate: float
    """Median firing rate of the latents that fire."""
    rate_edges: list[float]
    """Edges of the bins of firing rates, evenly spaced in log rate. A bin includes its upper edge."""
    rate_counts: list[int]
    """Latents in each bin. Those that never fire are in none of them."""


_LOWEST_DECADE = -6


@torch.no_grad()
def activity(
    subjects: Sequence[Subject], store: Store, config: ActivityConfig, progress: Progress = SILENT
) -> list[ActivityResult]:
    """Return how the latents of each subject fire on all held-out activations of a store."""
    n_tokens = require_heldout(store, subjects)
    counts = [_Counts(subject.dictionary) for subject in subjects]
    with progress.bar("activity", n_tokens * len(subjects), "tok") as bar:
        for batch in store.batches(Split.HELDOUT, config.batch_size):
            for count in counts:
                count.add(batch["x"])
                bar.advance(len(batch["x"]))
    return [count.figures(config) for count in counts]


class _Counts:
    """On how many tokens each latent of a dictionary fired, at inference and as in training."""

    def __init__(self, dictionary: Dictionary) -> None:
        self._dictionary, self._n_tokens = dictionary, 0
        self._trained = dictionary if isinstance(dictionary, SAE) else None
        self._fired_K = torch.zeros(dictionary.config.width, dtype=torch.int64)
        self._kept_K = torch.zeros_like(self._fired_K)
        self._warm_start: float | None = None

    def add(self, x_BD: Tensor) -> None:
        """Take in a batch of raw activations."""
        x_BD = x_BD.to(self._dictionary.W_dec)
        self._n_tokens += len(x_BD)
        self._fired_K += (self._dictionary.encode(x_BD) > 0).sum(0).cpu()
        if self._trained is not None:
            codes = self._trained.train_codes(x_BD, self._warm_start)
            self._warm_start = float(codes.active.values_S.min()) if len(codes.active.values_S) else None
            self._kept_K += torch.bincount(codes.active.latents_S, minlength=len(self._kept_K)).cpu()
            if codes.core_BC is not None:
                self._kept_K[: codes.core_BC.shape[1]] += (codes.core_BC > 0).sum(0).cpu()

    def figures(self, config: ActivityConfig) -> ActivityResult:
        """Return the figures over everything added."""
        rates_K = self._fired_K.double() / self._n_tokens
        n_core, width = self._dictionary.config.n_core, self._dictionary.config.width
        dead_K, always_K = rates_K == 0, rates_K > config.always_on
        edges = rate_edges(config.bins_per_decade)
        return ActivityResult(
            n_tokens=self._n_tokens,
            l0=self._sparsity(self._fired_K),
            l0_batchtopk=self._sparsity(self._kept_K) if self._trained is not None else None,
            n_dead=int(dead_K.sum()),
            n_dead_core=int(dead_K[:n_core].sum()),
            n_always_on=int(always_K.sum()),
            n_always_on_core=int(always_K[:n_core].sum()),
            share_dead=float(dead_K.sum() / width),
            share_always_on=float(always_K.sum() / width),
            median_rate=float(rates_K[~dead_K].median()) if (~dead_K).any() else 0.0,
            rate_edges=edges.tolist(),
            rate_counts=[int(((rates_K > low) & (rates_K <= high)).sum()) for low, high in pairwise(edges.tolist())],
        )

    def _sparsity(self, fired_K: Tensor) -> Sparsity:
        n_core = self._dictionary.config.n_core
        core, noncore = (float(part.sum() / self._n_tokens) for part in (fired_K[:n_core], fired_K[n_core:]))
        return Sparsity(core + noncore, core, noncore)


def rate_edges(bins_per_decade: int) -> Tensor:
    """Return edges of bins of firing rates, evenly spaced in log rate from 1e-6 to exactly 1, in float64."""
    n_bins = -_LOWEST_DECADE * bins_per_decade
    return torch.logspace(_LOWEST_DECADE, 0, n_bins + 1, dtype=torch.float64)
