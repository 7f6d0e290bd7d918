"""Random numbers that depend on their purpose, and on nothing else."""

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a config that only names a seed need not wait for torch
    import torch


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed for the purpose named by `parts`; other purposes get unrelated seeds."""
    name = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def generator(*parts: int | str, device: "str | torch.device" = "cpu") -> "torch.Generator":
    """Return a fresh generator seeded by `derive_seed`."""
    import torch

    return torch.Generator(device=device).manual_seed(derive_seed(*parts))
