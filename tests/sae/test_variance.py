"""Fraction of variance explained, all at once and batch by batch."""

import pytest
import torch

from dmsae.sae.variance import VarianceExplained, fraction_explained, squared_error, variance

X = torch.tensor([[1.0, 0.0], [3.0, 0.0], [1.0, 4.0], [3.0, 4.0]])
"""Mean (2, 2): every row is at a squared distance of 1 + 4 from it."""
HALF_WAY = (X + X.mean(0)) / 2


def test_figures_by_hand() -> None:
    assert variance(X) == 5
    assert squared_error(X, HALF_WAY) == 5 / 4
    assert squared_error(X, torch.zeros(4, 2)) == (1 + 9 + 17 + 25) / 4
    assert fraction_explained(error=1.25, variance=5.0) == 0.75


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_batches_give_the_figures_of_the_whole(batch: int) -> None:
    explained = VarianceExplained(2, n_reconstructions=4)
    for x, half_way in zip(X.split(batch), HALF_WAY.split(batch), strict=True):
        explained.add(x, x, half_way, X.mean(0).expand(len(x), 2), torch.zeros_like(x))
    assert explained.n_tokens == 4
    assert explained.fractions() == pytest.approx([1, 0.75, 0, 1 - 13 / 5])


def test_a_large_mean_does_not_drown_the_variance() -> None:
    x = 1000 + torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
    explained = VarianceExplained(8)
    for rows in x.split(256):
        explained.add(rows, rows + 0.5)
    expected = 1 - 0.25 / x.double().var(0, correction=0).mean().item()
    assert explained.fractions() == [pytest.approx(expected, rel=1e-3)]
