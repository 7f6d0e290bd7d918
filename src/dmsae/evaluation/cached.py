"""Names for what depends on no SAE, and is made once: a hash of everything that it was made of."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from dmsae.config import Json, to_dict
from dmsae.disk.files import canonical_hash
from dmsae.evaluation.shared import kept_tensors

Tensors = dict[str, Tensor]


def cached(cache: Path | None, what: str, made_of: Json, make: Callable[[], Tensors]) -> Tensors:
    """Return what `make` returns, read from the cache if it was made before from the same things.

    Everything that `make` depends on must be in `made_of`. Without a cache it is made every time.
    """
    name = f"{what}-{canonical_hash(to_dict(made_of))[:16]}.safetensors"
    return kept_tensors(cache / name if cache else None, make)


def tensor_key(tensor: Tensor) -> str:
    """Return a hash of what a tensor holds, to name what was made of it."""
    content = tensor.detach().cpu().contiguous()
    described = f"{content.dtype} {tuple(content.shape)} ".encode()
    return hashlib.sha256(described + content.numpy().tobytes()).hexdigest()
