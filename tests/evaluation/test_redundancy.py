"""Copies are found, chance is what the formula says, and a meta-SAE sees what rows are made of."""

import math

import pytest
import torch
from torch import Tensor

from dictionaries import constant, random_sae
from dmsae.evaluation.nulls import permuted_decoder
from dmsae.evaluation.redundancy import RedundancyConfig, RedundancyResult, largest_cosines, redundancy
from dmsae.evaluation.subject import Subject
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = RedundancyConfig(meta_steps=150, meta_batch=128, meta_lr=1e-2)


def of_rows(rows_KD: Tensor) -> SAE:
    n, d_model = rows_KD.shape
    sae = random_sae(SAEConfig(d_model, n, 1, (n,)))
    sae.W_dec.copy_(rows_KD)
    return sae


def measured(*rows: Tensor) -> list[RedundancyResult]:
    return redundancy([Subject("", of_rows(one)) for one in rows], QUICK)


def test_random_rows_are_as_alike_as_chance_says() -> None:
    rows = torch.randn(1500, 32, generator=torch.Generator().manual_seed(0))
    (figures,) = measured(rows)
    assert figures.mean_max_cosine == pytest.approx(figures.mean_max_cosine_isotropic, abs=0.01)
    assert figures.mean_max_cosine == pytest.approx(figures.mean_max_cosine_null, abs=0.01)
    assert figures.effective_dimension == pytest.approx(32, rel=0.05)
    assert figures.share_above_09 == 0


def test_copies_are_counted() -> None:
    made = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 64, generator=made)
    twins = torch.cat([rows, rows[:32] + 0.01 * torch.randn(32, 64, generator=made), torch.zeros(4, 64)])
    (figures,) = measured(twins)
    assert figures.n_rows == 96, "rows of no length count nowhere"
    assert figures.share_above_09 == figures.share_above_07 == pytest.approx(64 / 96)
    assert figures.mean_max_cosine > figures.mean_max_cosine_null + 0.2


def test_the_largest_cosine_is_with_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmsae.evaluation.redundancy._BLOCK", 7)
    rows = torch.nn.functional.normalize(torch.randn(50, 9, generator=torch.Generator().manual_seed(0)), dim=1)
    expected = ((rows @ rows.T) - 3 * torch.eye(50)).max(dim=1).values
    assert torch.allclose(largest_cosines(rows), expected)


def test_a_meta_sae_explains_rows_that_are_sums_of_few_directions() -> None:
    made = torch.Generator().manual_seed(0)
    parts = torch.randn(16, 48, generator=made)
    parts = torch.nn.functional.normalize(parts, dim=1)
    pairs = torch.stack([torch.randperm(16, generator=made)[:2] for _ in range(256)])
    composed, random = measured(parts[pairs].sum(1), torch.randn(256, 48, generator=made))
    assert composed.meta_width == random.meta_width == 16
    assert composed.meta_fve > random.meta_fve + 0.3
    assert random.meta_l0 == pytest.approx(4, abs=1)


def test_the_order_of_rows_does_not_matter() -> None:
    sae = random_sae(SAEConfig(16, 64, 4, (16, 64)))
    first, again = redundancy([Subject("", sae), Subject("", permuted_decoder(sae))], QUICK)
    assert first == again


def test_rows_that_are_all_the_same_leave_nothing_to_explain() -> None:
    (figures,) = redundancy([Subject("", constant(torch.zeros(8)))], QUICK)
    assert figures.share_above_09 == 1
    assert math.isnan(figures.meta_fve)


def test_orthogonal_rows_have_nothing_in_common() -> None:
    (figures,) = measured(torch.eye(16))
    assert (figures.mean_max_cosine, figures.mean_max_cosine_null) == (0, 0)
    assert figures.effective_dimension == math.inf
