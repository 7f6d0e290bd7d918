"""How long a training step takes on this machine, measured on a few of them."""

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch

from dmsae.devices import training_device
from dmsae.sae.config import SAEConfig, matryoshka_nesting
from dmsae.sae.objective import Objective, backward_
from dmsae.sae.optimiser import Adam, step_
from dmsae.sae.sae import SAE

_WIDTHS = (16, 8)
"""A wide SAE is measured at a sixteenth and an eighth of its width: the step is linear in it."""
_DIRECT = 8192
"""Widths up to this are measured as they are."""
_STEPS = 3


def step_seconds(sae: SAEConfig, batch_size: int, device: str = "auto") -> float:
    """Return the seconds of one training step of an SAE, from steps on random activations.

    The SAE has no core: one costs less than what it replaces. Time is linear in the width, and so is extrapolated from
    two smaller ones where the SAE is wide.
    """
    where = training_device(device)
    if sae.width <= _DIRECT:
        return _measured(sae.width, sae, batch_size, where)
    (narrow, short), (wide, long) = (
        (sae.width // part, _measured(sae.width // part, sae, batch_size, where)) for part in _WIDTHS
    )
    slope = (long - short) / (wide - narrow)
    return long + slope * (sae.width - wide)


def seconds_by_k(saes: Sequence[SAEConfig], batch_size: int, device: str = "auto") -> list[float]:
    """Return the seconds of one step of each SAE: measured at the smallest and largest k, on the line between them."""
    ends = [end(saes, key=lambda sae: sae.k) for end in (min, max)]
    low, high = (step_seconds(sae, batch_size, device) for sae in ends)
    span = max(1, ends[1].k - ends[0].k)
    return [low + (high - low) * (sae.k - ends[0].k) / span for sae in saes]


def _measured(width: int, sae: SAEConfig, batch_size: int, device: torch.device) -> float:
    k = min(sae.k, width // 2)
    config = replace(sae, width=width, k=k, prefixes=matryoshka_nesting(width), core=None)
    draws = torch.Generator().manual_seed(0)
    model = SAE.init(config, draws).to(device)
    optimiser, warm_start, seconds = Adam(model, 1e-4), None, []
    x_BD = torch.randn(batch_size, sae.d_model, generator=draws).to(device)
    for _ in range(_STEPS):
        started = time.perf_counter()
        result = backward_(model, x_BD, Objective(), None, warm_start)
        step_(model, optimiser, result.grad_norm, 1.0)
        if device.type == "cuda":
            torch.cuda.synchronize()
        warm_start = result.warm_start
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])  # the first has no threshold to start from, and allocates
