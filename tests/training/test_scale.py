"""What is measured on activations before an SAE sees them."""

import math

import pytest
import torch
from torch import Tensor

from dmsae.activations.stream import ActivationStream
from dmsae.training.scale import first_look, geometric_median
from zipf import Zipf


def test_geometric_median_resists_outliers() -> None:
    x = torch.randn(201, 4, generator=torch.Generator().manual_seed(0))
    x[:20] += 1000
    median = geometric_median(x)
    assert median.norm() < 0.5
    assert x.mean(0).norm() > 50

    def distance(point: Tensor) -> float:
        return float((x - point).norm(dim=1).sum())

    for shift in 0.05 * torch.eye(4):
        assert distance(median) < min(distance(median + shift), distance(median - shift))


def test_the_first_look_measures_the_scale_of_several_batches_and_the_centre_of_the_first() -> None:
    scale, centre_D = first_look(ActivationStream(Zipf(), 64, seed=3), n_batches=5)
    stream = ActivationStream(Zipf(), 64, seed=3)
    batches = [next(stream) for _ in range(5)]
    assert scale == pytest.approx(math.sqrt(torch.cat(batches).double().square().sum(1).mean().item()), rel=1e-6)
    torch.testing.assert_close(centre_D, geometric_median(batches[0]) / scale)
