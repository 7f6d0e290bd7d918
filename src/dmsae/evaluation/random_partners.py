"""Random partners: what matching finds for the latents of one SAE if those of the other are worthless.

The other SAE's latents are replaced by as many random ones. Their rows are drawn with the covariance of the rows that
they replace, the decoder and the encoder row of a latent together: so they fill the same space, and agree with each
other as much. They are matched like real ones, by decoder and by encoder, and profit as much from being chosen. Then
each gets the threshold at which it fires on as many held-out tokens as the latent whose place it takes. So every latent
keeps its bin of firing rate, and nothing but what the other SAE has learned is gone.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.evaluation.assignment import match_rows
from dmsae.evaluation.partners import FIGURES, Part, Partners
from dmsae.evaluation.survival import between
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE

_KEPT = 1 << 24
"""Pre-activations that are kept at a time to find thresholds."""
_BATCH, _MAX_BATCH = 1024, 8192
_NEVER = 1e30
"""A threshold that no activation reaches."""


class Drawn(NamedTuple):
    """Random rows of as many latents as they replace; None for rows that have no spread to draw from."""

    decoder_KD: Tensor | None
    encoder_KD: Tensor | None


def random_values(
    kept: Part, latents_C: Tensor, replaced: Part, rates_C: Tensor, drawn: Drawn, store: Store, min_cosine: float
) -> dict[str, Tensor]:
    """Return each figure, by name, of latents of one SAE and random partners that fire at given rates.

    The part that is kept, in which the latents are counted from its first, must not be the larger one. What has no
    value, and everything without random rows, is NaN.
    """
    decoder_KD, encoder_KD = drawn
    if decoder_KD is None or encoder_KD is None:
        return dict.fromkeys(FIGURES, torch.full_like(rates_C, torch.nan))
    decoder, encoder = (match_rows(rows, like) for rows, like in zip(kept.rows, (decoder_KD, encoder_KD), strict=True))
    partners = Partners.by_rows(decoder, encoder, replaced.n)
    chosen_C = partners.of_K[latents_C]
    sae = _sae_of(decoder_KD[chosen_C], encoder_KD[chosen_C], replaced.sae)
    fire_as_often_(sae, rates_C, store)
    alike = between(kept.sae, latents_C + kept.latents.start, sae, range(len(latents_C)), store, n_top=1)
    return partners.values(alike, latents_C, min_cosine)


def _sae_of(decoder_CD: Tensor, encoder_CD: Tensor, like: SAE) -> SAE:
    """Return an SAE of random rows that sees activations as another one does."""
    n, d_model = decoder_CD.shape
    sae = SAE(SAEConfig(d_model, n, 1, (n,), center_input=like.config.center_input)).requires_grad_(False)
    sae.to(like.W_dec.device)
    sae.W_dec.copy_(decoder_CD)
    sae.W_enc_noncore.copy_(encoder_CD)
    sae.b_dec.copy_(like.b_dec)
    return sae


@torch.no_grad()
def fire_as_often_(sae: SAE, rates_K: Tensor, store: Store) -> None:
    """Set an SAE's thresholds, or for latents that are on most of the time biases, so that latents fire at given rates
    on held-out activations."""
    n_tokens = store.n_rows(Split.HELDOUT)
    counts_K = (rates_K * n_tokens).round().long()
    cuts_K = torch.full((len(counts_K),), _NEVER)
    order = counts_K.argsort(descending=True, stable=True)
    order = order[counts_K[order] > 0]
    while len(order):
        n_kept = min(int(counts_K[order[0]]) + 1, n_tokens)
        n_latents = max(1, _KEPT // n_kept)
        some, order = order[:n_latents], order[n_latents:]
        last = counts_K[some] - 1
        places = torch.stack([last, (last + 1).clamp(max=n_kept - 1)], dim=1)
        # Between the last activation above it and the next below: rounding does not matter.
        cuts_K[some] = _largest(sae, some, n_kept, store).gather(1, places).mean(1)
    sae.threshold.copy_(cuts_K.clamp(min=0))
    sae.b_enc.copy_((-cuts_K).clamp(min=0))


def _largest(sae: SAE, latents: Tensor, n: int, store: Store) -> Tensor:
    """Return the n largest pre-activations of some latents on held-out activations, the largest first."""
    rows_CD = sae.W_enc[latents]
    found = torch.empty(len(latents), 0)
    for batch in store.batches(Split.HELDOUT, min(max(n, _BATCH), _MAX_BATCH)):
        pre_CB = (rows_CD @ sae.encoder_input(batch["x"].to(rows_CD)).T).float().cpu()
        found = torch.cat([found, pre_CB], dim=1)
        found = found.topk(min(n, found.shape[1]), dim=1).values
    return found
