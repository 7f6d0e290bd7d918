"""Which torch device a `device` field means."""

import torch

from dmsae.errors import ModelError, first_line


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
