"""The whole state of a training run in one file, written whole or not at all.

Several processes that train together write a folder instead (`training/checkpoints.py`); `saved_step` reads both.

There is no random state to save: everything random in a run derives from its seed and its purpose, and the data cursor
says how far the stream has come.
"""

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from dmsae.config import Json
from dmsae.disk import layout
from dmsae.disk.files import fsync_directory
from dmsae.errors import CheckpointError, first_line

if TYPE_CHECKING:  # `status` reads the state of a run without waiting for torch
    from torch import Tensor

_REMEDY = "Remove it to start this run again from the beginning."


def save_checkpoint(path: Path, tensors: "dict[str, Tensor]", state: Json) -> None:
    """Replace the checkpoint; tensors go to the disk without a second copy in memory."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(state)
    sums = {name: checksum(tensor) for name, tensor in tensors.items()}
    metadata = {"state": text, "state_checksum": str(zlib.crc32(text.encode())), "checksums": json.dumps(sums)}
    # In a folder of its own: safetensors writes through a hidden file of a random name, which a kill would leave.
    folder = _temporary(path)
    _remove(folder)
    folder.mkdir()
    written = folder / path.name
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, written, metadata)
        with written.open("rb") as file:
            os.fsync(file.fileno())
        written.replace(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} could not be written: {first_line(error)}. Make room on the disk and run the same command again: "
            "it resumes from the last checkpoint, if there is one."
        ) from error
    finally:
        _remove(folder)
    fsync_directory(path.parent)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, and what was left of one if its writer was killed."""
    path.unlink(missing_ok=True)
    _remove(_temporary(path))


def read_state(path: Path) -> Json:
    """Return all of a checkpoint but its tensors, without reading those."""
    return _read(path, framework="numpy")[1]


def saved_step(directory: Path) -> int:
    """Return the step from which a training would resume, 0 when there is no checkpoint."""
    path = directory / layout.CHECKPOINT
    steps = [int(read_state(path)["step"])] if path.is_file() else []
    return max([0, *steps, *mesh_steps(directory)])


def mesh_steps(directory: Path) -> list[int]:
    """Return the steps at which several processes have written a whole checkpoint."""
    folder = directory / layout.MESH_CHECKPOINT
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal())


def load_checkpoint(path: Path) -> "tuple[dict[str, Tensor], Json]":
    """Return what was saved; a damaged file is an error that names it."""
    return _read(path, framework="pt")


def _read(path: Path, framework: str) -> "tuple[dict[str, Tensor], Json]":
    """Return the state, and with the framework `pt` also the tensors."""
    try:
        with safe_open(path, framework=framework) as file:
            metadata = file.metadata() or {}
            names = list(file.keys()) if framework == "pt" else []
            tensors = {name: file.get_tensor(name) for name in names}
        text, expected = metadata["state"], metadata["state_checksum"]
        sums = json.loads(metadata["checksums"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. {_REMEDY}") from error
    damaged = [name for name, tensor in tensors.items() if checksum(tensor) != sums.get(name)]
    damaged += [] if str(zlib.crc32(text.encode())) == expected else ["state"]
    if damaged:
        raise CheckpointError(f"{path} is damaged: {damaged[0]} is not what was written. {_REMEDY}")
    state: Json = json.loads(text)
    return tensors, state


def _temporary(path: Path) -> Path:
    """Return the folder in which a checkpoint is written before it takes its place."""
    return path.with_name(path.name + ".tmp")


def _remove(folder: Path) -> None:
    """Remove what is left of a temporary folder; a link or a file of its name is removed itself."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def checksum(tensor: "Tensor") -> int:
    """Return a checksum of a tensor's values."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return zlib.crc32(flat.numpy().data) if len(flat) else 0
