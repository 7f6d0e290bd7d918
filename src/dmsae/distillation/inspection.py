"""Questions to what is on disk: which text fires a core or any latent, and whether ablation agrees with the scores."""

from pathlib import Path
from typing import NamedTuple

from dmsae.activations.base_model import BaseModel, ModelConfig, load_tokenizer
from dmsae.activations.store import Store
from dmsae.config import Json, from_dict, to_dict
from dmsae.cores.ablation import AblationConfig, ablate
from dmsae.cores.attribution import Attribution
from dmsae.cores.compare import Agreement, agreement
from dmsae.cores.core import Core
from dmsae.disk import layout
from dmsae.disk.files import write_json
from dmsae.disk.run import claimed, require_distillation
from dmsae.distillation.matching import open_store_of
from dmsae.distillation.status import n_cycles
from dmsae.errors import CheckpointError, ConfigError
from dmsae.evaluation.examples import Example, top_examples
from dmsae.formats import load_any
from dmsae.progress import SILENT, Progress
from dmsae.sae.sae import SAE, read_made_from


class AblatedCycle(NamedTuple):
    """The latents of one cycle measured by ablation, and how far that agrees with gradient × activation."""

    cycle: int
    coverage: float
    measured: Attribution
    agreement: Agreement


class FoundSAE(NamedTuple):
    """An SAE on disk, and what it says it was made from."""

    sae: SAE
    directory: Path
    made_from: Json


def core_examples(
    place: Path, core: Core, n_latents: int, n_examples: int, root: Path | None = None
) -> list[list[Example]]:
    """Return the held-out text that fires the first latents of a core most; needs its run and its store."""
    store = open_store_of(place, core.provenance.store, root)
    sae = SAE.load(sae_of(place, core))
    return _examples(sae, core.slots_C[:n_latents].tolist(), store, n_examples)


def core_activity(place: Path, core: Core) -> list[tuple[float, float]]:
    """Return, for each latent of a core, the share of positions on which it fires and its mean activation there.

    They are those of the cycle that selected the core, on its attribution pairs; none when its scores are not there.
    """
    here = sae_of(place, core).parent
    if not layout.has_artifact(here, layout.ATTRIBUTION):
        return []
    attribution = Attribution.load(here)
    if attribution.mean_activations_P is None:
        return []
    rates, means = attribution.firing_rates_P[core.slots_C], attribution.mean_activations_P[core.slots_C]
    return list(zip(rates.tolist(), means.tolist(), strict=True))


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
        return FoundSAE(load_any(place).sae, place, {})
    return FoundSAE(SAE.load(directory), directory, read_made_from(directory))


def latent_examples(
    one: FoundSAE, latents: list[int], n_examples: int, key: str = "", root: Path | None = None
) -> list[list[Example]]:
    """Return the held-out text that fires some latents of an SAE most, in the store given or that it was made from."""
    key = key or one.made_from.get("store") or one.made_from.get("heldout_store") or ""
    if not key:
        raise ConfigError(f"{one.directory} does not say which store it was made from. Give one with --store.")
    return _examples(one.sae, latents, open_store_of(one.directory, key, root), n_examples)


def require_latents_of(sae: SAE, latents: list[int]) -> None:
    """Raise unless an SAE has all of these latents."""
    if wrong := [latent for latent in latents if not 0 <= latent < sae.config.width]:
        raise ConfigError(f"latents = {wrong}; the SAE has latents 0 to {sae.config.width - 1}.")


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
    coverage = settings["distill"]["coverage"]
    here = layout.cycle_directory(run, cycle)
    with claimed(run, settings):
        scored, sae = Attribution.load(here), SAE.load(here / layout.SAE)
        store = open_store_of(run, settings["store"], root)
        store.require_text()
        names = ("name", "revision", "hook", "dtype")
        model_config = from_dict(ModelConfig, {name: to_dict(store.model)[name] for name in names})
        measured = ablate(sae, store, BaseModel.load(model_config, progress=progress), scored, config, progress)
        measured.save(here / layout.ABLATION)
        agreed = agreement(scored, measured, coverage)
        write_json(here / layout.ABLATION / layout.AGREEMENT, agreed._asdict())
    return AblatedCycle(cycle, coverage, measured, agreed)


def last_scored(run: Path, cycles: int) -> int:
    """Return the last cycle that has been scored: not the last of all when a run failed or is not finished."""
    scored = (
        layout.has_artifact(layout.cycle_directory(run, cycle), layout.ATTRIBUTION) for cycle in range(cycles + 1)
    )
    return max((cycle for cycle, done in enumerate(scored) if done), default=0)


def _examples(sae: SAE, latents: list[int], store: Store, n_examples: int) -> list[list[Example]]:
    store.require_text()
    if store.d_model != sae.config.d_model:
        raise ConfigError(
            f"The SAE takes activations of width {sae.config.d_model}; those of the store {store.key} have width "
            f"{store.d_model}."
        )
    tokenizer = load_tokenizer(ModelConfig(name=store.model.name, revision=store.model.revision))
    return top_examples(sae, latents, store, tokenizer, n_examples)


def sae_of(place: Path, core: Core) -> Path:
    """Return the directory of the SAE that a core was selected from: in its run, beside it, or below it."""
    for directory in (
        layout.cycle_directory(place, core.cycle),
        place,
        layout.cycle_directory(place.parent, core.cycle),
    ):
        if layout.has_artifact(directory / layout.SAE, layout.SAE):
            return directory / layout.SAE
    raise CheckpointError(f"The SAE that this core was selected from is not in {place} nor beside it.")
