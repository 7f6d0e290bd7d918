"""Questions to what is on disk: which SAE a core came from, and whether ablation agrees with the scores."""

from pathlib import Path
from typing import NamedTuple

from dmsae.activations.base_model import BaseModel, ModelConfig
from dmsae.activations.identity import ModelIdentity
from dmsae.config import Json, from_dict, to_dict
from dmsae.cores.ablation import AblationConfig, ablate
from dmsae.cores.attribution import Attribution
from dmsae.cores.compare import Agreement, agreement
from dmsae.cores.core import Core
from dmsae.disk import layout
from dmsae.disk.artifact import bound, write_sealed
from dmsae.disk.run import claimed, require_distillation
from dmsae.distillation.matching import RESELECTED, open_store_of, recorded_run
from dmsae.distillation.status import n_cycles
from dmsae.errors import CheckpointError, ModelError
from dmsae.formats import load_any
from dmsae.formats.exchange import made_from
from dmsae.progress import SILENT, Progress
from dmsae.sae.sae import SAE, read_made_from


class AblatedCycle(NamedTuple):
    """The latents of one cycle measured by ablation, and how far that agrees with gradient × activation."""

    cycle: int
    coverage: float
    max_rate: float | None
    measured: Attribution
    agreement: Agreement


class FoundSAE(NamedTuple):
    """An SAE on disk, and what it says it was made from."""

    sae: SAE
    directory: Path
    made_from: Json


def has_core(place: Path) -> bool:
    """Return whether there is a core in a directory, or the distilled core of a run."""
    return any(layout.has_artifact(one, layout.CORE) for one in (place, place / layout.DISTILLED))


def find_sae(place: Path) -> FoundSAE:
    """Return the SAE in a directory of any known format; of a distillation, the one that its core was selected from."""
    ours = (place, place / layout.SAE)
    directory = next((one for one in ours if layout.has_artifact(one, layout.SAE)), None)
    if directory is None and has_core(place):
        directory = sae_of(place, Core.load(place))
    if directory is None:
        imported = load_any(place)
        return FoundSAE(imported.sae, place, made_from(imported, str(place)))
    return FoundSAE(SAE.load(directory), directory, read_made_from(directory))


def require_latents_of(sae: SAE, latents: list[int]) -> None:
    """Raise unless an SAE has all of these latents."""
    sae.config.require_latents(latents)


def ablate_cycle(
    run: Path,
    cycle: int | None = None,
    config: AblationConfig | None = None,
    root: Path | None = None,
    progress: Progress = SILENT,
) -> AblatedCycle:
    """Measure the latents of one cycle (by default the last) by ablation, and keep the result beside its scores."""
    settings = require_distillation(run)
    cycle = last_scored(run, n_cycles(run, settings)) if cycle is None else cycle
    coverage, max_rate = settings["distill"]["coverage"], settings["distill"].get("max_rate")
    here = layout.cycle_directory(run, cycle)
    with claimed(run, settings):
        scored, sae = Attribution.load(here), SAE.load(here / layout.SAE)
        store = open_store_of(run, settings["store"], root)
        store.require_text()
        measured = ablate(sae, store, load_model_of(store.model, progress), scored, config, progress)
        there = here / layout.ABLATION
        measured.save(there, bound(there, here / layout.SAE / f"{layout.SAE}.json"))
        agreed = agreement(scored, measured, coverage, max_rate)
        write_sealed(there / layout.AGREEMENT, agreed._asdict(), bound(there, there / f"{layout.ATTRIBUTION}.json"))
    return AblatedCycle(cycle, coverage, max_rate, measured, agreed)


def last_scored(run: Path, cycles: int) -> int:
    """Return the last cycle that has been scored: not the last of all when a run failed or is not finished."""
    scored = (
        layout.has_artifact(layout.cycle_directory(run, cycle), layout.ATTRIBUTION) for cycle in range(cycles + 1)
    )
    return max((cycle for cycle, done in enumerate(scored) if done), default=0)


def sae_of(place: Path, core: Core) -> Path:
    """Return the directory of the SAE that a core was selected from: in its run, which it may record, or beside it."""
    run = recorded_run(core.provenance.config)
    places = [
        *([layout.cycle_directory(run, core.cycle)] if run else []),
        layout.cycle_directory(place, core.cycle),
        place,
        layout.cycle_directory(place.parent, core.cycle),
    ]
    for directory in places:
        if layout.has_artifact(directory / layout.SAE, layout.SAE):
            return directory / layout.SAE
    recorded = core.provenance.config.get(RESELECTED, {}).get("run")
    elsewhere = f", nor in the run that it records, {recorded}" if recorded else ""
    raise CheckpointError(f"The SAE that this core was selected from is not in {place} nor beside it{elsewhere}.")


def load_model_of(identity: ModelIdentity, progress: Progress) -> BaseModel:
    """Return the model that has an identity, and no other that is now in its place."""
    if identity == ModelIdentity.imported(identity.name):
        raise ModelError(f"The activations {identity.name!r} were imported: their model is not known.")
    names = ("name", "revision", "hook", "dtype")
    config = from_dict(ModelConfig, {name: to_dict(identity)[name] for name in names})
    model = BaseModel.load(config, progress=progress)
    identity.require_same(model.identity, "what was made", "the model that is there now", "Restore the model.")
    return model
