"""Tensors written a few rows at a time make the file that safetensors itself would write."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dmsae.disk.tensor_stream import TensorStream, write_stream
from dmsae.errors import LostRankError

shapes = st.dictionaries(
    st.text("abW_é", min_size=1, max_size=6), st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), min_size=1
)


@given(shapes, st.integers(1, 4))
def test_the_file_is_that_of_safetensors(
    tmp_path_factory: pytest.TempPathFactory, given_shapes: dict[str, tuple[int, ...]], at_once: int
) -> None:
    tensors = {name: torch.randn(shape) for name, shape in given_shapes.items()}
    path = tmp_path_factory.getbasetemp() / "streamed.safetensors"
    blocks = (block for name in sorted(tensors) for block in tensors[name].split(at_once))
    digest = write_stream(path, TensorStream(given_shapes, blocks))
    assert path.read_bytes() == safetensors.torch.save(tensors)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_stream_that_breaks_off_leaves_the_old_file(tmp_path: Path) -> None:
    def broken() -> Iterator[Tensor]:
        yield torch.zeros(2, 3)
        raise LostRankError("gone")

    path = tmp_path / "sae.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(LostRankError):
        write_stream(path, TensorStream({"a": (4, 3)}, broken()))
    assert path.read_bytes() == b"old"
    with pytest.raises(AssertionError, match="24 bytes of tensors that have 48"):
        write_stream(path, TensorStream({"a": (4, 3)}, iter([torch.zeros(2, 3)])))
    assert path.read_bytes() == b"old"
