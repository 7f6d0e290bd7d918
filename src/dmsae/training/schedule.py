"""The timetable of a training: how long it is, and when its learning rate, threshold and dead count begin."""

from typing import NamedTuple


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
