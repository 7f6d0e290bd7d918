"""One cycle of training: a stream of activations through one or several SAEs, in the published recipe.

Several SAEs share every batch, so a sweep reads its data once. A run can be stopped at any moment and resumes from its
last checkpoint to the same numbers; logging and checkpointing change nothing.

Inputs are divided by √mean‖x‖² for training and the scale is folded back into biases and thresholds when an SAE is
saved: encoder rows live in raw space and transfer verbatim.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from dmsae.activations.arrays import Array
from dmsae.activations.sources import ActivationSource, as_source
from dmsae.activations.store import Store
from dmsae.activations.stream import ActivationStream, Cursor
from dmsae.activations.token_sample import TokenSample
from dmsae.config import Json, from_dict, to_dict
from dmsae.devices import training_device
from dmsae.disk import layout
from dmsae.disk.artifact import bound, write_sealed
from dmsae.disk.files import canonical_hash
from dmsae.disk.run import claimed, stop_signals
from dmsae.errors import CheckpointError, ConfigError, DmsaeError, LostRankError
from dmsae.progress import SILENT, Progress
from dmsae.sae.comms import ALONE, Comms, settled
from dmsae.sae.config import SAEConfig
from dmsae.sae.detectors import Detectors
from dmsae.sae.objective import BatchResult
from dmsae.sae.sae import SAE
from dmsae.sae.variance import fraction_explained
from dmsae.training.checkpoints import Checkpoints
from dmsae.training.config import TrainConfig
from dmsae.training.learner import Learner, SAESpec, sharded_names
from dmsae.training.memory import fitting_together
from dmsae.training.mesh import require_fits, require_same, shape_of
from dmsae.training.metrics import Mark, MetricsLog, StepMetrics
from dmsae.training.requirements import require_shared, require_trainable
from dmsae.training.result import TrainResult, TrainState, read_result, require_one_usable
from dmsae.training.scale import first_look, usable_variance

_USABLE = 0.9
"""Share of a GPU's free memory that SAEs may fill: allocators need room of their own."""
_INFERENCE_TOKENS = 256
"""Tokens of a logged batch on which the SAE is also measured with its inference thresholds."""


def train(
    sae: SAEConfig,
    data: ActivationSource | Store | Array,
    directory: Path | str,
    config: TrainConfig | None = None,
    core_rows: Tensor | None = None,
    detectors: Detectors | None = None,
    progress: Progress = SILENT,
) -> TrainResult:
    """Train one SAE in a directory, or resume it there, and return how it ended; `SAE.load(directory)` opens it.

    `data` is a store, an array or tensor of activations [n, D], or any other source. `core_rows` are the encoder rows
    to freeze, as many as `sae.core` says; a core of detectors needs their offsets and thresholds too.

    >>> config = dmsae.SAEConfig(d_model=16, width=64, k=4, prefixes=(16, 64))
    >>> recipe = dmsae.TrainConfig(tokens=25_600, batch_size=128, lr=3e-3)
    >>> dmsae.train(config, x, "runs/sae", recipe).state.value
    'finished'
    >>> sae = dmsae.SAE.load("runs/sae")
    """
    spec = SAESpec(layout.SAE, sae, core_rows, detectors)
    (result,) = train_together([spec], as_source(data), Path(directory), config, progress=progress)
    return result


def train_together(
    specs: Sequence[SAESpec],
    source: ActivationSource,
    directory: Path,
    config: TrainConfig | None = None,
    made_from: Json | None = None,
    progress: Progress = SILENT,
    comms: Comms = ALONE,
) -> list[TrainResult]:
    """Train several SAEs on one stream of activations, each in a folder of its name, and return how each ended.

    `made_from` is recorded in every SAE beside what the source says of itself. On a mesh all ranks call this together.
    """
    config = config or TrainConfig()
    require_fits(shape_of(comms), config.batch_size, {spec.name: spec.sae.width for spec in specs})
    share = comms.data.rank, comms.data.size
    stream = ActivationStream(source, config.batch_size, config.seed, training_device(config.device), share)
    try:
        return Trainer(specs, config, stream, directory, source.facts | (made_from or {}), progress, comms).run()
    finally:
        stream.close()


class Trainer:
    """A run: the learners, the stream they share, and the directory in which it can be resumed.

    On a mesh every rank has one, and all of them do the same; only the first writes and reports. What one rank alone
    may fail at (reading, writing) is `settled` between all, so that none is left waiting.
    """

    def __init__(
        self,
        specs: Sequence[SAESpec],
        config: TrainConfig,
        stream: ActivationStream,
        directory: Path,
        made_from: Json,
        progress: Progress = SILENT,
        comms: Comms = ALONE,
    ) -> None:
        require_trainable(specs, config, stream)
        self._all, self._config, self._stream, self._directory = specs, config, stream, directory
        self._specs: Sequence[SAESpec] = ()
        self._progress, self._comms = progress if comms.is_first else SILENT, comms
        self._checkpoints = Checkpoints(directory, sharded_names(specs), comms)
        self._schedule = config.schedule()
        self._settings: Json = {
            "kind": "train",
            "made_from": made_from,
            "train": config.result_settings(),
            "schedule": self._schedule._asdict(),
            "saes": {spec.name: spec.settings() for spec in specs},
        }
        self._step, self._scale = 0, 1.0
        self._learners: list[Learner] = []
        self._logs: dict[str, MetricsLog] = {}
        self._last: dict[str, StepMetrics] = {}

    def run(self) -> list[TrainResult]:
        """Train to the end, from the beginning or from the last checkpoint, and return how each SAE ended."""
        first, everyone = self._comms.is_first, self._comms.both
        require_same(self._settings, everyone)
        with ExitStack() as held:
            with settled(everyone):
                if first:
                    held.enter_context(claimed(self._directory, self._settings))
            while names := self._next_pass():
                self._specs = [spec for spec in self._all if spec.name in names]
                self._pass()
            with settled(everyone):
                if first:
                    self._checkpoints.remove()
                results = [read_result(self._where(spec.name)) for spec in self._all] if first else []
            return require_one_usable(everyone.of_first(results))

    def _next_pass(self) -> list[str]:
        """Return the SAEs to train together next: those of the checkpoint, else as many as fit; none at the end."""
        names: list[str] = []
        with settled(self._comms.both):
            if self._comms.is_first:
                left = [spec for spec in self._all if not (self._where(spec.name) / layout.STATUS).is_file()]
                names = [spec.name for spec in left if spec.name in self._begun()]
                if left and not names:
                    self._checkpoints.remove()  # of a pass that was finished
                    names = [spec.name for spec in left[: self._at_once(left)]]
                if len(names) < len(left):
                    self._progress.note(f"{len(names)} of the {len(left)} SAEs that are left train first.")
        return self._comms.both.of_first(names)

    def _begun(self) -> list[str]:
        """Return the SAEs that the checkpoint holds; none when there is no checkpoint."""
        state = self._checkpoints.state()
        if state is None:
            return []
        self._require_ours(state)
        try:
            return list(state["learners"])
        except (KeyError, TypeError) as error:
            raise self._unusable(error) from error

    def _at_once(self, specs: Sequence[SAESpec]) -> int:
        """Return how many SAEs may train together."""
        device = self._stream.device
        if self._config.saes_at_once is not None or device.type != "cuda":
            return self._config.saes_at_once or len(specs)
        available = round(_USABLE * torch.cuda.mem_get_info(device)[0])
        saes = [spec.sae for spec in specs]
        return fitting_together(saes, self._config.batch_size, shape_of(self._comms), available)

    def _pass(self) -> None:
        """Train some of the SAEs to the end, from the beginning or from the last checkpoint."""
        self._step, self._last, self._logs = 0, {}, {}
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
                due = self._step % self._config.log_every == 0 or self._step == steps
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
            with settled(self._comms.both):
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
        with settled(self._comms.both):
            require_shared(self._directory)
            resumed = self._checkpoints.load()
            if resumed is not None:
                self._resume(*resumed)
        if resumed is None:
            self._scale, b_dec = first_look(self._stream, self._config.norm_batches, self._comms)
            self._stream.seek(Cursor())
            self._make_learners(b_dec)
            with settled(self._comms.both):
                self._open_logs(None)

    def _resume(self, tensors: dict[str, Tensor], state: Json) -> None:
        try:
            self._step, self._scale, cursor = state["step"], state["scale"], Cursor(**state["cursor"])
            self._last = {name: from_dict(StepMetrics, last) for name, last in state["last"].items()}
            self._make_learners(torch.zeros(self._stream.d_model, device=self._stream.device))
            for learner in self._learners:
                learner.restore(tensors, state["learners"][learner.name])
            self._progress.note(f"Resuming at step {self._step:,} of {self._schedule.steps:,}.")
            self._open_logs(state)
            self._stream.seek(cursor)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, ConfigError) as error:
            raise self._unusable(error) from error

    def _require_ours(self, state: Json) -> None:
        if state.get("settings") != canonical_hash(self._settings):
            path = self._checkpoints.newest()
            raise CheckpointError(f"{path} belongs to another run. Restore the one of this run, or remove it.")

    def _unusable(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self._checkpoints.newest()} is not a checkpoint that this run can resume from: {error!r}. Restore it; "
            "or remove it, and the same command starts again from the beginning."
        )

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
        tokens = self._token_sample() if self._comms.is_first else None
        for spec, learner in zip(self._specs, self._learners, strict=True):
            learner.finish()
            sae = learner.folded(self._scale)
            with settled(self._comms.both):
                if self._comms.is_first:
                    sae.keep_sample_(tokens)
                    self._write(learner, sae, self._settings["made_from"] | {"core": spec.core_sha256()})

    def _write(self, learner: Learner, sae: SAE, made_from: Json) -> None:
        here = self._where(learner.name)
        settings = bound(here, self._directory / layout.SETTINGS)
        sae.save(here, made_from, settings, self._training_facts(learner))
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
            lr=learner.optimiser.param_groups[0]["lr"],
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
