"""How alike two rankings of the same latents are."""

from torch import Tensor


def spearman(first: Tensor, second: Tensor) -> float | None:
    """Return the rank correlation of two vectors, equal values sharing their mean rank; None if one is constant."""
    from scipy.stats import spearmanr

    if any(len(values.unique()) < 2 for values in (first, second)):
        return None
    return float(spearmanr(first.numpy(), second.numpy()).statistic)
