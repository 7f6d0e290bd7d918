"""What is measured on activations before an SAE sees them: their scale, their centre, their variance."""

import math

import torch
from torch import Tensor

from dmsae.activations.stream import ActivationStream
from dmsae.errors import TrainingError
from dmsae.ranks import Axis
from dmsae.sae.comms import ALONE, Comms
from dmsae.sae.variance import variance


def geometric_median(x_BD: Tensor, n_iterations: int = 50, data: Axis = ALONE.data) -> Tensor:
    """Return the point with the least summed distance to the rows of all ranks, by Weiszfeld's iteration."""
    median_D = data.sum_(x_BD.sum(0)) / (len(x_BD) * data.size)
    for _ in range(n_iterations):
        weights_B = 1 / (x_BD - median_D).norm(dim=1).clamp_min(1e-8)
        median_D = data.sum_((weights_B[:, None] * x_BD).sum(0)) / data.sum_(weights_B.sum())
    return median_D


def first_look(stream: ActivationStream, n_batches: int, comms: Comms = ALONE) -> tuple[float, Tensor]:
    """Return the scale √mean‖x‖² of the first batches, and the geometric median of the first on that scale."""
    total = 0.0
    for step in range(1, n_batches + 1):
        x_BD = next(stream)
        if step == 1:
            first_BD = x_BD
        squares = comms.data.sum_(x_BD.square().sum(1).sum(dtype=torch.float64))
        total += float(squares / (len(x_BD) * comms.data.size))
        if not math.isfinite(total):
            raise _not_finite(step)
    if total == 0:
        raise TrainingError(f"The activations of the first {n_batches} batches are all zero. Check the store.")
    scale = math.sqrt(total / n_batches)
    return scale, geometric_median(first_BD / scale, data=comms.data)


def usable_variance(x_BD: Tensor, step: int, data: Axis = ALONE.data) -> float:
    """Return the batch's variance, unless there is none to explain."""
    batch_variance = variance(x_BD, data)
    if not math.isfinite(batch_variance):
        raise _not_finite(step)
    if batch_variance == 0:
        raise TrainingError(
            f"The {len(x_BD) * data.size} activations of step {step} are all the same: there is no variance to "
            "explain. Use a larger batch_size, or check the store."
        )
    return batch_variance


def _not_finite(step: int) -> TrainingError:
    return TrainingError(
        f"The batch of step {step} holds activations that are not finite. Check the store; the same command resumes "
        "from before that step."
    )
