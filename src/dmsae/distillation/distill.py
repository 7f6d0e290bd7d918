"""Algorithm 1: train, score, select, restart with only the selected encoder rows; then intersect the last two cores.

A run directory holds one folder per cycle (`cycle-0`, `cycle-1`, …: the SAE, its attribution, the core selected from
it) and, at the end, `distilled` (the core C*) and `summary.json`. Every finished stage is skipped when the run is taken
up again; a cycle in training resumes from its checkpoint.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from dmsae.activations.base_model import training_device
from dmsae.activations.store import Store
from dmsae.activations.stream import ActivationStream, LiveGroups, StoreGroups, live_facts
from dmsae.config import to_dict
from dmsae.cores.attribution import Attribution, AttributionConfig, attribute
from dmsae.cores.core import CarryOver, Core, Provenance, carry_over, distilled_core, next_core
from dmsae.disk.files import write_json
from dmsae.disk.run import claimed, differences
from dmsae.errors import ConfigError, TrainingError
from dmsae.evaluation.fidelity import fidelity
from dmsae.formats import Imported, load_any, locate
from dmsae.progress import console
from dmsae.sae.sae import SAE, SAEConfig, core_first, load_sae, matryoshka_prefixes, save_sae
from dmsae.seeds import derive_seed
from dmsae.training.learner import Member, State
from dmsae.training.metrics import read_metrics
from dmsae.training.schedule import TrainConfig
from dmsae.training.trainer import Trainer

_SAE, _DISTILLED, _SUMMARY = "sae", "distilled", "summary.json"


@dataclass(frozen=True, slots=True)
class DistillConfig:
    """One distillation."""

    width: int = 4096
    """Dictionary width K, the same in every cycle."""
    k: int = 40
    """Non-core latents active per token, the same in every cycle."""
    prefixes: tuple[int, ...] = ()
    """Cumulative prefix sizes of cycle 0, ending in `width`. Empty: groups of 1/32, 1/16, 1/8, 1/4 and the rest."""
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
    """Decides every cycle's initial weights and order of activations."""

    def __post_init__(self) -> None:
        if self.cycles < 1:
            raise ConfigError(f"cycles = {self.cycles} must be at least 1: the distilled core needs two selections.")
        if not 0 < self.coverage <= 1:
            raise ConfigError(f"coverage = {self.coverage} must lie in (0, 1].")
        if self.train.seed:
            raise ConfigError(f"train.seed = {self.train.seed} has no effect here: each cycle's follows from seed.")

    def sae(self, d_model: int, n_core: int) -> SAEConfig:
        """Return what the SAE of a cycle is: the core first, then the same non-core groups in every cycle."""
        prefixes = core_first(self.prefixes or matryoshka_prefixes(self.width), n_core)
        return SAEConfig(d_model, self.width, self.k, prefixes, n_core, center_input=self.center_input)

    def lasting(self) -> dict[str, Any]:
        """Return the settings that decide the result; how often to look and save are not among them."""
        train = {name: value for name, value in self.train.lasting().items() if name != "seed"}
        return {**to_dict(self), "train": train}


class CycleReport(NamedTuple):
    """What one cycle came to."""

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
    """What a distillation came to."""

    cores: list[Core]
    distilled: Core
    reports: list[CycleReport]
    last_sae: SAE
    """The SAE of the last cycle, which the last core was selected from."""


def distil(
    config: DistillConfig,
    store: Store,
    directory: Path,
    report: Callable[[CycleReport], None] = lambda report: None,
    live: LiveGroups | None = None,
) -> Distillation:
    """Run a distillation, or what is left of it, and return its cores; `report` hears of each cycle as it ends.

    Cycles train on the store, or on `live` activations when its training split was too large to keep.
    """
    config.sae(store.d_model, 0)
    with claimed(directory, run_settings(config, store.key, store.model, live)):
        cores: list[Core] = []
        reports: list[CycleReport] = []
        for cycle in range(config.cycles + 1):
            here = directory / f"cycle-{cycle}"
            previous = cores[-1] if cores else None
            sae = _train(config, store, here, cycle, previous, live)
            attribution = _score(config, store, here, sae)
            cores.append(_select(config, store, here, sae, attribution, previous))
            reports.append(_report(here, cores, sae, attribution, _fidelity(here, sae, store)))
            report(reports[-1])
        distilled = distilled_core(cores[-1], cores[-2])
        distilled.save(directory / _DISTILLED)
        summary = {"n_distilled": len(distilled), "births": distilled.births(), "cycles": [_plain(r) for r in reports]}
        write_json(directory / _SUMMARY, summary)
        return Distillation(cores, distilled, reports, sae)


def run_settings(
    config: DistillConfig, store: str, model: dict[str, Any], live: LiveGroups | None = None
) -> dict[str, Any]:
    """Return what decides the result of a distillation; a directory made with anything else is refused."""
    return {"kind": "distill", "store": store, "model": model, "distill": config.lasting(), **live_facts(live)}


def distilled_directory(run: Path) -> Path:
    """Return where a distillation run keeps its distilled core."""
    return run / _DISTILLED


def _train(
    config: DistillConfig, store: Store, here: Path, cycle: int, core: Core | None, live: LiveGroups | None
) -> SAE:
    """Return the SAE of a cycle: imported, already there, or trained now from the core's rows alone."""
    if cycle == 0 and config.cycle0:
        return _import(config, store, here / _SAE)
    member = Member(_SAE, _fitting(config, store, core), core.encoder_CD if core else None)
    train = replace(config.train, seed=derive_seed(config.seed, "cycle", cycle))
    device = training_device(train.device)
    source = live or StoreGroups(store, train.seed)
    stream = ActivationStream(source, train.batch_size, train.seed, device)
    made_from = {"store": store.key, "model": store.model, "cycle": cycle, **live_facts(live)}
    try:
        (outcome,) = Trainer([member], train, stream, here, made_from).run()
    finally:
        stream.close()
    if outcome.state is not State.FINISHED:
        raise TrainingError(
            f"Cycle {cycle} {outcome.state} at step {outcome.step} ({outcome.cause}), so no core can be selected from "
            f"it. The cores of earlier cycles are in {here.parent}. Try a smaller k or a lower lr, in a new directory."
        )
    return load_sae(outcome.directory)


def _fitting(config: DistillConfig, store: Store, core: Core | None) -> SAEConfig:
    """Return what the SAE of a cycle is; a core that leaves no room for the last group is an error that says so."""
    try:
        return config.sae(store.d_model, len(core) if core else 0)
    except ConfigError as error:
        raise ConfigError(
            f"{error} The core grew to {len(core or ())} latents: lower coverage (now {config.coverage}), or widen "
            "the last prefix, in a new directory."
        ) from error


def _import(config: DistillConfig, store: Store, here: Path) -> SAE:
    """Return the published SAE that stands for cycle 0, copied into the run so that the run is whole."""
    expected = config.sae(store.d_model, 0)
    if not (here / "sae.json").is_file():
        imported = load_any(locate(config.cycle0), expected.k, expected.prefixes)
        for note in imported.notes:
            console.print(f"cycle 0: {note}", markup=False)
        _require_same_model(config, imported, store)
        if imported.sae.config != expected:
            wrong = differences(to_dict(imported.sae.config), to_dict(expected))
            raise ConfigError(f"cycle0 = {config.cycle0} does not fit this run ({'; '.join(wrong)}).")
        source = {name: getattr(imported, name) for name in ("kind", "sha256", "model")}
        save_sae(imported.sae, here, {"imported_from": {"source": config.cycle0, **source}, "cycle": 0})
    return load_sae(here)


def _require_same_model(config: DistillConfig, imported: Imported, store: Store) -> None:
    if imported.model is None:
        console.print(
            f"cycle 0: whether it was trained on {store.model['name']} at {store.model['hook']} is not checked."
        )
        return
    for name in ("weights_sha256", "hook"):
        if imported.model.get(name) != store.model[name]:
            raise ConfigError(
                f"cycle0 = {config.cycle0} was trained with {name} {imported.model.get(name)}, but the store "
                f"{store.key} has {store.model[name]}. Choose a store of that model and hook."
            )


def _score(config: DistillConfig, store: Store, here: Path, sae: SAE) -> Attribution:
    if (here / "attribution.json").is_file():
        return Attribution.load(here)
    device = training_device(config.train.device)
    attribution = attribute(sae.to(device), store, config.attribution)
    attribution.save(here)
    return attribution


def _select(
    config: DistillConfig, store: Store, here: Path, sae: SAE, attribution: Attribution, previous: Core | None
) -> Core:
    if (here / "core.json").is_file():
        return Core.load(here)
    cycle = previous.cycle + 1 if previous else 0
    provenance = Provenance.of(store, config.lasting())
    core = next_core(previous, sae, attribution, cycle, config.coverage, provenance)
    core.save(here)
    return core


def _fidelity(here: Path, sae: SAE, store: Store) -> dict[str, float]:
    """Return a cycle's held-out figures, measured once."""
    path = here / "fidelity.json"
    if not path.is_file():
        found = fidelity(sae, store)
        write_json(path, found._asdict() if found else {})
    figures: dict[str, float] = json.loads(path.read_text(encoding="utf8"))
    return figures


def _report(
    here: Path, cores: list[Core], sae: SAE, attribution: Attribution, heldout: dict[str, float]
) -> CycleReport:
    metrics = read_metrics(here / _SAE)
    n_frozen = sae.config.n_core
    return CycleReport(
        cycle=cores[-1].cycle,
        core=carry_over(cores[-1], cores[-2] if len(cores) > 1 else None),
        births=cores[-1].births(),
        n_frozen=n_frozen,
        l0_core=float(attribution.firing_rates_P[:n_frozen].sum()),
        heldout_fve=heldout.get("fve"),
        train_loss=metrics[-1]["loss"] if metrics else None,
    )


def _plain(report: CycleReport) -> dict[str, object]:
    return {**report._asdict(), "core": report.core._asdict()}
