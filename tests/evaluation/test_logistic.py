"""Logistic regression reaches the optimum of its objective."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dmsae.evaluation.logistic import accuracy, auc, fit, fit_each


def gradient(x: Tensor, y: Tensor, w: Tensor, b: Tensor, c: float, weights: Tensor) -> Tensor:
    """The derivative of the objective, from its definition, by automatic differentiation."""
    theta = torch.cat([w, b[None]]).requires_grad_()
    margin = (2 * y - 1) * (x @ theta[:-1] + theta[-1])
    objective = c * (weights * torch.log1p(torch.exp(-margin))).sum() + 0.5 * (theta[:-1] ** 2).sum()
    return torch.autograd.grad(objective, theta)[0]


def test_two_points_have_the_optimum_computed_by_hand() -> None:
    """At x = ±1 the slope solves w = 2C / (1 + eʷ), so C = (1 + e) / 2 gives w = 1, and by symmetry b = 0."""
    fitted = fit(torch.tensor([[1.0], [-1.0]]), torch.tensor([1, 0]), c=(1 + math.e) / 2)
    assert fitted.w.item() == pytest.approx(1, abs=1e-6)
    assert fitted.b.item() == pytest.approx(0, abs=1e-6)


def test_a_feature_that_says_nothing_leaves_the_log_odds() -> None:
    fitted = fit(torch.zeros(8, 1), torch.tensor([1, 1, 1, 1, 1, 1, 0, 0]))
    assert fitted.b.item() == pytest.approx(math.log(3), abs=1e-6)
    assert fitted.w.item() == 0


def test_balanced_classes_have_even_odds() -> None:
    fitted = fit(torch.zeros(8, 1), torch.tensor([1, 1, 1, 1, 1, 1, 0, 0]), balanced=True)
    assert fitted.b.item() == pytest.approx(0, abs=1e-6)


@given(
    n=st.integers(4, 30),
    n_features=st.integers(1, 40),
    c=st.sampled_from([1e-5, 1e-2, 1.0, 1e3, 1e5]),
    seed=st.integers(0, 1000),
)
def test_the_gradient_vanishes_with_fewer_or_more_features_than_samples(
    n: int, n_features: int, c: float, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, n_features, generator=draw, dtype=torch.float64) * 5
    y = (torch.rand(n, generator=draw) < 0.4).double()
    y[:2] = torch.tensor([0.0, 1.0])
    fitted = fit(x, y, c)
    slope = gradient(x, y, fitted.w, fitted.b, c, torch.ones(n))
    assert slope.abs().max() <= 1e-4 * max(1.0, c)


def test_many_problems_at_once_are_the_same_as_one_by_one() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 40, 5, generator=draw)
    y = (torch.rand(3, 40, generator=draw) < 0.3).long()
    c = torch.tensor([0.1, 1.0, 1e4])
    together = fit(x, y, c, balanced=True)
    for i in range(3):
        alone = fit(x[i], y[i], float(c[i]), balanced=True)
        torch.testing.assert_close(together.w[i], alone.w, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(together.logits(x)[i], alone.logits(x[i]), rtol=1e-4, atol=1e-5)


def test_several_large_problems_are_solved_on_several_threads() -> None:
    x = torch.randn(400, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = (x[:, 0] > 0).double()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        fitted = fit(x, y, torch.tensor([0.01, 0.1, 1.0]))
    finally:
        torch.set_num_threads(before)
    for c, w, b in zip((0.01, 0.1, 1.0), *fitted, strict=True):
        assert gradient(x, y, w, b, c, torch.ones(400)).abs().max() < 1e-6


def test_auc_counts_ties_as_half() -> None:
    """Of the four pairs of a positive and a negative, two are in order, one is tied, one is out of order."""
    assert auc(torch.tensor([3.0, 1.0, 2.0, 1.0]), torch.tensor([1, 1, 0, 0])) == (2 + 0.5) / 4
    assert auc(torch.tensor([3.0, 1.0]), torch.tensor([1, 1])) == 0.5


def test_accuracy_counts_sides() -> None:
    assert accuracy(torch.tensor([2.0, -1.0, 0.5, -3.0]), torch.tensor([1, 1, 0, 0])) == 0.5


def test_regressions_on_the_same_features_do_not_depend_on_their_scale() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=draw)
    y = torch.stack([x[:, 0] > 0.5, x[:, 1] > 0, torch.zeros(60, dtype=torch.bool)])
    small, large = fit_each(x, y, 10.0), fit_each(100 * x, y, 10.0)
    torch.testing.assert_close(small.w, 100 * large.w)
    torch.testing.assert_close(small.logits(x), large.logits(100 * x))
    assert not small.w[2].any()
    assert accuracy(small.logits(x)[1], y[1]) > 0.9
