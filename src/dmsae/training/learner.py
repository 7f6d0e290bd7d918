"""One SAE in training: its weights, its optimiser, and what it remembers between steps."""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.config import Json, require, to_dict
from dmsae.errors import ConfigError
from dmsae.sae.comms import ALONE, Comms
from dmsae.sae.config import DenseCore, SAEConfig
from dmsae.sae.detectors import Detectors
from dmsae.sae.objective import BatchResult, backward_
from dmsae.sae.optimiser import Adam, step_
from dmsae.sae.sae import SAE
from dmsae.sae.shard import owned_rows, shard, sharded_tensors
from dmsae.sae.variance import fraction_explained, squared_error, variance
from dmsae.seeds import generator
from dmsae.training.config import TrainConfig
from dmsae.training.result import TrainState
from dmsae.training.schedule import Schedule


@dataclass(frozen=True, slots=True)
class SAESpec:
    """One SAE to be trained: its name (also its directory), what it is, and the encoder rows of its core."""

    name: str
    sae: SAEConfig
    core_rows: Tensor | None = None
    detectors: Detectors | None = None
    """Their offsets and thresholds, when the core is made of detectors."""
    total_budget: bool = False
    """Whether a dense core's own activity counts towards `sae.k`: `k_noncore` then follows it during training."""
    init_seed: int | None = None
    """Determines its initial weights, for SAEs of one run that are to differ in them. None: the run's seed does."""

    def __post_init__(self) -> None:
        try:
            self.sae.require_core_rows(self.core_rows)
            self.sae.require_detectors(self.detectors)
            dense = isinstance(self.sae.core, DenseCore)
            require(dense or not self.total_budget, "total_budget", True, "be left out unless the core is dense")
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from error

    def settings(self) -> Json:
        """Return what determines this SAE, besides how it is trained."""
        settings: Json = to_dict(self.sae)
        settings |= {"core_sha256": self.core_sha256(), "total_budget": self.total_budget}
        return settings | {"init_seed": self.init_seed}

    def core_sha256(self) -> str | None:
        """Return a hash of what is frozen, or None without a core."""
        if self.core_rows is None:
            return None
        digest = hashlib.sha256()
        for tensor in (self.core_rows, *(self.detectors or ())):
            digest.update(tensor.detach().cpu().float().contiguous().numpy().tobytes())
        return digest.hexdigest()


def sharded_names(specs: Iterable[SAESpec]) -> dict[str, int]:
    """Return the tensors of a checkpoint that have a row for each latent, with the latent at which each begins."""
    names: dict[str, int] = {}
    for spec in specs:
        names[f"{spec.name}/idle_tokens"] = 0
        for name, start in sharded_tensors(spec.sae).items():
            names[f"{spec.name}/sae/{name}"] = start
            names |= {f"{spec.name}/adam/{name}/{moment}": start for moment in ("exp_avg", "exp_avg_sq")}
    return names


class InferenceMetrics(NamedTuple):
    """How an SAE does as it will be used: with its thresholds, without BatchTopK."""

    l0_core: float
    l0_noncore: float
    fve: float


_L0_MEMORY = 0.95
"""How much of the average activity of the core each step keeps, when `k_noncore` follows it."""

_FACTS = ("threshold", "warm_start", "l0_core", "has_learned", "low_steps", "state", "ended_at", "cause")
"""What a learner remembers besides tensors."""


class Learner:
    """One SAE in training, with all of its state; on a mesh, the part of it that a rank owns."""

    def __init__(
        self,
        spec: SAESpec,
        config: TrainConfig,
        schedule: Schedule,
        b_dec: Tensor,
        scale: float = 1.0,
        comms: Comms = ALONE,
    ) -> None:
        self.name, self._config, self._schedule = spec.name, config, schedule
        seed = config.seed if spec.init_seed is None else spec.init_seed
        whole = SAE.init(spec.sae, generator(seed, "init"), spec.core_rows, spec.detectors)
        if spec.detectors is not None:
            whole.set_detectors_(spec.detectors, scale)
        self.sae = shard(whole, comms.latents).to(b_dec.device)
        with torch.no_grad():
            self.sae.b_dec.copy_(b_dec)
        self._whole, self._detectors, self._total_budget = spec.sae, spec.detectors, spec.total_budget
        self.l0_core: float | None = None
        self.optimiser = Adam(self.sae, config.lr, config.betas)
        self._comms, self._data = comms, comms.data
        self.hold_gradients()
        self.idle_tokens_K = torch.zeros(self.sae.config.width, dtype=torch.int64, device=b_dec.device)
        self.threshold: float | None = None
        self.warm_start: float | None = None
        self.has_learned, self.low_steps = False, 0
        self.state, self.ended_at, self.cause = TrainState.TRAINING, 0, ""

    def hold_gradients(self) -> None:
        """Give every parameter a gradient of zeros, in a place where the data ranks can sum them."""
        data, gradients = self._data.holding(self.sae.parameters())
        self._comms = self._comms._replace(data=data)
        for parameter, gradient in zip(self.sae.parameters(), gradients, strict=True):
            parameter.grad = gradient

    @property
    def dead_K(self) -> Tensor:
        """Which latents have not fired for long."""
        return self.idle_tokens_K >= self._schedule.dead_after_tokens

    def advance(self, step: int, x_BD: Tensor, batch_variance: float) -> BatchResult:
        """Take one step, unless the loss or its gradient is not finite: then the weights stay as they were."""
        # The tokens of this batch count as idle for all that do not fire in it, as in the published recipe.
        n_tokens = len(x_BD) * self._comms.data.size
        dead_K = self.idle_tokens_K + n_tokens >= self._schedule.dead_after_tokens
        result = backward_(self.sae, x_BD, self._config.objective, dead_K, self.warm_start, self._comms)
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            self._end(TrainState.DIVERGED, step, f"loss {result.loss}, gradient norm {result.grad_norm}")
            return result
        self.optimiser.lr = self._config.lr * self._schedule.lr_factor(step)
        step_(self.sae, self.optimiser, result.grad_norm, self._config.max_grad_norm)
        self.warm_start = result.warm_start
        self.idle_tokens_K += n_tokens
        self.idle_tokens_K[result.n_fired > 0] = 0
        if step >= self._schedule.threshold_start and result.threshold > 0:
            beta = self._schedule.threshold_beta if self.threshold is not None else 0.0
            self.threshold = beta * (self.threshold or 0.0) + (1 - beta) * result.threshold
            self.sae.set_threshold_(self.threshold)
        self._follow_budget(result.l0_core)
        self._watch(step + 1, fraction_explained(float(result.prefix_errors[-1]), batch_variance))
        return result

    def finish(self) -> None:
        """Record how the training ended, unless it ended earlier; free the memory of optimiser and gradients."""
        if self.state is TrainState.TRAINING and self.low_steps > self._patience:
            self._collapse(self._schedule.steps)
        elif self.state is TrainState.TRAINING and self._is_over_budget():
            k = self.sae.config.k
            cause = f"the core alone has {self.l0_core:.1f} active latents per token, and k = {k} is for all"
            self._end(TrainState.OVER_BUDGET, self._schedule.steps, cause)
        elif self.state is TrainState.TRAINING:
            self._end(TrainState.FINISHED, self._schedule.steps)
        self.optimiser.state.clear()
        self.sae.zero_grad()
        self._comms = self._comms._replace(data=self._data)  # the other one holds the gradients too

    @property
    def whole(self) -> SAEConfig:
        """What the whole SAE is."""
        return replace(self._whole, core=self.sae.config.core)

    def folded(self, scale: float) -> SAE:
        """Return the SAE for raw activations; encoder and decoder rows, which do not change, are not copied.

        On a mesh this is the part that the rank owns.
        """
        with torch.device("meta"):
            sae = SAE(self.sae.config)
        tensors = self.sae.state_dict()
        same = {name: tensor if name.startswith("W_") else tensor.clone() for name, tensor in tensors.items()}
        sae.load_state_dict(same, assign=True)
        sae.fold_scale_(scale)
        if self._detectors is not None:  # as they were given: scaling there and back would round them
            mine = owned_rows(0, self._comms.latents.rank, self._comms.latents.size)
            sae.set_detectors_(Detectors(*(values[mine] for values in self._detectors)))
        return sae

    @torch.no_grad()
    def inference_metrics(self, x_BD: Tensor, n_tokens: int | None = None) -> InferenceMetrics:
        """Return sparsity and explained variance at inference thresholds, on the `n_tokens` that all ranks have."""
        n_core, (data, latents, both) = self.sae.config.n_core, self._comms
        n_tokens = n_tokens or len(x_BD) * data.size
        f_BK = self.sae.encode(x_BD)
        fired = [(f > 0).sum(1).float().sum() for f in (f_BK[:, :n_core], f_BK[:, n_core:])]
        l0_core, l0_noncore = (both.sum_(torch.stack(fired)) / n_tokens).tolist()
        reconstruction_BD = latents.sum_(f_BK @ self.sae.W_dec) + self.sae.b_dec
        error = squared_error(x_BD, reconstruction_BD, data, n_tokens)
        return InferenceMetrics(l0_core, l0_noncore, fraction_explained(error, variance(x_BD, data, n_tokens)))

    def dead_groups(self) -> list[int]:
        """Return how many latents are dead in the core and in each prefix group."""
        bounds = [0, self.sae.config.n_core, *self.sae.config.prefixes]
        dead = torch.stack([self.dead_K[low:high].sum() for low, high in pairwise(bounds)])
        return [int(n) for n in self._comms.latents.sum_(dead)]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint, by name."""
        tensors = {f"{self.name}/sae/{name}": tensor for name, tensor in self.sae.state_dict().items()}
        tensors[f"{self.name}/idle_tokens"] = self.idle_tokens_K
        for name, parameter in self.sae.named_parameters():
            moments = self.optimiser.state.get(parameter, {})
            tensors |= {f"{self.name}/adam/{name}/{key}": value for key, value in moments.items()}
        return tensors

    def facts(self) -> Json:
        """Return the rest of a checkpoint."""
        return {name: getattr(self, name) for name in _FACTS} | {"k_selected": self.sae.config.k_selected}

    def restore(self, tensors: dict[str, Tensor], facts: Json) -> None:
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
                # A copy: what was loaded may be a view of the file. The step counts too live on the device (fused).
                self.optimiser.state[parameter] = {
                    key: value.to(parameter.device, copy=True) for key, value in moments.items()
                }
        self._set_k_noncore(facts["k_selected"])
        for name in _FACTS:
            setattr(self, name, TrainState(facts[name]) if name == "state" else facts[name])

    def _follow_budget(self, l0_core: float) -> None:
        """Leave to the non-core latents what a dense core does not use of the total budget."""
        core = self.sae.config.core
        if not self._total_budget or not isinstance(core, DenseCore):
            return
        memory = _L0_MEMORY if self.l0_core is not None else 0.0
        self.l0_core = memory * (self.l0_core or 0.0) + (1 - memory) * l0_core
        left = min(max(1, round(self.sae.config.k - self.l0_core)), self._whole.n_noncore)
        self._set_k_noncore(left)

    def _set_k_noncore(self, k_noncore: int) -> None:
        core = self.sae.config.core
        if isinstance(core, DenseCore) and k_noncore != core.k_noncore:
            self.sae.config = replace(self.sae.config, core=replace(core, k_noncore=k_noncore))

    def _is_over_budget(self) -> bool:
        return self.l0_core is not None and self.sae.config.k - self.l0_core < 0.5

    @property
    def _patience(self) -> int:
        """Steps without explained variance that count as a collapse."""
        return max(20, self._schedule.steps // 50)

    def _watch(self, n_steps: int, fve: float) -> None:
        """Detect a collapse: hardly any variance explained, for many steps, after there had been some.

        Before there has been some, the SAE may just be slow to start: it is judged at the end.
        """
        low = fve < self._config.collapse_fve
        self.has_learned = self.has_learned or not low
        self.low_steps = self.low_steps + 1 if low else 0
        if self.has_learned and self.low_steps > self._patience:
            self._collapse(n_steps)

    def _collapse(self, n_steps: int) -> None:
        low = self._config.collapse_fve
        self._end(TrainState.COLLAPSED, n_steps, f"explained variance below {low} for {self.low_steps} steps")

    def _end(self, state: TrainState, n_steps: int, cause: str = "") -> None:
        """Stop training this SAE after so many steps, for a reason."""
        self.state, self.ended_at, self.cause = state, n_steps, cause
