"""How well an SAE rebuilds text it has never seen, as it is used: with its thresholds, on held-out activations."""

from typing import NamedTuple

import torch

from dmsae.activations.store import Split, Store
from dmsae.sae.sae import SAE


class Fidelity(NamedTuple):
    """Held-out figures of one SAE."""

    n_tokens: int
    fve: float
    """Fraction of the variance explained by the full reconstruction."""
    l0_core: float
    """Core latents that fire per token."""
    l0_noncore: float
    """Other latents that fire per token."""


@torch.no_grad()
def fidelity(sae: SAE, store: Store, max_tokens: int = 16_384) -> Fidelity | None:
    """Return the figures over at most `max_tokens` held-out activations, or None when the store holds none."""
    n = 0
    squares = error = fired_core = fired = 0.0
    total_D = torch.zeros(sae.config.d_model, dtype=torch.float64)
    for batch in store.batches(Split.HELDOUT, 1024):
        x_BD = batch["x"][: max_tokens - n].to(sae.W_dec)
        if not len(x_BD):
            break
        f_BK = sae.encode(x_BD)
        n += len(x_BD)
        error += float((x_BD - sae.decode(f_BK)).square().sum())
        squares += float(x_BD.square().sum())
        total_D += x_BD.sum(0).cpu()
        fired += float((f_BK > 0).sum())
        fired_core += float((f_BK[:, : sae.config.n_core] > 0).sum())
    if not n:
        return None
    variance = squares - float(total_D.square().sum()) / n
    return Fidelity(n, 1 - error / variance, fired_core / n, (fired - fired_core) / n)
