"""Latents of two SAEs in pairs, one to one: who is whose partner, and how alike the two of each pair are."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from dmsae.evaluation.assignment import Matching
from dmsae.evaluation.survival import Survival
from dmsae.sae.sae import SAE

FIGURES = ("decoder", "encoder", "shared", "jaccard", "jaccard_chance", "correlation")
"""What is measured of each pair."""


class Part(NamedTuple):
    """Some latents of an SAE, one after another."""

    sae: SAE
    latents: slice

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Decoder and encoder rows."""
        return self.sae.W_dec[self.latents], self.sae.W_enc[self.latents]

    @property
    def n(self) -> int:
        return len(self.rows[0])


class Partners(NamedTuple):
    """The partner of each of K latents in another SAE, and how alike their rows are, in float64."""

    of_K: Tensor
    """Index of the partner; −1 for a latent without one."""
    decoder_K: Tensor
    """Cosine of decoder rows, matched by decoder."""
    encoder_K: Tensor
    """Cosine of encoder rows, matched by encoder: the mean of a latent's and of its decoder partner's."""
    same_K: Tensor
    """Whether the partner by encoder is the same one."""

    @classmethod
    def by_rows(cls, decoder: Matching, encoder: Matching, n_second: int) -> Self:
        """Return the partners by decoder, from matchings by decoder and by encoder."""
        same = decoder.partners_K == encoder.partners_K
        return cls(decoder.partners_K, decoder.cosines_K, _of_both(encoder, decoder, n_second), same)

    @classmethod
    def by_index(cls, first: Part, second: Part) -> Self:
        """Return the latents in the same places as partners."""
        decoder, encoder = (
            torch.cosine_similarity(a.double(), b.double()).cpu() for a, b in zip(first.rows, second.rows, strict=True)
        )
        places = torch.arange(len(decoder))
        return cls(places, decoder, encoder, torch.ones_like(places, dtype=torch.bool))

    def values(self, alike: Survival, latents: Tensor, min_cosine: float) -> dict[str, Tensor]:
        """Return each figure of some latents by name, from what they and their partners do on held-out text."""
        shared = self.same_K & (self.decoder_K > min_cosine) & (self.encoder_K > min_cosine)
        rows = self.decoder_K[latents], self.encoder_K[latents], shared[latents].double()
        firing = alike.jaccard_C, alike.jaccard_chance_C, alike.correlation_C
        return dict(zip(FIGURES, (*rows, *firing), strict=True))


def _of_both(encoder: Matching, decoder: Matching, n_second: int) -> Tensor:
    """Return the mean encoder cosine of each latent and its partner by decoder, each with its partner by encoder."""
    of_second = torch.full((n_second,), torch.nan, dtype=torch.float64)
    of_second[encoder.partners_K[encoder.matched]] = encoder.cosines_K[encoder.matched]
    of_partner = of_second[decoder.partners_K].where(decoder.matched, torch.nan)
    return torch.stack([encoder.cosines_K, of_partner]).nanmean(0)
