"""Random firing: latents that fire as often and as strongly as those of an SAE, whatever the activation is."""

from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.evaluation.subject import Dictionary
from dmsae.sae.sae import SAE
from dmsae.seeds import generator

_BATCH = 1024
_ELEMENTS = 1 << 19
"""Draws that are made at a time: a few copies of them fit into the cache."""


class Firing(NamedTuple):
    """How often and how strongly each latent fires on held-out activations."""

    rates_K: Tensor
    """Share of tokens, float64."""
    means_K: Tensor
    """Mean activation where it fires, float64; 0 for one that never does."""


@torch.no_grad()
def firing(dictionary: Dictionary, store: Store) -> Firing:
    """Return how often and how strongly the latents of a dictionary fire on all held-out activations."""
    fired = torch.zeros(dictionary.config.width, dtype=torch.float64)
    total, n_tokens = torch.zeros_like(fired), 0
    for batch in store.batches(Split.HELDOUT, _BATCH):
        f_BK = dictionary.encode(batch["x"].to(dictionary.W_dec))
        fired += (f_BK > 0).sum(0).cpu()
        total += f_BK.sum(0, dtype=torch.float64).cpu()
        n_tokens += len(f_BK)
    return Firing(fired / n_tokens, total / fired.clamp(min=1))


class RandomFiring:
    """A dictionary whose latents fire at given rates, with their mean activation, whatever x is.

    Whether a latent fires on x is decided by a hash of x's bits: the same x always gives the same codes.
    """

    def __init__(self, sae: SAE, activity: Firing, seed: int = 0) -> None:
        self.config, self._sae = sae.config, sae
        device = sae.W_dec.device
        self._chances_K = (activity.rates_K * 2**53).round().long().to(device)
        self._means_K = activity.means_K.to(sae.W_dec)
        draws = generator(seed, "random firing")
        self._weights_D = torch.randint(-(2**62), 2**62, (sae.config.d_model,), generator=draws).to(device) | 1
        self._latents_K = (torch.arange(sae.config.width) * _signed(0x9E3779B97F4A7C15)).to(device)

    @property
    def W_enc(self) -> Tensor:
        """The encoder rows of the SAE, which nothing is encoded with."""
        return self._sae.W_enc

    @property
    def W_dec(self) -> Tensor:
        """The decoder rows of the SAE."""
        return self._sae.W_dec

    @property
    def b_dec(self) -> Tensor:
        """The decoder bias of the SAE."""
        return self._sae.b_dec

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        """Return the activations [..., K]: each latent's mean where it happens to fire."""
        rows = x.reshape(-1, x.shape[-1]).float() + 0.0  # −0 is 0
        hashes = (rows.view(torch.int32).long() * self._weights_D).sum(-1)
        f = self._means_K.new_zeros(len(rows), self.config.width)
        size = max(1, _ELEMENTS // self.config.width)
        for some, out in zip(hashes.split(size), f.split(size), strict=True):
            drawn = _mixed(some[:, None] + self._latents_K)
            torch.mul((drawn >> 11 & (1 << 53) - 1) < self._chances_K, self._means_K, out=out)
        return f.view(*x.shape[:-1], self.config.width)

    def decode(self, f: Tensor, prefix: int | None = None) -> Tensor:
        """Return the reconstruction [..., D] from one prefix or all latents."""
        return self._sae.decode(f, prefix)


def _mixed(z: Tensor) -> Tensor:
    """Return whole numbers whose bits are as good as random (the finaliser of SplitMix64, Steele et al. 2014)."""
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, by: int) -> Tensor:
    """Return z shifted right with zeros coming in, as for unsigned numbers."""
    return z >> by & (1 << 64 - by) - 1


def _signed(constant: int) -> int:
    """Return the int64 with the bits of a uint64."""
    return constant - (1 << 64) if constant >= 1 << 63 else constant
