"""Algorithm 1: train, score, select, restart with only the selected encoder rows; then intersect the last two cores.

A run directory holds one folder per cycle (`cycle-0`, `cycle-1`, …: the SAE, its attribution, the core selected from
it) and, at the end, `distilled` (the core C*) and `summary.json`. When a run resumes, every finished stage is skipped
and a cycle in training continues from its checkpoint.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from dmsae.activations.identity import ModelIdentity
from dmsae.activations.sources import ActivationSource, StoreSource
from dmsae.activations.store import Store
from dmsae.config import Json, require, require_whole, to_dict
from dmsae.cores.attribution import Attribution, AttributionConfig, attribute
from dmsae.cores.compare import CarryOver, carry_over
from dmsae.cores.core import Core, Provenance
from dmsae.cores.selection import distilled_core, next_core, require_coverage
from dmsae.devices import training_device
from dmsae.disk import layout
from dmsae.disk.files import write_json
from dmsae.disk.run import claimed, differences
from dmsae.errors import ConfigError, TrainingError
from dmsae.evaluation.fidelity import fidelity
from dmsae.formats import Imported, load_any, locate
from dmsae.progress import SILENT, Progress
from dmsae.sae.config import DenseCore, SAEConfig, core_first, matryoshka_nesting
from dmsae.sae.sae import SAE
from dmsae.seeds import derive_seed
from dmsae.training.config import TrainConfig
from dmsae.training.learner import SAESpec
from dmsae.training.metrics import read_metrics
from dmsae.training.result import TrainState
from dmsae.training.trainer import train_together


@dataclass(frozen=True, slots=True)
class DistillConfig:
    """One distillation.

    >>> dmsae.DistillConfig(width=4096, k=40).sae(d_model=576, n_core=50).prefixes
    (178, 434, 946, 1970, 4096)
    """

    width: int = 4096
    """Dictionary width K, the same in every cycle."""
    k: int = 40
    """Target sparsity. Beside a core, which fires freely, so many of the other latents are active per token."""
    nesting: tuple[int, ...] = ()
    """Cumulative prefix sizes without a core, ending in `width`. Empty: groups of 1/32, 1/16, 1/8, 1/4 and the rest."""
    cycles: int = 4
    """Train-and-select cycles T after cycle 0."""
    coverage: float = 0.9
    """Share τ of the attribution that a core has to hold."""
    cycle0: str = ""
    """Directory of a Matryoshka SAE to start from (dictionary_learning / SAEBench, SAELens, or one of ours). Empty:
    train cycle 0 from nothing."""
    center_input: bool = True
    """Whether the encoder sees x − b_dec, as the published checkpoints do."""
    attribution: AttributionConfig = field(default_factory=AttributionConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    """How each cycle trains; its seed is derived from this run's `seed` and the cycle."""
    seed: int = 0
    """Determines every cycle's initial weights and order of activations."""

    def __post_init__(self) -> None:
        require_whole("cycles", self.cycles, 1)
        require_coverage(self.coverage)
        remedy = "Set seed instead: each cycle's follows from it."
        require(self.train.seed == 0, "train.seed", self.train.seed, "be left out", remedy)

    def sae(self, d_model: int, n_core: int) -> SAEConfig:
        """Return what the SAE of a cycle is: the core first, then the same non-core groups in every cycle."""
        prefixes = core_first(self.nesting or matryoshka_nesting(self.width), n_core)
        core = DenseCore(n_core, k_noncore=self.k) if n_core else None
        return SAEConfig(d_model, self.width, self.k, prefixes, core, self.center_input)

    def result_settings(self) -> Json:
        """Return the settings that determine the result; how often to log and to save are not among them."""
        train = {name: value for name, value in self.train.result_settings().items() if name != "seed"}
        return {**to_dict(self), "train": train}


class CycleReport(NamedTuple):
    """What happened in one cycle."""

    cycle: int
    core: CarryOver
    births: dict[int, int]
    """How many latents of the selected core each cycle contributed."""
    n_frozen: int
    """Size of the core that the cycle was trained with."""
    l0_core: float
    """Latents of that core that fire on the average token of the attribution pairs."""
    heldout_fve: float | None
    """Variance explained of held-out activations, with inference thresholds; None when the store holds none."""
    train_loss: float | None
    """Objective of the last training batch; None for an SAE that was not trained here."""


class Distillation(NamedTuple):
    """The result of a distillation."""

    cores: list[Core]
    distilled: Core
    reports: list[CycleReport]
    last_sae: SAE
    """The SAE of the last cycle, which the last core was selected from."""


def distill(
    config: DistillConfig,
    store: Store,
    directory: Path | str,
    on_cycle: Callable[[CycleReport], None] = lambda report: None,
    *,
    source: ActivationSource | None = None,
    progress: Progress = SILENT,
) -> Distillation:
    """Run a distillation in a directory, or what is left of it, and return its cores.

    `on_cycle` is called with the report of each cycle as it ends. Cycles train on the store's activations, or on those
    of `source` when the training split was too large to keep; attribution and held-out figures always use the store.

    >>> recipe = dmsae.TrainConfig(tokens=25_600, batch_size=128, lr=3e-3)
    >>> config = dmsae.DistillConfig(width=64, k=4, nesting=(16, 64), cycles=2, train=recipe)
    >>> done = dmsae.distill(config, store, "runs/distill")
    >>> len(done.distilled) <= len(done.cores[-1])
    True
    """
    source, directory = source or StoreSource(store), Path(directory)
    config.sae(store.d_model, 0)
    with claimed(directory, run_settings(config, store.key, store.model, source)):
        cores: list[Core] = []
        reports: list[CycleReport] = []
        for cycle in range(config.cycles + 1):
            here = layout.cycle_directory(directory, cycle)
            previous = cores[-1] if cores else None
            sae = _train(config, store, source, here, cycle, previous, progress)
            attribution = _score(config, store, here, sae)
            cores.append(_select(config, store, here, sae, attribution, previous))
            reports.append(_report(here, cores, sae, attribution, _fidelity(here, sae, store)))
            on_cycle(reports[-1])
        distilled = distilled_core(cores[-1], cores[-2])
        distilled.save(directory / layout.DISTILLED)
        summary = {"n_distilled": len(distilled), "births": distilled.births(), "cycles": [_plain(r) for r in reports]}
        write_json(directory / layout.SUMMARY, summary)
        return Distillation(cores, distilled, reports, sae)


def run_settings(config: DistillConfig, store: str, model: ModelIdentity, source: ActivationSource | None) -> Json:
    """Return what determines the result of a distillation; a directory made with anything else is refused.

    Without a `source` the cycles train on the store itself, which need not exist yet.
    """
    train_on = source.facts if source else {"store": store, "model": to_dict(model)}
    settings = config.result_settings()
    return {"kind": "distill", "store": store, "model": to_dict(model), "train_on": train_on, "distill": settings}


def _train(
    config: DistillConfig,
    store: Store,
    source: ActivationSource,
    here: Path,
    cycle: int,
    core: Core | None,
    progress: Progress,
) -> SAE:
    """Return the SAE of a cycle: imported, already there, or trained now from the core's rows alone."""
    if cycle == 0 and config.cycle0:
        return _import(config, store, here / layout.SAE, progress)
    spec = SAESpec(layout.SAE, _fitting(config, store, core), core.encoder_CD if core else None)
    train = replace(config.train, seed=derive_seed(config.seed, "cycle", cycle))
    (result,) = train_together([spec], source, here, train, {"cycle": cycle}, progress)
    if result.state is not TrainState.FINISHED:
        raise TrainingError(
            f"Cycle {cycle} {result.state} at step {result.step} ({result.cause}), so no core can be selected from "
            f"it. The cores of earlier cycles are in {here.parent}. Try a smaller k or a lower lr, in a new directory."
        )
    return SAE.load(result.directory)


def _fitting(config: DistillConfig, store: Store, core: Core | None) -> SAEConfig:
    """Return what the SAE of a cycle is; a core that leaves no room for the last group is an error that says so."""
    try:
        return config.sae(store.d_model, len(core) if core else 0)
    except ConfigError as error:
        raise ConfigError(
            f"{error} The core grew to {len(core or ())} latents: lower coverage (now {config.coverage}), or widen "
            "the last prefix, in a new directory."
        ) from error


def _import(config: DistillConfig, store: Store, here: Path, progress: Progress) -> SAE:
    """Return the published SAE used as cycle 0, copied into the run so that the run is complete."""
    expected = config.sae(store.d_model, 0)
    if not layout.has_artifact(here, layout.SAE):
        imported = load_any(locate(config.cycle0), expected.k, expected.prefixes)
        for note in imported.notes:
            progress.note(f"cycle 0: {note}")
        _require_same_model(config, imported, store, progress)
        if imported.sae.config != expected:
            wrong = differences(to_dict(imported.sae.config), to_dict(expected))
            raise ConfigError(f"cycle0 = {config.cycle0} does not fit this run ({'; '.join(wrong)}).")
        origin = {"source": config.cycle0, "kind": imported.kind, "sha256": imported.sha256}
        imported.sae.save(here, {"imported_from": origin, "model": to_dict(imported.model), "cycle": 0})
    return SAE.load(here)


def _require_same_model(config: DistillConfig, imported: Imported, store: Store, progress: Progress) -> None:
    if imported.model is None:
        progress.note(f"cycle 0: cannot check that it was trained on {store.model.name} at {store.model.hook}.")
    else:
        imported.model.require_same(store.model, f"cycle0 = {config.cycle0}", f"the store {store.key}")


def _score(config: DistillConfig, store: Store, here: Path, sae: SAE) -> Attribution:
    if layout.has_artifact(here, layout.ATTRIBUTION):
        return Attribution.load(here)
    device = training_device(config.train.device)
    attribution = attribute(sae.to(device), store, config.attribution)
    attribution.save(here)
    return attribution


def _select(
    config: DistillConfig, store: Store, here: Path, sae: SAE, attribution: Attribution, previous: Core | None
) -> Core:
    if layout.has_artifact(here, layout.CORE):
        return Core.load(here)
    cycle = previous.cycle + 1 if previous else 0
    provenance = Provenance.of(store, config.result_settings())
    core = next_core(previous, sae, attribution, cycle, config.coverage, provenance)
    core.save(here)
    return core


def _fidelity(here: Path, sae: SAE, store: Store) -> dict[str, float]:
    """Return a cycle's held-out figures, measured once."""
    path = here / layout.FIDELITY
    if not path.is_file():
        figures = fidelity(sae, store)
        write_json(path, figures._asdict() if figures else {})
    stored: dict[str, float] = json.loads(path.read_text(encoding="utf8"))
    return stored


def _report(
    here: Path, cores: list[Core], sae: SAE, attribution: Attribution, heldout: dict[str, float]
) -> CycleReport:
    metrics = read_metrics(here / layout.SAE)
    n_frozen = sae.config.n_core
    return CycleReport(
        cycle=cores[-1].cycle,
        core=carry_over(cores[-1], cores[-2] if len(cores) > 1 else None),
        births=cores[-1].births(),
        n_frozen=n_frozen,
        l0_core=float(attribution.firing_rates_P[:n_frozen].sum()),
        heldout_fve=heldout.get("fve"),
        train_loss=metrics[-1].loss if metrics else None,
    )


def _plain(report: CycleReport) -> Json:
    return {**report._asdict(), "core": report.core._asdict()}
