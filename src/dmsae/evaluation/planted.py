"""A problem with a known answer: activations made of planted features, and a loss that reads only some of them.

Features are directions, more of them than dimensions. How often they fire follows a power law; some fire together more
often than by chance, and some only where their parent does. A small fixed network reads a few of them and predicts a
class; g is the exact gradient of its cross-entropy at x. All of it goes into an ordinary store, so that SAEs, scores
and cores can be held against what was planted.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize, one_hot

from dmsae.activations.importing import import_store
from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.config import require, require_whole, to_dict
from dmsae.disk.files import canonical_hash
from dmsae.progress import SILENT, Progress
from dmsae.seeds import generator

_WHOLE = {"d_model": 1, "n_features": 1, "n_pairs": 0, "n_families": 0, "n_children": 1, "read_every": 2}
_WHOLE |= {"n_classes": 2, "train_rows": 1, "heldout_rows": 1, "pair_rows": 1, "seed": 0}
"""Settings that are whole numbers, and the least each may be."""
_SAMPLE = 16_384
"""Rows from which the reader's weights are fitted."""


@dataclass(frozen=True, slots=True)
class PlantedConfig:
    """What is planted, and how many rows of it are drawn."""

    d_model: int = 48
    """Width D of the activations."""
    n_features: int = 96
    """Planted directions F. Up to D they are orthonormal; beyond, they are random and in superposition."""
    top_rate: float = 0.25
    """Share of rows on which the most frequent feature fires."""
    exponent: float = 0.7
    """The i-th feature without a parent fires on top_rate · i^−exponent of the rows."""
    n_pairs: int = 12
    """Pairs of features, of neighbouring rates, that fire together more often than by chance."""
    correlation: float = 0.5
    """Correlation of the two features of a pair."""
    n_families: int = 8
    """Features that are parents."""
    n_children: int = 2
    """Children of each parent. One of them may fire where the parent does, and none elsewhere."""
    child_share: float = 0.6
    """Share of a parent's rows on which one of its children fires too."""
    loudness: float = 2.0
    """Mean strengths of features lie between 1 and this, evenly in their logarithm."""
    spread: float = 0.25
    """Standard deviation of a feature's strength where it fires, as a share of its mean."""
    noise: float = 0.03
    """Standard deviation of the noise in each dimension."""
    read_every: int = 4
    """The loss reads one, any, of every so many features that are neighbours in rate: rates say nothing about it."""
    n_classes: int = 16
    """Classes that the loss is about."""
    train_rows: int = 100_000
    heldout_rows: int = 8_192
    pair_rows: int = 8_192
    """Rows with gradients."""
    seed: int = 0
    """Decides directions, roles, the reader and all rows."""

    def __post_init__(self) -> None:
        for name, low in _WHOLE.items():
            require_whole(name, getattr(self, name), low)
        for name in ("top_rate", "child_share"):
            require(0 < getattr(self, name) < 1, name, getattr(self, name), "lie between 0 and 1")
        for name in ("exponent", "spread", "noise"):
            require(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "be at least 0")
        require(0 <= self.correlation < 1, "correlation", self.correlation, "be at least 0 and below 1")
        require(1 <= self.loudness < math.inf, "loudness", self.loudness, "be at least 1")
        room = self.n_roots >= max(2 * self.n_pairs + self.n_families, 3 * self.n_families) + 2
        roles = f"{self.n_pairs} pairs and {self.n_families} parents among the most frequent third"
        require(room, "n_features", self.n_features, f"leave room, besides children, for {roles}")

    @property
    def n_roots(self) -> int:
        """Features without a parent."""
        return self.n_features - self.n_families * self.n_children


class Sample(NamedTuple):
    """Rows, and what they are made of."""

    x_BD: Tensor
    strengths_BF: Tensor
    """How strong each feature is in each row; 0 where it does not fire."""


class Pairs(NamedTuple):
    """Features that fire together more often than by chance, as indices."""

    first: Tensor
    second: Tensor


class Planted:
    """Planted features, the rows that are drawn from them, and the loss that reads some of them."""

    def __init__(self, config: PlantedConfig) -> None:
        self.config = config
        draws = generator(config.seed, "planted")
        self.directions_FD = _directions(config, draws)
        """Unit rows."""
        self.parents, self.pairs = _roles(config, draws)
        """The parents, and the correlated pairs. The features after `n_roots` are the parents' children, in order."""
        self.rates_F = _rates(config, self.parents)
        """Share of rows on which each feature fires."""
        self._both = _joint_rates(config, *(self.rates_F[one] for one in self.pairs))
        self.means_F = config.loudness ** torch.rand(config.n_features, generator=draws)
        """Mean strength of each feature where it fires."""
        self.is_read_F = _read(config, self.rates_F, draws)
        """Which features the loss reads."""
        self._reader = Reader.fitted(self.sample(_SAMPLE, "reader"), self.directions_FD, self.is_read_F, draws, config)

    def sample(self, n_rows: int, purpose: str) -> Sample:
        """Return rows for a purpose; the same purpose gives the same rows, and other purposes unrelated ones."""
        config = self.config
        draws = generator(config.seed, "planted rows", purpose)
        fires_BF = self._fires(torch.rand(n_rows, config.n_features, generator=draws))
        spread_BF = config.spread * torch.randn(n_rows, config.n_features, generator=draws)
        strengths_BF = fires_BF * self.means_F * (1 + spread_BF).clamp_(min=0.1)
        noise_BD = config.noise * torch.randn(n_rows, config.d_model, generator=draws)
        return Sample(strengths_BF @ self.directions_FD + noise_BD, strengths_BF)

    def heldout(self) -> Sample:
        """Return the held-out rows, in the order in which the store holds them."""
        return self.sample(self.config.heldout_rows, Split.HELDOUT)

    def losses(self, sample: Sample, x_BD: Tensor) -> Tensor:
        """Return the loss of each row, with the classes that its features make likely, at activations x."""
        exact = sample.strengths_BF[:, self.is_read_F]
        return self._reader.losses(x_BD, self._reader.classes(exact, generator(self.config.seed, "planted classes")))

    def gradients(self, sample: Sample) -> Tensor:
        """Return the gradient of each row's loss at its x, [B, D]."""
        x_BD = sample.x_BD.detach().requires_grad_()
        return torch.autograd.grad(self.losses(sample, x_BD).sum(), x_BD)[0]

    def store(self, root: Path | None = None, progress: Progress = SILENT) -> Store:
        """Return a store of these rows: to train on, held out, and with gradients."""
        config, pairs = self.config, self.sample(self.config.pair_rows, Split.PAIRS)
        return import_store(
            f"planted-{canonical_hash(to_dict(config))[:8]}",
            self.sample(config.train_rows, Split.TRAIN).x_BD,
            heldout=self.heldout().x_BD,
            pairs=(pairs.x_BD, self.gradients(pairs)),
            root=root,
            dtype="float32",
            seed=config.seed,
            shard_rows=max(1, config.train_rows // 8),
            progress=progress,
        )

    def _fires(self, chance_BF: Tensor) -> Tensor:
        """Return which features fire, given an even random number for each."""
        config, rates_F = self.config, self.rates_F
        fires_BF = chance_BF < rates_F
        first, second = self.pairs
        with_first = self._both / rates_F[first]
        without = (rates_F[second] - self._both) / (1 - rates_F[first])
        fires_BF[:, second] = chance_BF[:, second] < torch.where(fires_BF[:, first], with_first, without)
        # One number decides for a whole family which of the children fires, so no two of them do.
        children = chance_BF[:, config.n_roots :].unflatten(1, (config.n_families, config.n_children))
        place = (children[..., 0] * config.n_children / config.child_share).long()
        chosen = one_hot(place.clamp(max=config.n_children), config.n_children + 1)[..., :-1].bool()
        fires_BF[:, config.n_roots :] = (chosen & fires_BF[:, self.parents, None]).flatten(1)
        return fires_BF


class Reader:
    """The network whose loss is differentiated: it estimates some features, cuts them off below, and predicts a class.

    Its estimate of a feature is linear in x, with the weights that serve best under the features' superposition. The
    class is drawn from what the network would predict if its estimates were exact.
    """

    def __init__(self, rows_ED: Tensor, offsets_E: Tensor, cuts_E: Tensor, W_YE: Tensor) -> None:
        self._rows_ED, self._offsets_E, self._cuts_E, self._W_YE = rows_ED, offsets_E, cuts_E, W_YE

    @classmethod
    def fitted(
        cls, sample: Sample, directions_FD: Tensor, is_read_F: Tensor, draws: torch.Generator, config: PlantedConfig
    ) -> "Reader":
        """Return the reader of some features, fitted to a sample."""
        x_BD, a_BE = sample.x_BD.double(), sample.strengths_BF[:, is_read_F].double()
        centred_BD = x_BD - x_BD.mean(0)
        ridge = 1e-6 * centred_BD.square().sum() * torch.eye(config.d_model, dtype=torch.float64)
        rows_ED = torch.linalg.solve(centred_BD.T @ centred_BD + ridge, centred_BD.T @ (a_BE - a_BE.mean(0))).T
        rows_ED /= (rows_ED * directions_FD[is_read_F].double()).sum(1, keepdim=True)
        silent_BE = a_BE == 0
        offsets_E = -((x_BD @ rows_ED.T) * silent_BE).sum(0) / silent_BE.sum(0)
        cuts_E = (a_BE.sum(0) / (~silent_BE).sum(0)) / 2
        W_YE = 2 * torch.randn(config.n_classes, len(rows_ED), generator=draws)
        return cls(rows_ED.float(), offsets_E.float(), cuts_E.float(), W_YE)

    def classes(self, strengths_BE: Tensor, draws: torch.Generator) -> Tensor:
        """Return a class for each row, drawn from what features of these strengths make likely."""
        chances_BY = ((strengths_BE - self._cuts_E).relu() @ self._W_YE.T).softmax(1)
        return torch.multinomial(chances_BY, 1, generator=draws)[:, 0]

    def losses(self, x_BD: Tensor, classes_B: Tensor) -> Tensor:
        """Return the cross-entropy of each row's class, [B]."""
        read_BE = (x_BD @ self._rows_ED.T + self._offsets_E - self._cuts_E).relu()
        return cross_entropy(read_BE @ self._W_YE.T, classes_B, reduction="none")


def _directions(config: PlantedConfig, draws: torch.Generator) -> Tensor:
    rows = torch.randn(max(config.n_features, config.d_model), config.d_model, generator=draws)
    if config.n_features <= config.d_model:
        orthonormal: Tensor = torch.linalg.qr(rows.T).Q.T
        return orthonormal[: config.n_features].contiguous()
    return normalize(rows, dim=1)


def _roles(config: PlantedConfig, draws: torch.Generator) -> tuple[Tensor, Pairs]:
    """Return the parents, from the most frequent third, and pairs of neighbours among all others without a parent."""
    parents = torch.randperm(config.n_roots // 3, generator=draws)[: config.n_families].sort().values
    others = torch.tensor([i for i in range(config.n_roots) if i not in set(parents.tolist())])
    neighbours = others[: len(others) // 2 * 2].view(-1, 2)
    chosen = neighbours[torch.randperm(len(neighbours), generator=draws)[: config.n_pairs]]
    return parents, Pairs(chosen[:, 0], chosen[:, 1])


def _rates(config: PlantedConfig, parents: Tensor) -> Tensor:
    roots = config.top_rate * torch.arange(1, config.n_roots + 1) ** -config.exponent
    children = roots[parents].repeat_interleave(config.n_children) * config.child_share / config.n_children
    return torch.cat([roots, children])


def _joint_rates(config: PlantedConfig, first: Tensor, second: Tensor) -> Tensor:
    """Return the share of rows on which both features of each pair fire, from the rates of either."""
    both = first * second + config.correlation * (first * (1 - first) * second * (1 - second)).sqrt()
    possible = bool((both <= torch.minimum(first, second)).all())
    must = "be possible for every pair, and is not for one whose rates are too far apart"
    require(possible, "correlation", config.correlation, must, "Lower it, or the exponent.")
    return both


def _read(config: PlantedConfig, rates_F: Tensor, draws: torch.Generator) -> Tensor:
    """Return which features are read: one of every few neighbours in rate."""
    order = rates_F.argsort(descending=True, stable=True)
    is_read_F = torch.zeros(len(rates_F), dtype=torch.bool)
    for block in order.split(config.read_every):
        is_read_F[block[torch.randint(len(block), (), generator=draws)]] = True
    return is_read_F
