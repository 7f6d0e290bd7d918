"""One SAE in training: its weights, its optimiser, and what it remembers between steps.

Shapes: B tokens in a batch, D model width, K dictionary width.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dmsae.objective import BatchResult, adam, backward_, step_
from dmsae.sae import SAE, SAEConfig
from dmsae.schedule import Schedule, TrainConfig
from dmsae.seeds import generator


@dataclass(frozen=True, slots=True)
class Member:
    """One SAE to be trained: its name (also its directory), what it is, and the core rows it starts from."""

    name: str
    sae: SAEConfig
    core_rows: Tensor | None = None


class State(StrEnum):
    """How an SAE's training stands."""

    TRAINING = "training"
    FINISHED = "finished"
    COLLAPSED = "collapsed"
    DIVERGED = "diverged"


class Learner:
    """One SAE in training, with all of its state."""

    def __init__(self, member: Member, config: TrainConfig, schedule: Schedule, b_dec: Tensor) -> None:
        self.name, self._config, self._schedule = member.name, config, schedule
        self.sae = SAE.init(member.sae, generator(config.seed, "init"), member.core_rows).to(b_dec.device)
        with torch.no_grad():
            self.sae.b_dec.copy_(b_dec)
        self.optimiser = adam(self.sae, config.lr, config.betas)
        self.idle_tokens_K = torch.zeros(member.sae.width, dtype=torch.int64, device=b_dec.device)
        self.threshold: float | None = None
        self.warm_start: float | None = None
        self.low_steps = 0
        self.state, self.ended_at, self.cause = State.TRAINING, 0, ""

    @property
    def dead_K(self) -> Tensor:
        """Which latents have not fired for long."""
        return self.idle_tokens_K >= self._schedule.dead_after_tokens

    def advance(self, step: int, x_BD: Tensor, variance: float) -> BatchResult:
        """Take one step, unless its numbers are no longer numbers: then the weights stay as they were."""
        result = backward_(self.sae, x_BD, self._config.objective, self.dead_K, self.warm_start)
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            self.end(State.DIVERGED, step, f"loss {result.loss}, gradient norm {result.grad_norm}")
            return result
        self.optimiser.param_groups[0]["lr"] = self._config.lr * self._schedule.lr_factor(step)
        step_(self.sae, self.optimiser, result.grad_norm, self._config.max_grad_norm)
        self.warm_start = result.warm_start
        self.idle_tokens_K += len(x_BD)
        self.idle_tokens_K[result.n_fired > 0] = 0
        if step >= self._schedule.threshold_start and result.threshold > 0:
            beta = self._schedule.threshold_beta if self.threshold is not None else 0.0
            self.threshold = beta * (self.threshold or 0.0) + (1 - beta) * result.threshold
        self._watch(step, 1 - float(result.prefix_errors[-1]) / variance)
        return result

    def end(self, state: State, step: int, cause: str = "") -> None:
        """Stop training this SAE, for a reason."""
        self.state, self.ended_at, self.cause = state, step, cause

    def folded(self, scale: float) -> SAE:
        """Return a copy of the SAE as it is used: on raw activations, with its thresholds."""
        sae = SAE(self.sae.config).to(self.sae.W_dec.device)
        sae.load_state_dict(self.sae.state_dict())
        sae.set_threshold_(self.threshold or 0.0)
        sae.fold_scale_(scale)
        return sae

    @torch.no_grad()
    def as_used(self, x_BD: Tensor) -> dict[str, float]:
        """Return sparsity and explained variance as they are at inference, with thresholds."""
        config = self.sae.config
        threshold_K = torch.zeros_like(self.sae.threshold)
        threshold_K[config.n_unmasked :] = self.threshold or 0.0
        f_BK = self.sae.pre_activations(x_BD).relu_()
        f_BK *= f_BK > threshold_K
        error = (x_BD - self.sae.decode(f_BK)).square().sum(1).mean()
        return {
            "l0_core_inference": float((f_BK[:, : config.n_core] > 0).sum(1).float().mean()),
            "l0_noncore_inference": float((f_BK[:, config.n_core :] > 0).sum(1).float().mean()),
            "fve_inference": 1 - float(error / (x_BD - x_BD.mean(0)).square().sum(1).mean()),
        }

    def dead_groups(self) -> list[int]:
        """Return how many latents are dead in the core and in each prefix group."""
        bounds = [0, self.sae.config.n_core, *self.sae.config.prefixes]
        return [int(self.dead_K[low:high].sum()) for low, high in pairwise(bounds)]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint, by name."""
        found = {f"{self.name}/sae/{name}": tensor for name, tensor in self.sae.state_dict().items()}
        found[f"{self.name}/idle_tokens"] = self.idle_tokens_K
        for name, parameter in self.sae.named_parameters():
            moments = self.optimiser.state.get(parameter, {})
            found |= {f"{self.name}/adam/{name}/{key}": value for key, value in moments.items()}
        return found

    def facts(self) -> dict[str, Any]:
        """Return the rest of a checkpoint."""
        names = ("threshold", "warm_start", "low_steps", "state", "ended_at", "cause")
        return {name: getattr(self, name) for name in names}

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Become what `tensors` and `facts` describe."""
        mine = {
            name.removeprefix(f"{self.name}/"): value
            for name, value in tensors.items()
            if name.startswith(f"{self.name}/")
        }
        self.sae.load_state_dict({name[4:]: value for name, value in mine.items() if name.startswith("sae/")})
        self.idle_tokens_K.copy_(mine["idle_tokens"])
        for name, parameter in self.sae.named_parameters():
            prefix = f"adam/{name}/"
            moments = {key.removeprefix(prefix): value for key, value in mine.items() if key.startswith(prefix)}
            if moments:
                self.optimiser.state[parameter] = {
                    key: value.clone() if key == "step" else value.to(parameter.device)
                    for key, value in moments.items()
                }
        for name, value in facts.items():
            setattr(self, name, State(value) if name == "state" else value)

    def _watch(self, step: int, fve: float) -> None:
        """Notice a collapse: hardly any variance explained, for long, after the warm-up."""
        self.low_steps = self.low_steps + 1 if fve < self._config.collapse_fve else 0
        patience = max(20, self._schedule.steps // 50)
        if step >= self._schedule.warmup_steps and self.low_steps > patience:
            self.end(
                State.COLLAPSED, step, f"explained variance below {self._config.collapse_fve} for {patience} steps"
            )
