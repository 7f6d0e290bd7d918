"""Questions to a distillation run on disk: which text fires its core, and whether ablation agrees with its scores."""

from pathlib import Path
from typing import NamedTuple

from dmsae.activations.base_model import BaseModel, ModelConfig, load_tokenizer
from dmsae.activations.store import open_store
from dmsae.config import from_dict, to_dict
from dmsae.cores.ablation import AblationConfig, ablate
from dmsae.cores.attribution import Attribution
from dmsae.cores.compare import Agreement, agreement
from dmsae.cores.core import Core
from dmsae.disk import layout
from dmsae.disk.files import write_json
from dmsae.disk.run import claimed, read_settings
from dmsae.errors import CheckpointError, ConfigError
from dmsae.evaluation.examples import Example, top_examples
from dmsae.progress import SILENT, Progress
from dmsae.sae.sae import SAE


class AblatedCycle(NamedTuple):
    """The latents of one cycle measured by ablation, and how far that agrees with gradient × activation."""

    cycle: int
    coverage: float
    measured: Attribution
    agreement: Agreement


def core_examples(
    place: Path, core: Core, n_latents: int, n_examples: int, root: Path | None = None
) -> list[list[Example]]:
    """Return the held-out text that fires the first latents of a core most; needs its run and its store."""
    store = open_store(core.provenance.store, root)
    store.require_text()
    model = core.provenance.model
    tokenizer = load_tokenizer(ModelConfig(name=model.name, revision=model.revision))
    sae = SAE.load(_sae_of(place, core))
    return top_examples(sae, core.slots_C[:n_latents].tolist(), store, tokenizer, n_examples)


def ablate_cycle(
    run: Path,
    cycle: int | None = None,
    config: AblationConfig | None = None,
    root: Path | None = None,
    progress: Progress = SILENT,
) -> AblatedCycle:
    """Measure the latents of one cycle (by default the last) by ablation, and keep the result beside its scores."""
    settings = read_settings(run)
    if settings.get("kind") != "distill":
        raise ConfigError(f"{run} is not a distillation, but a run of kind {settings.get('kind')!r}.")
    cycle = settings["distill"]["cycles"] if cycle is None else cycle
    coverage = settings["distill"]["coverage"]
    here = layout.cycle_directory(run, cycle)
    with claimed(run, settings):
        scored, sae = Attribution.load(here), SAE.load(here / layout.SAE)
        store = open_store(settings["store"], root)
        store.require_text()
        names = ("name", "revision", "hook", "dtype")
        model_config = from_dict(ModelConfig, {name: to_dict(store.model)[name] for name in names})
        measured = ablate(sae, store, BaseModel.load(model_config, progress=progress), scored, config, progress)
        measured.save(here / layout.ABLATION)
        agreed = agreement(scored, measured, coverage)
        write_json(here / layout.ABLATION / layout.AGREEMENT, agreed._asdict())
    return AblatedCycle(cycle, coverage, measured, agreed)


def _sae_of(place: Path, core: Core) -> Path:
    """Return the directory of the SAE that a core was selected from: in its run, beside it, or below it."""
    for directory in (
        layout.cycle_directory(place, core.cycle),
        place,
        layout.cycle_directory(place.parent, core.cycle),
    ):
        if layout.has_artifact(directory / layout.SAE, layout.SAE):
            return directory / layout.SAE
    raise CheckpointError(f"The SAE that this core was selected from is not in {place} nor beside it.")
