"""How to train: the published recipe, with a field for everything, and the timetable that it comes to."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

from dmsae.config import to_dict
from dmsae.errors import ConfigError, nearest
from dmsae.sae.objective import Objective
from dmsae.training.metrics import Sink

_WHOLE = {
    "tokens": 1,
    "batch_size": 1,
    "warmup_steps": 0,
    "threshold_start": 0,
    "dead_after_tokens": 1,
    "norm_batches": 1,
    "log_every": 1,
}
"""The fields that are whole numbers, and the least each may be."""


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How to train. Fields that are None follow from the length of the run, so that short runs warm up too."""

    tokens: int = 1_000_000
    """Activations to train on; more than the store holds means several epochs."""
    batch_size: int = 2048
    """Activations per step."""
    lr: float = 3e-4
    """Peak learning rate of Adam."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's averaging of gradients and of their squares."""
    warmup_steps: int | None = None
    """Steps over which the learning rate rises. None: 1000, or a twentieth of a short run."""
    decay_fraction: float = 0.2
    """Share of the run, at its end, over which the learning rate falls to zero."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    objective: Objective = field(default_factory=Objective)
    threshold_start: int | None = None
    """Step at which the inference threshold begins to be averaged. None: 1000, or a twentieth of a short run."""
    threshold_beta: float | None = None
    """How much of the average threshold each step keeps. None: 0.999, or less in a short run."""
    dead_after_tokens: int | None = None
    """A latent that has not fired for so many tokens is dead. None: 10 million, or a tenth of a short run."""
    norm_batches: int = 20
    """Batches from which the scale of the activations is taken."""
    collapse_fve: float = 0.02
    """An SAE that explains less of the variance than this for long has collapsed: it is recorded and let go."""
    seed: int = 0
    """Decides the initial weights and the order of activations."""
    log_every: int = 50
    """Steps between lines in metrics.jsonl."""
    log_to: tuple[Sink, ...] = ()
    """Where metrics go besides: tensorboard, wandb."""
    checkpoint_seconds: float = 120.0
    """Time between checkpoints. One is also written on Ctrl-C and SIGTERM."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: cuda if it is there."""

    def __post_init__(self) -> None:
        for name, low in _WHOLE.items():
            _require_whole(name, getattr(self, name), low)
        if self.tokens < self.batch_size:
            raise ConfigError(f"tokens = {self.tokens} must be at least one batch (batch_size = {self.batch_size}).")
        for name in ("lr", "max_grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} = {getattr(self, name)} must be a positive number.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas = {self.betas} must be two numbers of at least 0 and below 1.")
        if not 0 <= self.decay_fraction <= 1:
            raise ConfigError(f"decay_fraction = {self.decay_fraction} must lie between 0 and 1.")
        if self.threshold_beta is not None and not 0 <= self.threshold_beta < 1:
            raise ConfigError(f"threshold_beta = {self.threshold_beta} must be at least 0 and below 1.")
        if self.threshold_start is not None and self.threshold_start >= self.tokens // self.batch_size:
            raise ConfigError(
                f"threshold_start = {self.threshold_start} is past the end of the run, which has "
                f"{self.tokens // self.batch_size} steps: the SAE would never get an inference threshold."
            )
        if not self.collapse_fve < 1:
            raise ConfigError(f"collapse_fve = {self.collapse_fve} must be below 1; a negative number turns it off.")
        if not self.checkpoint_seconds >= 0:
            raise ConfigError(f"checkpoint_seconds = {self.checkpoint_seconds} must be at least 0.")
        for sink in self.log_to:
            if sink not in get_args(Sink):
                raise ConfigError(f"log_to = {self.log_to} names {sink!r}. {nearest(str(sink), get_args(Sink))}")

    def lasting(self) -> dict[str, Any]:
        """Return the settings that decide the result; how often to look and to save may change on the way."""
        watching = ("log_every", "log_to", "checkpoint_seconds", "device")
        return {name: value for name, value in to_dict(self).items() if name not in watching}

    def schedule(self) -> "Schedule":
        """Return what the fields that were left open come to."""
        steps = self.tokens // self.batch_size
        short = max(1, steps // 20)
        warmup = self.warmup_steps if self.warmup_steps is not None else min(1000, short)
        start = self.threshold_start if self.threshold_start is not None else min(1000, short, steps - 1)
        beta = self.threshold_beta if self.threshold_beta is not None else 1 - 1 / min(1000, short)
        dead = self.dead_after_tokens or min(10_000_000, max(self.batch_size, self.tokens // 10))
        return Schedule(steps, warmup, steps - round(steps * self.decay_fraction), start, beta, dead)


class Schedule(NamedTuple):
    """The timetable of a run."""

    steps: int
    warmup_steps: int
    decay_start: int
    threshold_start: int
    threshold_beta: float
    dead_after_tokens: int

    def lr_factor(self, step: int) -> float:
        """Return the learning rate of a step (counted from 0) as a share of its peak."""
        rise = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        if step < self.decay_start:
            return rise
        return rise * (self.steps - step) / (self.steps - self.decay_start)


def _require_whole(name: str, value: object, low: int) -> None:
    """Raise unless a field is a whole number that is large enough, or left open."""
    if value is not None and (type(value) is not int or value < low):
        raise ConfigError(f"{name} = {value!r} must be a whole number of at least {low}.")
