"""Nulls: what a worthless dictionary gets.

From a trained SAE and a store come dictionaries of the same shape that fire as often and have learned nothing, or only
half of it. They are evaluated like any other subject; a score means what it has beyond theirs. For the largest cosine
of a random direction with many others there is a formula: `extreme_value_null`.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import normalize

from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.config import Json, require, require_whole, to_dict
from dmsae.cores.statistics import sample_activations
from dmsae.evaluation.random_firing import Firing, RandomFiring, firing
from dmsae.evaluation.ridge import ridge_decoder
from dmsae.evaluation.subject import Dictionary, Subject, require_heldout
from dmsae.sae.config import SAEConfig, SparseCore
from dmsae.sae.sae import SAE
from dmsae.seeds import generator

VERSION = 3
"""Raise it when the same settings make other nulls than before: what was measured on them is then measured again."""
_BATCH = 1024
_DROPPED_BITS = 12
"""Of a float32's bits, those that a histogram ignores: what is left tells apart values 0.05 % from each other."""
_HALF = 1 << (31 - _DROPPED_BITS)
"""Bins of the histogram for numbers of one sign."""
_LARGEST = 0x7F7FFFFF >> _DROPPED_BITS
"""The bin of the largest finite number."""


class NullKind(StrEnum):
    """What a null shares with the SAE that it stands in for."""

    UNTRAINED = "untrained"
    """Shape, and L0 of the core and of each prefix: random unit rows for encoder and decoder, as before training;
    thresholds, or for latents that are on most of the time biases, set so that it fires as often."""
    RANDOM_ENCODER = "random_encoder"
    """Shape, and L0 of the core and of each prefix: the encoder of the untrained one, frozen, with a decoder fitted to
    it by ridge regression."""
    PERMUTED_DECODER = "permuted_decoder"
    """The encoder, and the decoder rows in another order: permuted within the core and within each prefix group."""
    RANDOM_FIRING = "random_firing"
    """The decoder, each latent's firing rate and its mean activation: what fires has nothing to do with x."""


@dataclass(frozen=True, slots=True)
class NullConfig:
    """How nulls are made."""

    seed: int = 0
    """Decides random rows, permutations and random firing."""
    fit_tokens: int = 32_768
    """Training activations to which the decoder of a random encoder is fitted, at most."""
    ridge: float = 0.1
    """Penalty on the squared decoder, as a share of the mean squared activation of a latent."""

    def __post_init__(self) -> None:
        require_whole("fit_tokens", self.fit_tokens, 2)
        require(0 < self.ridge < math.inf, "ridge", self.ridge, "be a positive number")


class NullMaker:
    """Makes the nulls of one SAE; what several of them need is computed once."""

    def __init__(self, sae: SAE, store: Store, config: NullConfig | None = None) -> None:
        require_heldout(store, [Subject("the SAE", sae)])
        self.sae, self._store, self._config = sae, store, config or NullConfig()

    @property
    def facts(self) -> Json:
        """What the nulls depend on, besides the SAE."""
        return {"version": VERSION, "store": self._store.key, "config": to_dict(self._config)}

    def make(self, kind: NullKind) -> Dictionary:
        """Return the null of one kind."""
        match kind:
            case NullKind.UNTRAINED:
                return self._untrained
            case NullKind.RANDOM_ENCODER:
                return self._with_fitted_decoder()
            case NullKind.PERMUTED_DECODER:
                return permuted_decoder(self.sae, self._config.seed)
            case NullKind.RANDOM_FIRING:
                return RandomFiring(self.sae, self._firing, self._config.seed)

    def may_stand_for(self, other: "NullMaker", within: float) -> bool:
        """Return whether these nulls show what a worthless dictionary gets in the place of another SAE, too.

        It has the same width, and its core and prefix groups have as many latents, each but for a share of them; their
        L0s differ by no more than that share in all.
        """
        sizes, others = ([high - low for low, high in _groups(one.sae.config)] for one in (self, other))
        same_width = self.sae.W_dec.shape == other.sae.W_dec.shape
        if not same_width or bool(self.sae.config.n_core) != bool(other.sae.config.n_core) or len(sizes) != len(others):
            return False
        if any(abs(size - its) > within * size for size, its in zip(sizes, others, strict=True)):
            return False
        mine, theirs = (one._l0_groups() for one in (self, other))
        return float((mine - theirs).abs().sum()) <= within * float(mine.sum())

    def _l0_groups(self) -> Tensor:
        return torch.stack([self._firing.rates_K[low:high].sum() for low, high in _groups(self.sae.config)])

    @cached_property
    def _firing(self) -> Firing:
        return firing(self.sae, self._store)

    @cached_property
    def _sample(self) -> Tensor:
        return sample_activations(self._store, self._config.fit_tokens)

    @cached_property
    @torch.no_grad()
    def _untrained(self) -> SAE:
        """Return a fresh SAE of the same shape whose core and prefix groups fire as often as the SAE's."""
        config = shape_of(self.sae.config)
        n_core = config.n_core
        draws = generator(self._config.seed, "untrained")
        core_rows = normalize(torch.randn(n_core, config.d_model, generator=draws)) if n_core else None
        sae = SAE.init(config, draws, core_rows).requires_grad_(False)
        if core_rows is not None:
            sae.W_dec[:n_core] = core_rows  # before training, encoder and decoder are tied
        sae.b_dec.copy_(self._sample.mean(0))
        for low, high in _groups(config):
            part = slice(low, high)
            cut = cut_for(float(self._firing.rates_K[part].sum()), sae, part, self._store)
            # Activations are positive: where more has to fire than is, a bias lifts it above 0.
            sae.threshold[part], sae.b_enc[part] = max(cut, 0.0), max(-cut, 0.0)
        return sae.to(self.sae.W_dec)

    @torch.no_grad()
    def _with_fitted_decoder(self) -> SAE:
        """Return the untrained SAE with its decoder, and no other part of it, fitted to training activations.

        It is fitted for all latents together, not for each prefix.
        """
        sae = SAE(self._untrained.config).to(self.sae.W_dec).requires_grad_(False)
        sae.load_state_dict(self._untrained.state_dict())
        W_dec, b_dec = ridge_decoder(self._untrained, self._sample, self._config.ridge)
        norms_K = W_dec.norm(dim=1)
        learned = norms_K > 0  # a latent that never fires on the sample keeps its random row
        scale_K = norms_K.where(learned, 1.0).to(sae.W_dec)
        sae.W_dec[learned] = (W_dec[learned] / norms_K[learned, None]).to(sae.W_dec)
        sae.b_dec.copy_(b_dec)
        # Decoder rows have unit norm: what the fit makes them longer or shorter, activations are made instead. The
        # encoder is centred at b_dec, which has moved.
        sae.b_enc.add_(sae.W_enc @ (sae.b_dec - self._untrained.b_dec)).mul_(scale_K)
        n_core = sae.config.n_core
        sae.W_enc_core.mul_(scale_K[:n_core, None])
        sae.W_enc_noncore.mul_(scale_K[n_core:, None])
        sae.threshold.mul_(scale_K)
        return sae


def _groups(config: SAEConfig) -> list[tuple[int, int]]:
    """Return where the core and each prefix group begin and end."""
    return list(pairwise(sorted({0, config.n_core, *config.prefixes})))


def shape_of(config: SAEConfig) -> SAEConfig:
    """Return the config of a null: the same width, prefixes and core, whose latents may have any threshold."""
    core = SparseCore(config.n_core) if config.n_core else None
    return replace(config, core=core, center_input=True)


@torch.no_grad()
def cut_for(l0: float, sae: SAE, part: slice, store: Store) -> float:
    """Return the number above which pre-activations of some latents lie so often that their L0 is the one given.

    It is found from a histogram over all held-out activations, in one pass and without keeping them.
    """
    counts = torch.zeros(2 * _HALF, dtype=torch.int64)
    n_tokens = 0
    for batch in store.batches(Split.HELDOUT, _BATCH):
        pre_BK = torch.addmm(sae.b_enc[part], sae.encoder_input(batch["x"]), sae.W_enc[part].T)
        keys = _in_order(pre_BK.flatten().view(torch.int32)) >> _DROPPED_BITS
        counts += torch.bincount(keys + _HALF, minlength=2 * _HALF)
        n_tokens += len(pre_BK)
    at_least = counts.flip(0).cumsum(0).flip(0)
    off = (at_least.double() - l0 * n_tokens).abs()
    lowest = min(int((off == off.min()).nonzero()[-1]) - _HALF, _LARGEST)
    edge = _in_order(torch.tensor(lowest << _DROPPED_BITS, dtype=torch.int32)).view(torch.float32)
    return float(torch.nextafter(edge, torch.tensor(-math.inf)))


def _in_order(bits: Tensor) -> Tensor:
    """Return the bits of floats, read as whole numbers, so that they rise with their values; twice is as before."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@torch.no_grad()
def permuted_decoder(sae: SAE, seed: int = 0) -> SAE:
    """Return a copy of an SAE whose decoder rows are permuted within the core and within each prefix group."""
    permuted = SAE(sae.config).to(sae.W_dec).requires_grad_(False)
    permuted.load_state_dict(sae.state_dict())
    for low, high in _groups(sae.config):
        order = torch.randperm(high - low, generator=generator(seed, "permuted decoder", low))
        permuted.W_dec[low:high] = sae.W_dec[low:high][order.to(sae.W_dec.device)]
    return permuted


def extreme_value_null(n_vectors: int, dimension: float, absolute: bool = False) -> float:
    """Return the expected largest cosine of a random direction with n − 1 others, n independent unit vectors in all.

    The cosine c of two of them has a density proportional to (1 − c²)^((d − 3) / 2); so (1 + c) / 2 is distributed as
    Beta((d − 1) / 2, (d − 1) / 2), and c² as Beta(1 / 2, (d − 1) / 2). The largest of n − 1 has the power n − 1 of that
    distribution function; its mean is an integral over it. `dimension` need not be whole: see `effective_dimension`.
    """
    import numpy as np
    from scipy.integrate import trapezoid
    from scipy.special import betainc

    require_whole("n_vectors", n_vectors, 2)
    require(dimension > 1, "dimension", dimension, "be above 1")
    if math.isinf(dimension):
        return 0.0
    half = (dimension - 1) / 2
    cosines = np.linspace(0.0 if absolute else -1.0, 1.0, 20_001)
    below = betainc(0.5, half, cosines**2) if absolute else betainc(half, half, (1 + cosines) / 2)
    largest_below = below ** (n_vectors - 1)
    return float(1 - trapezoid(largest_below, cosines))


def effective_dimension(rows_KD: Tensor) -> float:
    """Return the dimension in which random directions would have the mean squared cosine that these rows have.

    It is above 1, however alike they are, and infinite for rows that are orthogonal.
    """
    unit = normalize(rows_KD.double(), dim=1)
    unit = unit[unit.norm(dim=1) > 0]
    n = len(unit)
    squared = float((unit.T @ unit).square().sum())  # ‖Gram‖² of the rows, the diagonal of ones included
    off_diagonal = max(squared - n, 0.0)
    return max(n * (n - 1) / off_diagonal, 1 + 1e-6) if off_diagonal else math.inf
