"""Fraction of variance explained (FVE): 1 − squared error / variance about the mean, both summed over dimensions."""

import torch
from torch import Tensor

from dmsae.ranks import Axis
from dmsae.sae.comms import ALONE


def variance(x_BD: Tensor, data: Axis = ALONE.data, n_tokens: int | None = None) -> float:
    """Return the variance of activations about their mean: summed over dimensions, mean over tokens.

    On a mesh, of the `n_tokens` that the ranks along an axis have together; by default all have equally many.
    """
    n_tokens = n_tokens or len(x_BD) * data.size
    mean_D = data.sum_(x_BD.sum(0)) / n_tokens
    return float(data.sum_((x_BD - mean_D).square().sum(1).sum()) / n_tokens)


def squared_error(
    x_BD: Tensor, reconstruction_BD: Tensor, data: Axis = ALONE.data, n_tokens: int | None = None
) -> float:
    """Return the squared error of a reconstruction: summed over dimensions, mean over tokens, as for `variance`."""
    n_tokens = n_tokens or len(x_BD) * data.size
    return float(data.sum_((x_BD - reconstruction_BD).square().sum(1).sum()) / n_tokens)


def fraction_explained(error: float, variance: float) -> float:
    """Return the FVE of a squared error, given the variance in the same units."""
    return 1 - error / variance


class VarianceExplained:
    """The FVE of one or several reconstructions over many batches, in one pass and float64."""

    def __init__(self, d_model: int, n_reconstructions: int = 1) -> None:
        self.n_tokens = 0
        self._sum_D = torch.zeros(d_model, dtype=torch.float64)
        self._squares = 0.0
        self._errors_G = torch.zeros(n_reconstructions, dtype=torch.float64)

    def add(self, x_BD: Tensor, *reconstructions_BD: Tensor) -> None:
        """Take in a batch and its reconstructions."""
        self.n_tokens += len(x_BD)
        self._sum_D += x_BD.sum(0, dtype=torch.float64).cpu()
        self._squares += float(x_BD.square().sum(dtype=torch.float64))
        for index, reconstruction_BD in enumerate(reconstructions_BD):
            self._errors_G[index] += (x_BD - reconstruction_BD).square().sum(dtype=torch.float64).cpu()

    def fractions(self) -> list[float]:
        """Return the FVE of each reconstruction over everything added."""
        total = self._squares - float(self._sum_D.square().sum()) / self.n_tokens
        return [fraction_explained(error, total) for error in self._errors_G.tolist()]
