"""Frozen detectors: core latents whose activations depend on nothing that is trained.

Latent j fires where `w_j·x + β_j > θ_j`, with that value; row w_j, offset β_j and threshold θ_j are given in the space
of raw activations. Every SAE that carries a detector gives the same activations, to the bit, in float32 on one device:
`detect` computes them in tiles of one fixed shape, so neither the other latents nor the other tokens of a batch change
how they are rounded. (In float64 a product may round by a latent's place in its tile.)
"""

from typing import NamedTuple

import torch
from torch import Tensor

_TILE_TOKENS, _TILE_LATENTS = 256, 64


class Detectors(NamedTuple):
    """What is frozen of a core besides its encoder rows, for raw activations."""

    offsets_C: Tensor
    """β = b_enc − w·b_dec of the SAE in which each latent was first selected."""
    thresholds_C: Tensor
    """θ of that SAE."""


def detect(x: Tensor, rows_CD: Tensor, detectors: Detectors) -> Tensor:
    """Return the activations [..., C] of detectors on raw activations [..., D]."""
    x_BD = x.reshape(-1, x.shape[-1])
    pre_BC = torch.cat([_tile_product(tile, rows_CD) for tile in x_BD.split(_TILE_TOKENS)]) if len(x_BD) else None
    f = (x_BD @ rows_CD.T if pre_BC is None else pre_BC).add_(detectors.offsets_C)
    return fire_(f, detectors.thresholds_C).view(*x.shape[:-1], len(rows_CD))


def fire_(pre: Tensor, thresholds_C: Tensor) -> Tensor:
    """Set to zero, in place, what is not above its threshold."""
    return pre.mul_(pre > thresholds_C)


def _tile_product(x_BD: Tensor, rows_CD: Tensor) -> Tensor:
    """Return x @ rowsᵀ of a few tokens from products that all have the same shape."""
    tokens = _padded(x_BD, _TILE_TOKENS)
    products = [tokens @ _padded(rows, _TILE_LATENTS).T for rows in rows_CD.split(_TILE_LATENTS)]
    return torch.cat(products, dim=1)[: len(x_BD), : len(rows_CD)]


def _padded(rows: Tensor, n: int) -> Tensor:
    """Return a copy with zero rows added up to n, so that every tile lies in memory in the same way."""
    tile = rows.new_zeros(n, rows.shape[1])
    tile[: len(rows)] = rows
    return tile
