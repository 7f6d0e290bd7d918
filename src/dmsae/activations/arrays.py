"""Activations that come from elsewhere: arrays, tensors, files of them, or an iterator, read in checked chunks."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dmsae.errors import StoreError, first_line

Array = npt.NDArray[Any] | Tensor
"""Activations [n, D] in memory."""
ArrayLike = Array | str | os.PathLike[str] | Iterable[Array]
"""Activations [n, D]: in memory, the path of a .npy or .safetensors file, or arrays one after another."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_EXPECTED = "expected floating-point activations of shape [rows, width]"


class Rows(Protocol):
    """Activations that can be read from the first row to the last."""

    @property
    def what(self) -> str:
        """What they are, for error messages."""

    @property
    def n_rows(self) -> int | None:
        """How many there are; None: not known before they are read."""

    @property
    def width(self) -> int | None:
        """Their width; None: not known before they are read."""

    def chunks(self, size: int) -> Iterator[Tensor]:
        """Yield the rows in order, finite and on the CPU, in chunks of any size."""


class ArrayRows:
    """The rows of one array or tensor."""

    def __init__(self, what: str, x: Array, may_be_empty: bool = False) -> None:
        self.what = what
        self.n_rows, self.width = _shape(what, x.shape, may_be_empty)
        if isinstance(x, Tensor):
            _require_floats(what, x.dtype in _FLOATS, x.dtype)
        else:
            _require_floats(what, x.dtype.kind == "f" and x.dtype.itemsize <= 8, x.dtype)
        self._x = x

    def __len__(self) -> int:
        return self.n_rows

    def take(self, rows: Tensor | slice) -> Tensor:
        """Return some of the rows, as a copy if they are not in a tensor."""
        if isinstance(self._x, Tensor):
            return self._x[rows].detach()
        chosen = self._x[rows if isinstance(rows, slice) else rows.numpy()]
        return torch.from_numpy(np.array(chosen, dtype=chosen.dtype.newbyteorder("=")))

    def chunks(self, size: int) -> Iterator[Tensor]:
        """Yield the rows in chunks of `size`."""
        for start in range(0, len(self), size):
            yield _finite(self.what, self.take(slice(start, start + size)).cpu(), start)

    def sha256(self) -> str:
        """Return a hash of the shape and values; how they are kept in memory does not count."""
        digest = hashlib.sha256(f"{len(self)},{self.width}".encode())
        for chunk in self.chunks(65_536):
            digest.update(chunk.float().contiguous().numpy().data)
        return digest.hexdigest()


class SafetensorsRows:
    """The rows of a tensor in a .safetensors file, read when they are needed."""

    def __init__(self, what: str, path: Path, tensor: str) -> None:
        self.what, self._path = what, path
        with self._open() as file:
            names = list(file.keys())
            self._tensor = names[0] if len(names) == 1 else tensor
            if self._tensor not in names:
                raise StoreError(
                    f"{path} holds the tensors {', '.join(sorted(names)) or '(none)'}; expected one called {tensor!r}, "
                    "or only one. Rename it."
                )
            self.n_rows, self.width = _shape(what, file.get_slice(self._tensor).get_shape())

    def chunks(self, size: int) -> Iterator[Tensor]:
        """Yield the rows in chunks of `size`."""
        with self._open() as file:
            part = file.get_slice(self._tensor)
            for start in range(0, self.n_rows, size):
                chunk: Tensor = part[start : start + size]
                _require_floats(self.what, chunk.dtype in _FLOATS, chunk.dtype)
                yield _finite(self.what, chunk, start)

    def _open(self) -> Any:
        return safe_open(self._path, framework="pt")


class IteratedRows:
    """The rows of arrays that come one after another; only one of them is held at a time."""

    def __init__(self, what: str, arrays: Iterable[Array]) -> None:
        self.what, self._arrays = what, arrays
        self.n_rows: int | None = None
        self.width: int | None = None

    def chunks(self, size: int) -> Iterator[Tensor]:
        """Yield the rows in chunks of at most `size`."""
        total = 0
        for index, array in enumerate(self._arrays):
            name = f"{self.what}, array {index}"
            if not isinstance(array, np.ndarray | Tensor):
                raise StoreError(f"{name} is a {type(array).__name__}; {_EXPECTED}.")
            rows = ArrayRows(name, array, may_be_empty=True)
            total += len(rows)
            yield from rows.chunks(size)
        if not total:
            raise StoreError(f"{self.what} gave no rows; {_EXPECTED}. An iterator can be read only once.")


def rows_of(what: str, given: ArrayLike, tensor: str = "x") -> Rows:
    """Return the rows of whatever holds them; `tensor` is what they are called in a .safetensors file."""
    if isinstance(given, np.ndarray | Tensor):
        return ArrayRows(what, given)
    if isinstance(given, str | os.PathLike):
        return _file_rows(what, Path(given), tensor)
    if isinstance(given, Iterable):
        return IteratedRows(what, given)
    raise StoreError(f"{what} is a {type(given).__name__}; {_EXPECTED}: an array, a tensor, a path or an iterator.")


def _file_rows(what: str, path: Path, tensor: str) -> Rows:
    if path.suffix not in (".npy", ".safetensors"):
        raise StoreError(f"{what} = {path}; expected a .npy or .safetensors file. Save the array in one of these.")
    if not path.is_file():
        raise StoreError(f"{what} = {path}; there is no such file. Check the path.")
    try:
        if path.suffix == ".npy":
            return ArrayRows(what, np.lib.format.open_memmap(path, mode="r"))
        return SafetensorsRows(what, path, tensor)
    except (OSError, ValueError, SafetensorError) as error:
        raise StoreError(f"{what} = {path} cannot be read: {first_line(error)}. Save it again.") from error


def _shape(what: str, shape: Iterable[int], may_be_empty: bool = False) -> tuple[int, int]:
    sizes = list(shape)
    if len(sizes) != 2:
        raise StoreError(f"{what} has shape {sizes}; {_EXPECTED}. Flatten the other dimensions into rows.")
    if not sizes[1] or not (sizes[0] or may_be_empty):
        raise StoreError(f"{what} is empty: it has shape {sizes}; {_EXPECTED}.")
    return sizes[0], sizes[1]


def _require_floats(what: str, holds: bool, dtype: object) -> None:
    if not holds:
        name = str(dtype).removeprefix("torch.")
        raise StoreError(f"{what} has dtype {name}; {_EXPECTED}: float16, bfloat16, float32 or float64.")


def _finite(what: str, chunk: Tensor, first_row: int) -> Tensor:
    if not chunk.isfinite().all():
        row = int((~chunk.isfinite()).any(1).nonzero()[0])
        raise StoreError(f"{what} is not finite in row {first_row + row:,}. Leave out rows with NaN or infinity.")
    return chunk
