"""Algorithm 1: train, score, select, restart with only the selected encoder rows; then intersect the last two cores.

A run directory holds one folder per cycle (`cycle-0`, `cycle-1`, …: the SAE, its attribution, the core selected from
it) and, at the end, `distilled` (the core C*) and `summary.json`. When a run resumes, every finished stage is skipped
and a cycle in training continues from its checkpoint. More cycles continue a finished run; what it had given before is
kept as `distilled-<T>` and `summary-<T>.json`. A cycle that fails ends the run with what the cycles before it gave.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from dmsae.activations.identity import ModelIdentity
from dmsae.activations.sources import ActivationSource, StoreSource
from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.config import Json, to_dict
from dmsae.cores.attribution import Attribution
from dmsae.cores.controls import RandomKind, random_core, random_detectors
from dmsae.cores.core import Core, Provenance
from dmsae.cores.norms import with_norm
from dmsae.cores.scoring import attribute_on
from dmsae.cores.selection import SelectionReport, distilled_core, next_core, report_selection
from dmsae.devices import training_device
from dmsae.disk import layout
from dmsae.disk.artifact import bound
from dmsae.disk.run import claimed, require_claimable
from dmsae.distillation.carrier import carrier
from dmsae.distillation.config import Cycle0, DistillConfig, DistillRule
from dmsae.distillation.cycle0 import read_cycle0, require_imported, save_cycle0
from dmsae.distillation.matching import require_matching
from dmsae.distillation.members import select_consensus, train_members
from dmsae.distillation.outcome import CycleFailed, CycleReport, finish, report, require_cycles
from dmsae.errors import AttributionError, ConfigError, StoreError, TrainingError
from dmsae.evaluation.fidelity import kept_fidelity
from dmsae.evaluation.survival import SurvivalSummary, survival
from dmsae.progress import SILENT, Progress
from dmsae.sae.comms import ALONE, Comms
from dmsae.sae.config import CoreMode, SAEConfig
from dmsae.sae.sae import SAE
from dmsae.seeds import derive_seed
from dmsae.training.crew import train_on
from dmsae.training.result import TrainState, read_result

__all__ = ["MAY_CHANGE", "Cycle0", "CycleReport", "DistillConfig", "Distillation", "distill", "run_settings"]

MAY_CHANGE = ("cycles", "root")
"""Settings of a run that another command may bring with it: how far to go, and where the stores are now."""


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
    comms: Comms = ALONE,
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
    _require_pairs(store)
    require_matching(source, store)
    settings = run_settings(config, store.key, store.model, source, store.path.parent)
    require_claimable(directory, settings, MAY_CHANGE)
    require_cycles(directory, config.n_cycles)
    first = layout.cycle_directory(directory, 0)
    is_there = layout.has_artifact(first / layout.SAE, layout.SAE)
    imported = read_cycle0(config, store, progress) if config.cycle0.source and not is_there else None
    with claimed(directory, settings, MAY_CHANGE):
        if imported is not None:
            save_cycle0(config, imported, first)
        cores: list[Core] = []
        reports: list[CycleReport] = []
        failure: CycleFailed | None = None
        last_sae: SAE | None = None
        for cycle in range(config.n_cycles + 1):
            here = layout.cycle_directory(directory, cycle)
            try:
                previous = cores[-1] if cores else None
                sae = _train(config, store, source, here, cycle, previous, progress, comms)
                attribution = _score(config, store, here, sae, cycle, comms)
                cores.append(_select(config, store, here, sae, attribution, previous))
                selection = _selection(config, attribution)
            except CycleFailed as error:
                failure = error
                break
            heldout = kept_fidelity(here / layout.SAE, store, training_device(config.train.device))
            survived = _survived(previous, last_sae, sae, store)
            reports.append(report(here, cores, sae, attribution, selection, heldout, survived))
            on_cycle(reports[-1])
            last_sae = sae
        return Distillation(cores, finish(directory, _distilled(config, cores), reports, failure), reports, sae)


def run_settings(
    config: DistillConfig, store: str, model: ModelIdentity, source: ActivationSource | None, root: Path
) -> Json:
    """Return what determines the result of a distillation; a directory made with anything else is refused.

    Without a `source` the cycles train on the store itself, which need not exist yet. `MAY_CHANGE` are exceptions.
    """
    return {
        "kind": "distill",
        "store": store,
        "root": str(root.resolve()),
        "model": to_dict(model),
        "train_on": source.facts if source else {"store": store, "model": to_dict(model)},
        "cycles": config.n_cycles,
        "distill": config.result_settings(),
    }


def _require_pairs(store: Store) -> None:
    if not store.n_rows(Split.PAIRS):
        raise StoreError(
            f"The store {store.key} holds no (x, g) pairs, which attribution needs. Harvest with pair_tokens > 0."
        )


def _train(
    config: DistillConfig,
    store: Store,
    source: ActivationSource,
    here: Path,
    cycle: int,
    core: Core | None,
    progress: Progress,
    comms: Comms,
) -> SAE:
    """Return the SAE of a cycle: imported, already there, or trained now from the core's rows alone."""
    if cycle == 0 and config.cycle0.source:
        require_imported(config, here)
        return SAE.load(here / layout.SAE)
    train = replace(config.train, seed=derive_seed(config.seed, "cycle", cycle))
    if config.rule is DistillRule.CONSENSUS:
        train_members(config, train, source, here, progress, comms)
        return SAE.load(here / layout.SAE)
    spec = carrier(layout.SAE, _fitting(config, store, core, cycle), core)
    try:
        train_on(comms, [spec], source, here, train, {"cycle": cycle}, progress)
    except TrainingError:
        if not (here / layout.SAE / layout.STATUS).is_file():  # it did not end: the same command resumes it
            raise
    result = read_result(here / layout.SAE)
    if result.state is not TrainState.FINISHED:
        remedy = "Try a smaller k or a lower lr, in a new directory."
        raise CycleFailed(cycle, f"{result.state} at step {result.step} ({result.cause})", remedy)
    return SAE.load(result.directory)


def _fitting(config: DistillConfig, store: Store, core: Core | None, cycle: int) -> SAEConfig:
    """Return what the SAE of a cycle is; a core that leaves no room for the last group ends the run."""
    try:
        return config.sae(store.d_model, len(core) if core else 0)
    except ConfigError as error:
        remedy = f"Lower coverage (now {config.coverage}), or widen the last prefix, in a new directory."
        cause = f"cannot be trained: the core grew to {len(core or ())} latents ({str(error).split('. ')[0]})"
        raise CycleFailed(cycle, cause, remedy) from error


def _score(config: DistillConfig, store: Store, here: Path, sae: SAE, cycle: int, comms: Comms) -> Attribution:
    if layout.has_artifact(here, layout.ATTRIBUTION):
        return Attribution.load(here)
    try:
        attribution = attribute_on(comms, sae, here / layout.SAE, store, config.attribution, config.train.device)
    except AttributionError as error:
        raise CycleFailed(cycle, f"cannot be scored: {error}", "Change it in a new directory.") from error
    attribution.save(here, bound(here, here / layout.SAE / f"{layout.SAE}.json"))
    return attribution


def _select(
    config: DistillConfig, store: Store, here: Path, sae: SAE, attribution: Attribution, previous: Core | None
) -> Core:
    if layout.has_artifact(here, layout.CORE):
        return Core.load(here)
    if config.rule is DistillRule.CONSENSUS:
        return select_consensus(config, store, here, sae, attribution)
    cycle = previous.cycle + 1 if previous else 0
    provenance = Provenance.of(store, config.result_settings())
    try:
        core = next_core(previous, sae, attribution, cycle, config.coverage, provenance, config.max_rate)
    except AttributionError as error:
        raise CycleFailed(cycle, f"cannot be selected from: {error}", "Change it in a new directory.") from error
    core = with_norm(core, config.core_norm, len(previous) if previous else 0)
    if previous is None and config.random_start is not None:
        core = _random_start(config, config.random_start, core, store)
    core.save(here, bound(here, here / f"{layout.ATTRIBUTION}.json"))
    return core


def _random_start(config: DistillConfig, kind: RandomKind, core: Core, store: Store) -> Core:
    """Return the random core that a control goes on with, in place of the first selected one."""
    if config.core_mode is CoreMode.DETECTOR:
        return random_detectors(core, store, config.seed)
    return random_core(core, kind, config.seed, store)


def _selection(config: DistillConfig, attribution: Attribution) -> SelectionReport | None:
    """Return what selection by attribution did to the pool, when that is how the core was selected."""
    if config.rule is DistillRule.CONSENSUS:
        return None
    return report_selection(attribution, config.coverage, config.max_rate)


def _survived(core: Core | None, before: SAE | None, after: SAE, store: Store) -> SurvivalSummary | None:
    """Return what became of a core in the cycle that was trained with it; None for a random one, of no SAE."""
    if core is None or before is None or not store.n_rows(Split.HELDOUT) or not core.is_selected:
        return None
    return survival(core, before, after, store).summary()


def _distilled(config: DistillConfig, cores: list[Core]) -> Core | None:
    """Return the result of the cycles that there are: what the last two agree on, or the consensus of the only one."""
    if config.rule is DistillRule.CONSENSUS:
        return cores[-1] if cores else None
    return distilled_core(cores[-1], cores[-2]) if len(cores) > 1 else None
