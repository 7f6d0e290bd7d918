"""Where experiments work: one store, one directory of runs, and every run named by what it is.

Two experiments that ask for the same distillation, transfer or training share it, and an interrupted one is resumed.
Of several processes that want the same run at the same time, one makes it and the others wait.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dmsae.activations.sources import StoreSource
from dmsae.activations.store import Store
from dmsae.config import Json, to_dict
from dmsae.cores.attribution import Attribution, attribute
from dmsae.cores.core import Core, Provenance
from dmsae.cores.selection import next_core
from dmsae.devices import training_device
from dmsae.disk import layout
from dmsae.disk.files import canonical_hash, exclusive_lock
from dmsae.distillation.config import Cycle0, DistillConfig
from dmsae.distillation.distill import Distillation, distill
from dmsae.distillation.outcome import CycleFailed, CycleReport
from dmsae.distillation.prices import Held
from dmsae.distillation.transfer import TransferConfig, keep_fidelity, transfer
from dmsae.errors import AttributionError, TrainingError
from dmsae.evaluation.evaluate import EvaluateConfig, digest_of, evaluate
from dmsae.evaluation.fidelity import Half
from dmsae.evaluation.nulls import NullKind
from dmsae.evaluation.price import attribution_share
from dmsae.experiments.rows import rows_of
from dmsae.progress import SILENT, Progress
from dmsae.sae.sae import SAE
from dmsae.seeds import derive_seed
from dmsae.training.config import TrainConfig
from dmsae.training.learner import SAESpec
from dmsae.training.metrics import read_metrics
from dmsae.training.result import TrainResult, TrainState
from dmsae.training.trainer import train_together

_LINES = 48
"""Lines of metrics that each training leaves, about: enough for a curve."""


class Start(NamedTuple):
    """The SAE of cycle 0 and its scores, which cores are selected from."""

    directory: Path
    sae: SAE
    attribution: Attribution


class Followed(NamedTuple):
    """A distillation cycle by cycle, as far as it came."""

    directory: Path | None
    """None when cycle 0 failed."""
    cores: list[Core]
    reports: list[CycleReport]
    distilled: Core | None
    """None when a cycle failed."""
    failure: str
    """Why a cycle failed; empty when none did."""


class Lab:
    """A store, the settings that an experiment departs from, and the runs made so far."""

    def __init__(self, store: Store, base: DistillConfig, directory: Path, progress: Progress = SILENT) -> None:
        self.store, self._directory, self._progress = store, directory / "runs", progress
        self.results = directory / layout.RESULTS
        often = max(1, base.train.schedule().steps // _LINES)
        self.base = replace(base, train=replace(base.train, log_every=often))

    def train(self, specs: Sequence[SAESpec], train: TrainConfig) -> list[TrainResult]:
        """Train SAEs together, and measure them on held-out activations."""
        what = {"saes": {spec.name: spec.settings() for spec in specs}, "train": train.result_settings()}
        here = self._place("train", what)
        with self._held(here):
            results = train_together(specs, StoreSource(self.store), here, train, progress=self._progress)
            keep_fidelity(here, results, self.store, train.device, self._progress)
        return results

    def start(self, config: DistillConfig) -> Start:
        """Return the SAE that a distillation would have in cycle 0, with its scores.

        It is trained here also where a recipe names a published one: seeds have to be independent.
        """
        train = replace(config.train, seed=derive_seed(config.seed, "cycle", 0))
        (result,) = self.train([SAESpec(layout.SAE, config.sae(self.store.d_model, 0))], train)
        if result.state is not TrainState.FINISHED:
            raise CycleFailed(0, f"{result.state} at step {result.step} ({result.cause})", "Try a smaller k or lr.")
        here = result.directory.parent
        scores = here / f"{layout.ATTRIBUTION}-{canonical_hash(to_dict(config.attribution))[:16]}"
        with self._held(here):
            if not layout.has_artifact(scores, layout.ATTRIBUTION):
                sae = SAE.load(result.directory).to(training_device(train.device))
                attribute(sae, self.store, config.attribution).save(scores)
        return Start(here, SAE.load(result.directory), Attribution.load(scores))

    def first_core(self, config: DistillConfig) -> Core:
        """Return the core that is selected after cycle 0."""
        start, provenance = self.start(config), Provenance.of(self.store, config.result_settings())
        return next_core(None, start.sae, start.attribution, 0, config.coverage, provenance, config.max_rate)

    def held(self, core: Core, config: DistillConfig) -> Held:
        """Return the share of the attribution of cycle 0 that a core selected from it holds."""
        return Held(core, attribution_share(core, self.start(config).attribution))

    def distill(self, config: DistillConfig) -> Distillation:
        """Run a distillation, from the SAE of cycle 0 that all with the same settings share."""
        config, here = self._distillation(config)
        with self._held(here):
            return distill(config, self.store, here, progress=self._progress)

    def follow(self, config: DistillConfig) -> "Followed":
        """Run a distillation and return its cycles; if one fails, those before it and why."""
        try:
            config, here = self._distillation(config)
        except (TrainingError, AttributionError) as error:
            return Followed(None, [], [], None, str(error))
        reports: list[CycleReport] = []
        failure, distilled = "", None
        with self._held(here):
            try:
                distilled = distill(config, self.store, here, reports.append, progress=self._progress).distilled
            except TrainingError as error:
                failure = str(error)
            cores = [Core.load(layout.cycle_directory(here, report.cycle)) for report in reports]
        return Followed(here, cores, reports, distilled, failure)

    def _distillation(self, config: DistillConfig) -> tuple[DistillConfig, Path]:
        """Return a distillation from the shared SAE of cycle 0, and where its run is."""
        start = self.start(config).directory
        config = replace(config, cycle0=Cycle0(source=str(start / layout.SAE)))
        settings = {name: value for name, value in config.result_settings().items() if name != "cycle0"}
        return config, self._place("distill", {"distill": settings, "cycles": config.cycles, "start": start.name})

    def transfer(
        self, config: TransferConfig, core: Core, beside: Mapping[str, Core] | None = None
    ) -> list[TrainResult]:
        """Train SAEs from a core, and from others beside it."""
        cores = {name: one.digest() for name, one in {"": core, **(beside or {})}.items()}
        settings = to_dict(config) | {"train": config.train.result_settings()}
        here = self._place("transfer", {"transfer": settings, "cores": cores})
        with self._held(here):
            return transfer(config, core, self.store, here, beside=beside, progress=self._progress)

    def transfer_config(self, config: DistillConfig, purpose: str, **settings: Any) -> TransferConfig:
        """Return a transfer of the same shape and training as a distillation, with a seed for its purpose."""
        train = replace(config.train, seed=derive_seed(config.seed, purpose))
        like = TransferConfig((config.k,), config.width, config.nesting, center_input=config.center_input, train=train)
        return replace(like, **settings)

    def rows(
        self,
        results: Sequence[TrainResult],
        config: DistillConfig,
        known: Sequence[Held] = (),
        losses: bool | None = None,
        half: Half | None = None,
    ) -> list[Json]:
        """Return the figures of trained SAEs; next-token losses as asked, by default where a core has a price."""
        measured_by = (config.attribution, config.coverage, known, config.train.device, self._progress, losses, half)
        with self._held(*(result.directory.parent for result in results)):
            rows = rows_of(results, self.store, *measured_by)
        return [row._asdict() for row in rows]

    def scores(
        self, results: Sequence[TrainResult], measures: tuple[str, ...], nulls: tuple[NullKind, ...]
    ) -> list[Json]:
        """Evaluate SAEs that finished their training, each beside nulls."""
        saes = {one.name: SAE.load(one.directory) for one in results if one.state is TrainState.FINISHED}
        config = EvaluateConfig(measures, nulls=nulls, share_nulls=0.0)
        here = self._place("evaluation", {"saes": {name: digest_of(sae) for name, sae in saes.items()}})
        with self._held(here):
            evaluation = evaluate(saes, self.store, here, config, progress=self._progress)
        return [row._asdict() for row in evaluation.rows()]

    @contextmanager
    def _held(self, *places: Path) -> Iterator[None]:
        """Keep other processes from working on some runs, after waiting for those that do."""
        with ExitStack() as held:
            for place in sorted(set(places)):  # all in one order: no two processes can wait for each other
                lock = place.with_suffix(".lock")
                held.enter_context(exclusive_lock(lock, f"The run {place.name}", self._progress))
            yield

    def _place(self, kind: str, what: Json) -> Path:
        return self._directory / f"{kind}-{canonical_hash({'store': self.store.key, **what})[:16]}"


def curves(result: TrainResult) -> Json:
    """Return how an SAE did through training: steps, loss, variance explained, activity of the core and the others."""
    names = ("step", "loss", "fve", "l0_core", "l0_noncore")
    metrics = read_metrics(result.directory)
    return {name: [round(float(getattr(one, name)), 6) for one in metrics] for name in names}
