"""How to train: the published recipe, with a field for everything."""

import math
from dataclasses import dataclass, field
from typing import get_args

from dmsae.config import Json, require, require_whole, to_dict
from dmsae.sae.objective import Objective
from dmsae.training.metrics import SinkName
from dmsae.training.schedule import Schedule

_WHOLE = {"tokens": 1, "batch_size": 1, "norm_batches": 1, "log_every": 1}
_WHOLE_OR_OPEN = {"warmup_steps": 0, "threshold_start": 0, "dead_after_tokens": 1, "saes_at_once": 1}
"""Fields that are whole numbers, and the least each may be."""


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How to train. Fields that are None follow from the length of the run, so that short runs warm up too.

    >>> dmsae.TrainConfig(tokens=500_000_000).schedule().warmup_steps
    1000
    >>> dmsae.TrainConfig(tokens=600_000).schedule().warmup_steps
    14
    """

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
    """A latent that has not fired for this many tokens is dead. None: 10 million, or a tenth of a short run."""
    norm_batches: int = 20
    """Batches from which the scale of the activations is taken."""
    collapse_fve: float = 0.02
    """An SAE that explains less of the variance than this for long has collapsed; its training ends."""
    seed: int = 0
    """Determines the initial weights and the order of activations."""
    log_every: int = 50
    """Steps between lines in metrics.jsonl; the first and the last step always have one."""
    log_to: tuple[SinkName, ...] = ()
    """Where metrics go as well: tensorboard, wandb."""
    checkpoint_seconds: float = 120.0
    """Time between checkpoints. One is also written on Ctrl-C and SIGTERM."""
    saes_at_once: int | None = None
    """SAEs of a run that train together, on one pass over the activations; the others follow, on passes of their own,
    to the same result. None: as many as fit into the memory of the GPU; on a CPU, all."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: cuda if it is there."""

    def __post_init__(self) -> None:
        for name, low in _WHOLE.items():
            require_whole(name, getattr(self, name), low)
        for name, low in _WHOLE_OR_OPEN.items():
            if getattr(self, name) is not None:
                require_whole(name, getattr(self, name), low)
        one_batch = f"be at least one batch (batch_size = {self.batch_size})"
        require(self.tokens >= self.batch_size, "tokens", self.tokens, one_batch)
        for name in ("lr", "max_grad_norm"):
            require(0 < getattr(self, name) < math.inf, name, getattr(self, name), "be a positive number")
        betas = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        require(betas, "betas", self.betas, "be two numbers of at least 0 and below 1")
        require(0 <= self.decay_fraction <= 1, "decay_fraction", self.decay_fraction, "lie between 0 and 1")
        beta = self.threshold_beta
        require(beta is None or 0 <= beta < 1, "threshold_beta", beta, "be at least 0 and below 1")
        steps = self.tokens // self.batch_size
        require(
            (self.threshold_start or 0) < steps,
            "threshold_start",
            self.threshold_start,
            f"be below the number of steps ({steps})",
            "Otherwise the SAE would never get an inference threshold.",
        )
        require(self.collapse_fve < 1, "collapse_fve", self.collapse_fve, "be below 1; a negative number turns it off")
        require(self.checkpoint_seconds >= 0, "checkpoint_seconds", self.checkpoint_seconds, "be at least 0")
        known = get_args(SinkName)
        require(set(self.log_to) <= set(known), "log_to", self.log_to, f"name only {' and '.join(known)}")

    def result_settings(self) -> Json:
        """Return the settings that determine the result; how often to log and to save may change between resumes."""
        watching = ("log_every", "log_to", "checkpoint_seconds", "saes_at_once", "device")
        return {name: value for name, value in to_dict(self).items() if name not in watching}

    def schedule(self) -> Schedule:
        """Return the timetable, with every field that was left open filled in."""
        steps = self.tokens // self.batch_size
        short = max(1, steps // 20)
        warmup = self.warmup_steps if self.warmup_steps is not None else min(1000, short)
        start = self.threshold_start if self.threshold_start is not None else min(1000, short, steps - 1)
        beta = self.threshold_beta if self.threshold_beta is not None else 1 - 1 / min(1000, short)
        dead = self.dead_after_tokens or min(10_000_000, max(self.batch_size, self.tokens // 10))
        return Schedule(steps, warmup, steps - round(steps * self.decay_fraction), start, beta, dead)
