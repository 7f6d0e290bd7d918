"""How well an SAE reconstructs text it has never seen, as it is used: with its thresholds, on held-out activations."""

from typing import NamedTuple

import torch

from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.sae.sae import SAE
from dmsae.sae.variance import VarianceExplained


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
    """Return the figures over at most `max_tokens` held-out activations, or None when the store holds none.

    >>> figures = dmsae.fidelity(dmsae.SAE.load(run / "cycle-0" / "sae"), store)
    >>> 0 < figures.fve < 1
    True
    """
    explained = VarianceExplained(sae.config.d_model)
    fired_core = fired = 0
    for batch in store.batches(Split.HELDOUT, 1024):
        x_BD = batch["x"][: max_tokens - explained.n_tokens].to(sae.W_dec)
        if not len(x_BD):
            break
        f_BK = sae.encode(x_BD)
        explained.add(x_BD, sae.decode(f_BK))
        fired += int((f_BK > 0).sum())
        fired_core += int((f_BK[:, : sae.config.n_core] > 0).sum())
    n = explained.n_tokens
    if not n:
        return None
    (fve,) = explained.fractions()
    return Fidelity(n, fve, fired_core / n, (fired - fired_core) / n)
