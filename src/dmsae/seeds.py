"""Random numbers that depend on what they are for, and on nothing else."""

import hashlib

import torch


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed for the purpose named by `parts`; other purposes get unrelated seeds."""
    name = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def generator(*parts: int | str, device: str | torch.device = "cpu") -> torch.Generator:
    """Return a fresh generator seeded by `derive_seed`."""
    return torch.Generator(device=device).manual_seed(derive_seed(*parts))
