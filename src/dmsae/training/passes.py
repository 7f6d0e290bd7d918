"""One pass over a stream of activations: the learners that share it, its checkpoints, what it logs and saves."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from dmsae.activations.stream import ActivationStream, Cursor
from dmsae.activations.token_sample import TokenSample
from dmsae.config import Json, from_dict, to_dict
from dmsae.disk import layout
from dmsae.disk.artifact import bound, write_sealed
from dmsae.disk.files import canonical_hash
from dmsae.disk.run import stop_signals
from dmsae.disk.tensor_stream import TensorStream
from dmsae.errors import ConfigError, DmsaeError, LostRankError
from dmsae.progress import Progress
from dmsae.ranks import settled
from dmsae.sae.comms import Comms
from dmsae.sae.objective import BatchResult
from dmsae.sae.sae import write_sae
from dmsae.sae.sample import Sample
from dmsae.sae.shard import gathered
from dmsae.sae.variance import fraction_explained
from dmsae.training.checkpoints import Checkpoints
from dmsae.training.config import TrainConfig
from dmsae.training.learner import Learner, SAESpec
from dmsae.training.metrics import Mark, MetricsLog, StepMetrics
from dmsae.training.requirements import require_shared
from dmsae.training.result import TrainState
from dmsae.training.scale import first_look, usable_variance

_INFERENCE_TOKENS = 256
"""Tokens of a logged batch on which the SAE is also measured with its inference thresholds."""


class Pass:
    """Some SAEs of a run that train together, from the beginning or from the last checkpoint to the end.

    `settings` are those of the whole run. On a mesh every rank has a pass, and all of them do the same; only the first
    writes and reports. What one rank alone may fail at (reading, writing) is `settled` between all, so that none is
    left waiting.
    """

    def __init__(
        self,
        specs: Sequence[SAESpec],
        settings: Json,
        config: TrainConfig,
        stream: ActivationStream,
        directory: Path,
        checkpoints: Checkpoints,
        progress: Progress,
        comms: Comms,
    ) -> None:
        self._specs, self._settings, self._config, self._stream = specs, settings, config, stream
        self._directory, self._checkpoints, self._progress, self._comms = directory, checkpoints, progress, comms
        self._schedule = config.schedule()
        self._step, self._scale = 0, 1.0
        self._learners: list[Learner] = []
        self._logs: dict[str, MetricsLog] = {}
        self._last: dict[str, StepMetrics] = {}

    def run(self) -> None:
        """Train, and save every SAE with how its training ended."""
        self._stream.seek(Cursor())
        try:
            self._begin()
            self._loop()
        finally:
            for log in self._logs.values():
                log.close()
        self._finish()

    def _loop(self) -> None:
        steps, batch = self._schedule.steps, self._config.batch_size
        saved_at = logged_at = time.monotonic()
        logged_step = self._step
        with self._progress.bar("train", steps, "steps") as bar, stop_signals() as stop:
            bar.skip(self._step)
            while self._step < steps and (active := self._in_training()):
                x_BD, batch_variance = self._next_batch()
                results = [(learner, learner.advance(self._step, x_BD, batch_variance)) for learner in active]
                self._step += 1
                now = time.monotonic()
                due = self._step in (1, steps) or self._step % self._config.log_every == 0
                rate = (self._step - logged_step) * batch / max(now - logged_at, 1e-9)
                for learner, result in results:
                    if learner.state is TrainState.COLLAPSED or (due and learner.state is TrainState.TRAINING):
                        self._log(learner, result, x_BD, batch_variance, rate)
                if due:
                    logged_at, logged_step = now, self._step
                bar.advance(1, _note(results, batch_variance))
                self._note_endings(active)
                is_due = now - saved_at >= self._config.checkpoint_seconds
                must_stop, must_save = self._comms.both.max_(torch.tensor([bool(stop), is_due]).int()).tolist()
                if must_stop or must_save:
                    self._save()
                    saved_at = time.monotonic()
                if must_stop:
                    raise KeyboardInterrupt

    def _in_training(self) -> list[Learner]:
        return [learner for learner in self._learners if learner.state is TrainState.TRAINING]

    def _next_batch(self) -> tuple[Tensor, float]:
        """Return a batch on the training scale and its variance; if it cannot be used, save all that came before."""
        cursor = self._stream.cursor
        try:
            x_BD = next(self._stream).div_(self._scale)
            return x_BD, usable_variance(x_BD, self._step + 1, self._comms.data)
        except LostRankError:
            raise
        except DmsaeError:
            self._stream.seek(cursor)
            self._save()
            raise

    def _begin(self) -> None:
        """Set up the learners, fresh or as they were at the last checkpoint."""
        newest: Path | None = None
        with settled(self._comms.both):
            require_shared(self._directory)
            newest = self._checkpoints.newest() if self._comms.is_first else None
        newest = self._comms.both.of_first(newest)  # a rank may see an older one: a file system can lag behind
        if newest is not None:
            self._resume(newest)
            return
        self._scale, b_dec = first_look(self._stream, self._config.norm_batches, self._comms)
        self._stream.seek(Cursor())
        self._make_learners(b_dec)
        with settled(self._comms.both):
            self._open_logs(None)

    def _resume(self, checkpoint: Path) -> None:
        with self._reading():
            tensors, state = self._checkpoints.load(checkpoint)
            self._step, self._scale, cursor = state["step"], state["scale"], Cursor(**state["cursor"])
            self._last = {name: from_dict(StepMetrics, last) for name, last in state["last"].items()}
        self._make_learners(torch.zeros(self._stream.d_model, device=self._stream.device))
        with self._reading():
            for learner in self._learners:
                learner.restore(tensors, state["learners"][learner.name])
            self._progress.note(f"Resuming at step {self._step:,} of {self._schedule.steps:,}.")
            self._open_logs(state)
            self._stream.seek(cursor)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Let a checkpoint that one rank cannot use end the block on all of them; ranks must not talk inside it."""
        with settled(self._comms.both):
            try:
                yield
            except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, ConfigError) as error:
                raise self._checkpoints.unusable(error) from error

    def _make_learners(self, b_dec: Tensor) -> None:
        self._learners = [
            Learner(spec, self._config, self._schedule, b_dec, self._scale, self._comms) for spec in self._specs
        ]

    def _open_logs(self, state: Json | None) -> None:
        for spec in self._specs if self._comms.is_first else ():
            mark = _mark(state, spec.name) if state else None
            log = MetricsLog(self._where(spec.name), spec.name, self._config.log_to, self._settings, self._step, mark)
            self._logs[spec.name] = log
            if log.lost:
                self._progress.warn(
                    f"{log.lost} is not what it was at the checkpoint: it starts again, and lacks the steps up to "
                    f"{self._step:,}. Training is not affected."
                )

    def _save(self) -> None:
        tensors = {name: tensor for learner in self._learners for name, tensor in learner.tensors().items()}
        state = {
            "settings": canonical_hash(self._settings),
            "step": self._step,
            "scale": self._scale,
            "cursor": to_dict(self._stream.cursor),
            "learners": {learner.name: learner.facts() for learner in self._learners},
            "metrics_marks": {name: log.mark() for name, log in self._logs.items()},
            "last": {name: asdict(last) for name, last in self._last.items()},
        }
        self._checkpoints.save(self._step, tensors, state)

    def _finish(self) -> None:
        """Save every SAE in raw space, then how its training ended."""
        (data, latents, both), first = self._comms, self._comms.is_first
        tokens = both.of_first(self._token_sample() if first else None)
        for spec, learner in zip(self._specs, self._learners, strict=True):
            learner.finish()
            part, stream = learner.folded(self._scale), None
            if data.rank == 0:  # these ranks have the whole SAE together
                part.keep_sample_(tokens, latents)
                stream = gathered(part, learner.whole, latents)
            with settled(both):
                try:
                    if first and stream:
                        made_from = self._settings["made_from"] | {"core": spec.core_sha256()}
                        self._write(learner, stream, part.sample, made_from)
                finally:
                    if stream:
                        stream.drain()  # also if it could not be written: the ranks gather it together

    def _write(self, learner: Learner, stream: TensorStream, sample: Sample | None, made_from: Json) -> None:
        here = self._where(learner.name)
        settings = bound(here, self._directory / layout.SETTINGS)
        write_sae(here, learner.whole, stream, sample, made_from, settings, self._training_facts(learner))
        last = self._last.get(learner.name)
        status = {"state": learner.state, "step": learner.ended_at, "cause": learner.cause}
        status |= {"scale": self._scale, "metrics": asdict(last) if last else None}
        status |= {"metrics_sha256": self._logs[learner.name].mark().sha256}
        write_sealed(here / layout.STATUS, status, settings | bound(here, here / f"{layout.SAE}.json"))

    def _token_sample(self) -> TokenSample | None:
        """Return a sample of the text; one that cannot be read is missed, and does not cost what was trained."""
        try:
            return self._stream.token_sample()
        except DmsaeError as error:
            self._progress.warn(f"The SAE is saved without a token sample: {error}")
            return None

    def _training_facts(self, learner: Learner) -> Json:
        """Return how an SAE was trained, for those who have only the SAE."""
        last = self._last.get(learner.name)
        facts: Json = {name: self._settings[name] for name in ("train", "schedule")}
        facts |= {"state": learner.state, "step": learner.ended_at, "scale": self._scale}
        return facts | {"metrics": asdict(last) if last else None}

    def _log(self, learner: Learner, result: BatchResult, x_BD: Tensor, batch_variance: float, rate: float) -> None:
        first = self._comms.data.rank * len(x_BD)
        measured_BD = x_BD[: max(0, _INFERENCE_TOKENS - first)]
        at_inference = learner.inference_metrics(measured_BD, min(_INFERENCE_TOKENS, self._config.batch_size))
        fve_prefixes = [fraction_explained(error, batch_variance) for error in result.prefix_errors.tolist()]
        metrics = StepMetrics(
            step=self._step,
            tokens=self._step * self._config.batch_size,
            loss=result.loss,
            aux_loss=result.aux_loss,
            fve=fve_prefixes[-1],
            fve_prefixes=fve_prefixes,
            l0_core=result.l0_core,
            l0_noncore=result.l0_noncore,
            l0_core_inference=at_inference.l0_core,
            l0_noncore_inference=at_inference.l0_noncore,
            fve_inference=at_inference.fve,
            dead_groups=learner.dead_groups(),
            threshold=None if learner.threshold is None else learner.threshold * self._scale,
            grad_norm=result.grad_norm,
            lr=learner.optimiser.lr,
        )
        self._last[learner.name] = metrics
        with settled(self._comms.both):
            if self._comms.is_first:
                self._logs[learner.name].write(metrics, rate)

    def _note_endings(self, learners: list[Learner]) -> None:
        for learner in learners:
            if learner.state is not TrainState.TRAINING:
                self._progress.warn(f"{learner.name} {learner.state} after step {learner.ended_at}: {learner.cause}.")

    def _where(self, name: str) -> Path:
        return self._directory / name


def _mark(state: Json, name: str) -> Mark:
    """Return what a checkpoint remembers of an SAE's metrics; an earlier version remembered only their size."""
    if "metrics_bytes" in state:
        return Mark(state["metrics_bytes"][name], None)
    return Mark(*state["metrics_marks"][name])


def _note(results: list[tuple[Learner, BatchResult]], batch_variance: float) -> str:
    """Return the first learner's state in a few words."""
    learner, result = results[0]
    fve = fraction_explained(float(result.prefix_errors[-1]), batch_variance)
    name = f"{learner.name} " if len(results) > 1 else ""
    return f"{name}loss {result.loss:.3f} fve {fve:.3f} L0 {result.l0_core:.0f}+{result.l0_noncore:.0f}"
