"""What chance alone would give: random directions as alike as real encoder rows are without having anything in common.

Activations of a language model fill their space unevenly, and so do the rows of every SAE trained on them. Two sets of
directions drawn with the activations' covariance are therefore nearer to each other than two sets drawn evenly, and a
match between two cores means something only beyond that.
"""

import torch
from torch import Tensor

from dmsae.activations.store import Store
from dmsae.config import require_whole
from dmsae.cores.statistics import sample_activations
from dmsae.errors import StoreError
from dmsae.seeds import generator

_WEIGHTS = 1 << 26
"""Weights that are held at a time: half a GiB of them."""


def covariance_matched_rows(activations: Store | Tensor, n: int, seed: int = 0) -> Tensor:
    """Return n random unit rows [n, D] drawn with the covariance of activations, given as a store or as rows [*, D].

    Each is a normal combination of the centred activations, which has their covariance without a decomposition of it.
    """
    require_whole("n", n, 1)
    x = sample_activations(activations) if isinstance(activations, Store) else activations
    centred = x.double() - x.double().mean(0)
    if not centred.any():
        raise StoreError("The activations are all the same: they have no covariance to draw from.")
    draws = generator(seed, "covariance matched")
    n_at_once = max(16, _WEIGHTS // len(x) // 16 * 16)  # in multiples of 16, the generator draws the same as at once
    parts = [
        torch.randn(min(n_at_once, n - start), len(x), generator=draws, dtype=torch.float64) @ centred
        for start in range(0, n, n_at_once)
    ]
    return torch.nn.functional.normalize(torch.cat(parts), dim=1).float()
