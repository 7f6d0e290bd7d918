"""The sparse solution is the optimum over all pairs, whatever graph it begins with."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dmsae.errors import ConfigError
from dmsae.evaluation import assignment
from dmsae.evaluation.assignment import Matching, match_rows

pytestmark = pytest.mark.usefixtures("one_thread")


def rows(n: int, d: int, seed: int) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def both_ways(first: Tensor, second: Tensor, absolute: bool, near: int, added: int) -> tuple[Matching, Matching]:
    """Match densely, and sparsely with a graph that begins as small as asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assignment, "_DENSE", 1 << 40)
        dense = match_rows(first, second, absolute)
        for name, value in {"_DENSE": 0, "_NEAR": near, "_ADDED": added, "_BLOCK": 7}.items():
            patch.setattr(assignment, name, value)
        return dense, match_rows(first, second, absolute)


@given(
    n=st.integers(1, 30),
    other=st.integers(1, 30),
    d=st.integers(2, 8),
    seed=st.integers(0, 1000),
    absolute=st.booleans(),
    near=st.integers(1, 4),
    alike=st.booleans(),
)
@settings(max_examples=150)
def test_sparse_and_dense_agree(n: int, other: int, d: int, seed: int, absolute: bool, near: int, alike: bool) -> None:
    first, second = rows(n, d, seed), rows(other, d, seed + 1)
    if alike:  # crowds: many rows want the same few columns
        first = first[torch.arange(n) % max(1, n // 5)] + 0.01 * first
    dense, sparse = both_ways(first, second, absolute, near, added=2)
    for one in (dense, sparse):
        partners = one.partners_K[one.matched]
        assert len(partners) == min(len(first), other)
        assert len(partners.unique()) == len(partners), "two rows have one partner"
    expected, found = (float((m.cosines_K.abs() if absolute else m.cosines_K).nansum()) for m in (dense, sparse))
    assert found == pytest.approx(expected, abs=1e-4)


def test_permuted_rows_find_themselves() -> None:
    ours = rows(3000, 16, 0)
    order = torch.randperm(3000, generator=torch.Generator().manual_seed(1))
    found = match_rows(ours, 2.5 * ours[order])
    assert torch.equal(order[found.partners_K], torch.arange(3000))
    assert torch.allclose(found.cosines_K, torch.ones(3000, dtype=torch.float64))


def test_signs_count_unless_told_otherwise() -> None:
    ours = rows(20, 40, 0)
    signed, absolute = match_rows(ours, -ours), match_rows(ours, -ours, absolute=True)
    assert float(signed.cosines_K.mean()) > -0.5
    assert torch.equal(absolute.partners_K, torch.arange(20))
    assert torch.allclose(absolute.cosines_K, -torch.ones(20, dtype=torch.float64)), "the sign of the cosine is kept"


def test_the_larger_set_has_some_left_over() -> None:
    ours = rows(10, 6, 0)
    found = match_rows(ours, ours[3:7])
    assert found.partners_K.tolist() == [-1, -1, -1, 0, 1, 2, 3, -1, -1, -1]
    assert found.cosines_K.isnan().tolist() == [True] * 3 + [False] * 4 + [True] * 3
    assert match_rows(ours[3:7], ours).partners_K.tolist() == [3, 4, 5, 6]


def test_rows_of_other_widths_are_refused() -> None:
    with pytest.raises(ConfigError, match="widths 6 and 7"):
        match_rows(rows(3, 6, 0), rows(3, 7, 0))
