"""Which torch device a `device` field means, and what else the last digits of a result depend on."""

import os

import torch

from dmsae import __version__
from dmsae.config import Json
from dmsae.errors import ModelError, first_line


def multiplies_bfloat16() -> bool:
    """Return whether this CPU has instructions for products of bfloat16; not where torch is too old to tell."""
    tells = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(tell() for tell in tells if tell is not None)


def machine() -> Json:
    """Return what the last digits depend on, besides the settings and the number of threads."""
    return {
        "dmsae": __version__,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "cpu": torch.backends.cpu.get_cpu_capability() + (" with bfloat16" if multiplies_bfloat16() else ""),
    }


def model_device(device: str) -> torch.device:
    """Return the device on which a language model runs: `auto` means the first of cuda, mps, cpu that exists."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ModelError(f"device = {device!r} cannot be used: {first_line(error)}. Use 'auto' or 'cpu'.") from error
    return torch.device(device)


def training_device(device: str) -> torch.device:
    """Return the device on which SAEs are trained and scored, which needs float64 and sparse products."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("mps"):
        raise ModelError(f"device = {device!r} cannot train SAEs: it lacks float64 and sparse products. Use 'cpu'.")
    return model_device(device)
