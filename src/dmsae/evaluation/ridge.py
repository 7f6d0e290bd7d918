"""A decoder fitted to codes that are given: ridge regression of activations on them, from the normal equations."""

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from dmsae.errors import ConfigError
from dmsae.evaluation.subject import Dictionary

_BATCH = 1024
_MAX_WIDTH = 32_768
"""The normal equations are a matrix of latents × latents: 4 GiB for this many, and as much again to solve them."""


@torch.no_grad()
def ridge_decoder(dictionary: Dictionary, x_BD: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Return the W [K, D] and b [D] that minimise Σ ‖x − b − f(x) W‖² + λ ‖W‖², on the CPU in float32.

    `ridge` is λ as a share of the mean of Σ f² over the latents that fire. The row of one that never does is 0.
    """
    width = dictionary.config.width
    if width > _MAX_WIDTH:
        raise ConfigError(
            f"A decoder for {width:,} latents cannot be fitted: that needs {width**2 * 8 / 2**30:.0f} GiB. Leave out "
            "the null random_encoder."
        )
    gram_KK, right_KD, sum_K = torch.zeros(width, width), torch.zeros(width, x_BD.shape[1]), torch.zeros(width)
    mean_D = x_BD.mean(0)
    for x in x_BD.split(_BATCH):
        f_BK = dictionary.encode(x.to(dictionary.W_dec)).float().cpu()
        gram_KK += _transposed_product(f_BK, f_BK)
        right_KD += _transposed_product(f_BK, x - mean_D)
        sum_K += f_BK.sum(0)
    gram_KK.addr_(sum_K, sum_K, alpha=-1 / len(x_BD))  # centred codes: b is fitted too
    fires = sum_K > 0
    penalty = ridge * gram_KK.diagonal().sum() / fires.sum().clamp(min=1)
    gram_KK.diagonal().add_(penalty).masked_fill_(~fires, 1.0)
    W = torch.cholesky_solve(right_KD, torch.linalg.cholesky(gram_KK))
    return W, mean_D - sum_K @ W / len(x_BD)


def _transposed_product(f_BK: Tensor, y_BD: Tensor) -> Tensor:
    """Return fᵀ y for sparse f: each latent's row is a weighted sum of the few rows of y on which it fires."""
    f_KB = f_BK.T.contiguous()
    latents, tokens = f_KB.nonzero(as_tuple=True)
    starts = torch.searchsorted(latents, torch.arange(len(f_KB) + 1))
    values = f_KB[latents, tokens]
    return embedding_bag(tokens, y_BD, starts, mode="sum", per_sample_weights=values, include_last_offset=True)
