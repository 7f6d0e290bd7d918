"""The whole state of a training run in one file, written whole or not at all.

There is no random state to save: whatever is random in a run derives from its seed and from what it is for, and the
data cursor says how far the stream has come.
"""

import json
import os
import zlib
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dmsae.errors import CheckpointError
from dmsae.files import fsync_directory


def save_checkpoint(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Replace the checkpoint; tensors go to the disk without a second copy in memory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sums = {name: _checksum(tensor) for name, tensor in tensors.items()}
    temporary = path.with_name(path.name + ".tmp")
    held = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(held, temporary, {"state": json.dumps(state), "checksums": json.dumps(sums)})
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync_directory(path.parent)


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what was saved; a damaged file is an error that names it."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        state, sums = json.loads(metadata["state"]), json.loads(metadata["checksums"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. {_REMEDY}") from error
    damaged = [name for name, tensor in tensors.items() if _checksum(tensor) != sums.get(name)]
    if damaged:
        raise CheckpointError(f"{path} is damaged: {damaged[0]} is not what was written. {_REMEDY}")
    return tensors, state


_REMEDY = "Remove it to begin this run again from the start."


def _checksum(tensor: Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return zlib.crc32(flat.numpy().data) if len(flat) else 0
