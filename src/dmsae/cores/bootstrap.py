"""How sure a score is: the same quantile over resampled contexts.

Positions of one context are alike, so contexts are what is drawn, with replacement. A high quantile of a resample needs
only the largest values and the contexts that they came from, which `LargestValues` keeps.
"""

import torch
from torch import Tensor

from dmsae.cores.quantile import LargestValues
from dmsae.seeds import generator


def bootstrap_scores(largest: LargestValues, n_samples_PN: Tensor, n_replicates: int, seed: int = 0) -> Tensor:
    """Return each latent's score in each of X resamples of the contexts, [X, P].

    `n_samples_PN` says how many samples of each latent a context has: all of its positions, or those where the latent
    fires. It may have one row for all latents. A resample that reaches deeper than the values that were kept counts as
    0: an interval may be too wide, never too narrow.
    """
    n_contexts = n_samples_PN.shape[1]
    drawn = torch.randint(n_contexts, (n_replicates, n_contexts), generator=generator(seed, "bootstrap"))
    weights_XN = torch.stack([torch.bincount(one, minlength=n_contexts) for one in drawn.to(n_samples_PN.device)])
    n_samples_XP = (n_samples_PN.double() @ weights_XN.double().T).T  # whole numbers: exact in any order
    scores = [_weighted_quantile(largest, *one) for one in zip(weights_XN, n_samples_XP, strict=True)]
    return torch.stack(scores).float().cpu()


def _weighted_quantile(largest: LargestValues, weights_N: Tensor, n_samples_P: Tensor) -> Tensor:
    """Return the interpolated quantile of each latent's samples when context i counts weights_N[i] times."""
    values, owners = largest.with_owners()
    n = n_samples_P.expand(len(values)).double()
    rank = largest.quantile * (n - 1).clamp(min=0)
    low = rank.floor()
    up_to = weights_N[owners.long()].cumsum(1)

    def at(index_from_below: Tensor) -> Tensor:
        from_above = (n - 1 - index_from_below).clamp(min=0).to(up_to)
        place = torch.searchsorted(up_to, from_above[:, None], right=True)
        kept = place < values.shape[1]
        value = values.gather(1, place.where(kept, 0)).double().where(kept, 0.0).squeeze(1)
        return value.where(n > 0, 0.0)

    return torch.lerp(at(low), at(low + 1), rank - low)
