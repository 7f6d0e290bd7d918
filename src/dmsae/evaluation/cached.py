"""Work that depends on no SAE is done once, and kept in files that are named by a hash of what made them."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from dmsae.config import Json, to_dict
from dmsae.disk.files import canonical_hash, exclusive_lock, write_tensors
from dmsae.errors import BusyError

Tensors = Mapping[str, Tensor]


def cached(cache: Path | None, what: str, made_of: Json, make: Callable[[], Tensors]) -> Tensors:
    """Return what `make` returns, read from the cache if it was made before from the same things.

    Everything that `make` depends on must be in `made_of`. Without a cache it is made every time.
    """
    if cache is None:
        return make()
    path = cache / f"{what}-{canonical_hash(to_dict(made_of))[:16]}.safetensors"
    if (kept := _read(path)) is not None:
        return kept
    made = make()
    try:
        with exclusive_lock(path.with_suffix(".lock"), f"The cache file {path}"):
            write_tensors(path, made)
    except BusyError:
        pass  # another process is writing the same tensors
    return made


def _read(path: Path) -> Tensors | None:
    """Return what a cache file holds; None if there is none, or it is damaged and has to be made again."""
    if not path.is_file():
        return None
    try:
        return safetensors.torch.load_file(path)
    except SafetensorError:
        return None


def tensor_key(tensor: Tensor) -> str:
    """Return a hash of what a tensor holds, to name what was made of it."""
    content = tensor.detach().cpu().contiguous()
    described = f"{content.dtype} {tuple(content.shape)} ".encode()
    return hashlib.sha256(described + content.numpy().tobytes()).hexdigest()
