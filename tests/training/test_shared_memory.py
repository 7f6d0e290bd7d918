"""Gradients that ranks on one machine sum in memory they share: the same sums, and nothing left behind."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsae.training.shared_memory import _NONCE, _opened, _Place, add_up_
from mesh_talks import sum_held, sum_often
from meshes import Meshes, meshes


@pytest.fixture(scope="module")
def mesh() -> Iterator[Meshes]:
    with meshes() as opened:
        yield opened


@pytest.mark.parametrize("size", [(1,), (3,), (4097,), (700, 576)])
@pytest.mark.parametrize("shape", [(2, 1), (4, 1), (2, 2)])
def test_what_is_shared_sums_to_what_is_sent(mesh: Meshes, shape: tuple[int, int], size: tuple[int, ...]) -> None:
    values = [torch.randn(size, dtype=torch.float64) for _ in range(shape[0])]
    for found in mesh.run(shape, sum_held, values, []):
        assert found.is_shared
        assert not found.left_open
        torch.testing.assert_close(found.held, found.sent, rtol=1e-12, atol=1e-12)
        if shape[0] == 2:
            assert torch.equal(found.held, found.sent)


@pytest.mark.parametrize("shape", [(2, 1), (4, 1)])
def test_ranks_that_dawdle_spoil_no_sum(mesh: Meshes, shape: tuple[int, int]) -> None:
    for off in mesh.run(shape, sum_often, 60):
        assert off == [0.0] * 60


@pytest.mark.parametrize("lacking", ["posix_fallocate", "memfd_create"])
def test_all_do_without_when_one_has_no_memory_to_share(mesh: Meshes, lacking: str) -> None:
    values = [torch.randn(50), torch.randn(50)]
    for found in mesh.run((2, 1), sum_held, values, [1], lacking):
        assert not found.is_shared
        assert torch.equal(found.held, values[0] + values[1])


def test_somebody_elses_file_is_neither_taken_nor_changed(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"precious")
    for n_bytes in (0, 8, 1000):
        assert _opened(_Place(str(theirs), n_bytes, b"n" * _NONCE)) is None
    assert theirs.read_bytes() == b"precious"
    assert _opened(_Place(str(tmp_path / "nothing"), 8, b"n" * _NONCE)) is None
    assert not (tmp_path / "nothing").exists()
    os.mkfifo(tmp_path / "pipe")
    assert _opened(_Place(str(tmp_path / "pipe"), 8, b"n" * _NONCE)) is None


@settings(deadline=None)
@given(n_ranks=st.integers(2, 5), n=st.integers(1, 400_000), seed=st.integers(0, 9))
def test_every_entry_is_added_once(n_ranks: int, n: int, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    parts = [torch.randint(-9, 9, (n,), generator=made).double() for _ in range(n_ranks)]
    total = torch.stack(parts).sum(0)
    for rank in torch.randperm(n_ranks, generator=made).tolist():
        add_up_(parts, rank)
    assert all(torch.equal(part, total) for part in parts)
