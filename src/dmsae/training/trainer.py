"""One cycle of training: a stream of activations through one or several SAEs, in the published recipe.

Several SAEs share every batch, so a sweep reads its data once. A run can be stopped at any moment and goes on from its
last checkpoint to the same numbers; logging and checkpointing only look.

Inputs are divided by √mean‖x‖² for training and the scale is folded back into biases and thresholds when an SAE is
saved: encoder rows live in raw space and transfer verbatim.

Shapes: B tokens in a batch, D model width, K dictionary width, C core latents, G prefixes.
"""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmsae.activations.stream import ActivationStream, Cursor
from dmsae.config import to_dict
from dmsae.disk.checkpoint import load_checkpoint, remove_checkpoint, save_checkpoint
from dmsae.disk.files import canonical_hash, write_json
from dmsae.disk.run import claimed, stop_signals
from dmsae.errors import CheckpointError, ConfigError, DmsaeError, TrainingError
from dmsae.progress import console, progress
from dmsae.sae.objective import BatchResult
from dmsae.sae.sae import save_sae
from dmsae.training.learner import Learner, Member, State
from dmsae.training.metrics import MetricsLog, require_sinks
from dmsae.training.schedule import TrainConfig

CHECKPOINT, STATUS = "checkpoint.safetensors", "status.json"
_INFERENCE_TOKENS = 256
"""Tokens of a logged batch on which the SAE is also tried as it will be used, with thresholds."""


class Outcome(NamedTuple):
    """How the training of one SAE ended."""

    name: str
    directory: Path
    state: State
    step: int
    """Steps taken."""
    cause: str
    """Why it did not finish, empty when it did."""
    metrics: dict[str, Any]
    """The last line of its metrics."""


class Trainer:
    """A run: the learners, the stream they share, and the directory in which it can be taken up again."""

    def __init__(
        self,
        members: Sequence[Member],
        config: TrainConfig,
        stream: ActivationStream,
        directory: Path,
        made_from: dict[str, Any],
    ) -> None:
        _check(members, config, stream)
        self._members, self._config, self._stream, self._directory = members, config, stream, directory
        self._schedule = config.schedule()
        self._settings: dict[str, Any] = {
            "kind": "train",
            "made_from": made_from,
            "train": config.lasting(),
            "schedule": self._schedule._asdict(),
            "saes": {member.name: to_dict(member.sae) | {"core_sha256": member.core_sha256()} for member in members},
        }
        self._step, self._scale = 0, 1.0
        self._learners: list[Learner] = []
        self._logs: dict[str, MetricsLog] = {}
        self._last: dict[str, dict[str, Any]] = {}

    def run(self) -> list[Outcome]:
        """Train to the end, from the beginning or from the last checkpoint, and return how each SAE fared."""
        with claimed(self._directory, self._settings):
            if not self._is_finished():
                try:
                    self._begin()
                    self._loop()
                finally:
                    for log in self._logs.values():
                        log.close()
                self._finish()
            remove_checkpoint(self._directory / CHECKPOINT)
            return _judged([read_outcome(self._where(member.name)) for member in self._members])

    def _loop(self) -> None:
        steps, batch = self._schedule.steps, self._config.batch_size
        saved_at = logged_at = time.monotonic()
        logged_step = self._step
        with progress("train", steps, "steps") as bar, stop_signals() as stop:
            bar.skip(self._step)
            while self._step < steps and (active := [one for one in self._learners if one.state is State.TRAINING]):
                x_BD, variance = self._next_batch()
                results = [(learner, learner.advance(self._step, x_BD, variance)) for learner in active]
                self._step += 1
                now = time.monotonic()
                due = self._step % self._config.log_every == 0 or self._step == steps
                rate = (self._step - logged_step) * batch / max(now - logged_at, 1e-9)
                for learner, result in results:
                    if learner.state is State.COLLAPSED or (due and learner.state is State.TRAINING):
                        self._log(learner, result, x_BD, variance, rate)
                if due:
                    logged_at, logged_step = now, self._step
                bar.advance(1, _note(results, variance))
                self._note_endings(active)
                if stop or now - saved_at >= self._config.checkpoint_seconds:
                    self._save()
                    saved_at = time.monotonic()
                if stop:
                    raise KeyboardInterrupt

    def _next_batch(self) -> tuple[Tensor, float]:
        """Return a batch on the training scale and its variance; if it cannot be used, save all that came before."""
        cursor = self._stream.cursor
        try:
            x_BD = next(self._stream).div_(self._scale)
            return x_BD, _variance(x_BD, self._step + 1)
        except DmsaeError:
            self._stream.seek(cursor)
            self._save()
            raise

    def _begin(self) -> None:
        """Set up the learners, fresh or as they were at the last checkpoint."""
        path = self._directory / CHECKPOINT
        resumed = load_checkpoint(path) if path.exists() else None
        if resumed is None:
            self._step, cursor = 0, Cursor()
            self._scale, b_dec = _first_look(self._stream, self._config.norm_batches)
        else:
            tensors, state = resumed
            if state["settings"] != canonical_hash(self._settings):
                raise CheckpointError(f"{path} belongs to another run. Restore the one of this run, or remove it.")
            self._step, self._scale, cursor = state["step"], state["scale"], Cursor(**state["cursor"])
            self._last = state["last"]
            b_dec = torch.zeros(self._stream.d_model, device=self._stream.device)
        self._learners = [Learner(member, self._config, self._schedule, b_dec) for member in self._members]
        if resumed is not None:
            for learner in self._learners:
                learner.restore(tensors, state["learners"][learner.name])
            console.print(f"Resuming at step {self._step:,} of {self._schedule.steps:,}.")
        for member in self._members:
            size = state["metrics_bytes"][member.name] if resumed else 0
            self._logs[member.name] = MetricsLog(
                self._where(member.name), member.name, self._config.log_to, self._settings, self._step, size
            )
        self._stream.seek(cursor)

    def _save(self) -> None:
        tensors = {name: tensor for learner in self._learners for name, tensor in learner.tensors().items()}
        state = {
            "settings": canonical_hash(self._settings),
            "step": self._step,
            "scale": self._scale,
            "cursor": to_dict(self._stream.cursor),
            "learners": {learner.name: learner.facts() for learner in self._learners},
            "metrics_bytes": {name: log.mark() for name, log in self._logs.items()},
            "last": self._last,
        }
        save_checkpoint(self._directory / CHECKPOINT, tensors, state)

    def _finish(self) -> None:
        """Save every SAE in raw space, then how it fared."""
        common = self._settings["made_from"]
        made_from = {member.name: common | {"core": member.core_sha256()} for member in self._members}
        for learner in self._learners:
            learner.finish()
            save_sae(learner.folded(self._scale), self._where(learner.name), made_from[learner.name])
            status = {"state": learner.state, "step": learner.ended_at, "cause": learner.cause}
            status |= {"scale": self._scale, "metrics": self._last.get(learner.name, {})}
            write_json(self._where(learner.name) / STATUS, status)

    def _is_finished(self) -> bool:
        return all((self._where(member.name) / STATUS).is_file() for member in self._members)

    def _log(self, learner: Learner, result: BatchResult, x_BD: Tensor, variance: float, rate: float) -> None:
        metrics = {
            "step": self._step,
            "tokens": self._step * self._config.batch_size,
            "loss": result.loss,
            "aux_loss": result.aux_loss,
            "fve": 1 - float(result.prefix_errors[-1]) / variance,
            "fve_prefixes": [1 - error / variance for error in result.prefix_errors.tolist()],
            "l0_core": result.l0_core,
            "l0_noncore": result.l0_noncore,
            **learner.as_used(x_BD[:_INFERENCE_TOKENS]),
            "dead_groups": learner.dead_groups(),
            "threshold": None if learner.threshold is None else learner.threshold * self._scale,
            "grad_norm": result.grad_norm,
            "lr": learner.optimiser.param_groups[0]["lr"],
        }
        self._last[learner.name] = metrics
        self._logs[learner.name].write(metrics, rate)

    def _note_endings(self, learners: list[Learner]) -> None:
        for learner in learners:
            if learner.state is not State.TRAINING:
                console.print(
                    f"[yellow]{learner.name} {learner.state} after step {learner.ended_at}[/]: {learner.cause}"
                )

    def _where(self, name: str) -> Path:
        return self._directory / name


def read_outcome(directory: Path) -> Outcome:
    """Return how the training of the SAE in a directory ended."""
    path = directory / STATUS
    try:
        status = json.loads(path.read_text(encoding="utf8"))
        state = State(status["state"])
        return Outcome(directory.name, directory, state, status["step"], status["cause"], status["metrics"])
    except FileNotFoundError:
        raise CheckpointError(f"{directory} holds no finished training: {path} is missing.") from None
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is not the status of a training run: {error}.") from error


def _judged(outcomes: list[Outcome]) -> list[Outcome]:
    """Return the outcomes, unless there is nothing to go on with."""
    first = outcomes[0]
    if all(outcome.state is State.DIVERGED for outcome in outcomes):
        raise TrainingError(
            f"Training diverged after step {first.step}: {first.cause}. The SAE as it was after that step is saved in "
            f"{first.directory}. Try a lower lr, a longer warm-up, or a smaller k, in a new directory."
        )
    return outcomes


def geometric_median(x_BD: Tensor, n_iterations: int = 50) -> Tensor:
    """Return the point with the least summed distance to the rows, by Weiszfeld's iteration."""
    median_D = x_BD.mean(0)
    for _ in range(n_iterations):
        weights_B = 1 / (x_BD - median_D).norm(dim=1).clamp_min(1e-8)
        median_D = (weights_B[:, None] * x_BD).sum(0) / weights_B.sum()
    return median_D


def _first_look(stream: ActivationStream, n_batches: int) -> tuple[float, Tensor]:
    """Return the scale √mean‖x‖² of the first batches, and the geometric median of the first on that scale."""
    first_BD = next(stream)
    total = 0.0
    for step in range(1, n_batches + 1):
        x_BD = first_BD if step == 1 else next(stream)
        total += float(x_BD.square().sum(1).mean(dtype=torch.float64))
        if not math.isfinite(total):
            raise _not_finite(step)
    if total == 0:
        raise TrainingError(f"The activations of the first {n_batches} batches are all zero. Check the store.")
    scale = math.sqrt(total / n_batches)
    return scale, geometric_median(first_BD / scale)


def _variance(x_BD: Tensor, step: int) -> float:
    """Return the batch's variance about its mean, summed over dimensions."""
    variance = float((x_BD - x_BD.mean(0)).square().sum(1).mean())
    if not math.isfinite(variance):
        raise _not_finite(step)
    if variance == 0:
        raise TrainingError(
            f"The {len(x_BD)} activations of step {step} are all the same: there is no variance to explain. Use a "
            "larger batch_size, or check the store."
        )
    return variance


def _not_finite(step: int) -> TrainingError:
    return TrainingError(
        f"The batch of step {step} holds activations that are not finite. Check the store; training goes on from "
        "before that step when the same command is run again."
    )


def _note(results: list[tuple[Learner, BatchResult]], variance: float) -> str:
    """Return the first learner's state in a few words."""
    learner, result = results[0]
    fve = 1 - float(result.prefix_errors[-1]) / variance
    name = f"{learner.name} " if len(results) > 1 else ""
    return f"{name}loss {result.loss:.3f} fve {fve:.3f} L0 {result.l0_core:.0f}+{result.l0_noncore:.0f}"


def _check(members: Sequence[Member], config: TrainConfig, stream: ActivationStream) -> None:
    names = [member.name for member in members]
    taken = ("config.json", CHECKPOINT)
    if not names or len(set(names)) != len(names) or any(not _is_plain(name) or name in taken for name in names):
        raise ConfigError(
            f"Each SAE needs a name of its own, for its directory: not empty, without '/', not beginning with a dot, "
            f"and not {' or '.join(taken)}; got {names}."
        )
    for member in members:
        if member.sae.d_model != stream.d_model:
            raise ConfigError(
                f"{member.name}: d_model = {member.sae.d_model}, but the activations have width {stream.d_model}."
            )
    require_sinks(config.log_to)
    if stream.batch_size != config.batch_size:
        raise ConfigError(f"batch_size = {config.batch_size}, but the stream gives {stream.batch_size} at a time.")


def _is_plain(name: str) -> bool:
    return bool(name) and Path(name).name == name and not name.startswith(".")
