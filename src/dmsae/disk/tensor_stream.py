"""A safetensors file written a few rows at a time, for tensors that are whole in no process."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dmsae.disk.files import replacing

if TYPE_CHECKING:  # so that commands which read no tensors do not wait for torch
    from torch import Tensor

_ITEM_BYTES = 4
_ALIGNMENT = 8
"""The header is filled up with blanks to a multiple of this."""


class TensorStream(NamedTuple):
    """Tensors of float32 by their shapes, and their rows."""

    shapes: Mapping[str, tuple[int, ...]]
    blocks: "Iterator[Tensor]"
    """Consecutive rows: those of the tensor whose name sorts first, then of the next."""

    def drain(self) -> None:
        """Go through what is left, as the ranks of a mesh must that give the rows and do not write them."""
        for _ in self.blocks:
            pass


def write_stream(path: Path, stream: TensorStream) -> str:
    """Write tensors atomically as safetensors itself would write them, and return the file's SHA-256."""
    header, n_bytes = _header(stream.shapes)
    digest, written = hashlib.sha256(header), 0
    with replacing(path, len(header) + n_bytes) as file:
        file.write(header)
        for block in stream.blocks:
            data = block.detach().cpu().contiguous().flatten().numpy().data
            digest.update(data)
            file.write(data)
            written += data.nbytes
        assert written == n_bytes, f"{written} bytes of tensors that have {n_bytes}"
    return digest.hexdigest()


def _header(shapes: Mapping[str, tuple[int, ...]]) -> tuple[bytes, int]:
    """Return the beginning of the file, and how many bytes of tensors follow it."""
    end, entries = 0, {}
    for name in sorted(shapes):
        start, end = end, end + _ITEM_BYTES * math.prod(shapes[name])
        entries[name] = {"dtype": "F32", "shape": list(shapes[name]), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, end
