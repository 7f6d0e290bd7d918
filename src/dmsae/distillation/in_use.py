"""An SAE on disk made ready for use: with its model, the latents of its core, and how its harvest took text."""

from pathlib import Path
from typing import NamedTuple

from dmsae.activations.base_model import BaseModel, ModelConfig, identify
from dmsae.activations.identity import ModelIdentity
from dmsae.activations.request import HarvestRequest
from dmsae.config import from_dict, to_dict
from dmsae.cores.core import Core
from dmsae.distillation.inspection import FoundSAE, find_sae, has_core
from dmsae.distillation.matching import open_store_of
from dmsae.errors import ConfigError, DmsaeError
from dmsae.evaluation.survival import require_selected_from
from dmsae.progress import SILENT, Progress
from dmsae.sae.sae import SAE


class InUse(NamedTuple):
    """An SAE and its model."""

    sae: SAE
    model: BaseModel
    core: tuple[int, ...]
    """The core's latents in the order of the core: as selected, or else those that the SAE was trained with."""
    prepend_bos: bool | None
    """As in the harvest that the SAE was made from; None: as the tokenizer does, or not known."""
    max_norm_ratio: float | None
    """As in that harvest; None: no norm was too large, or not known."""


def take_in_use(
    place: Path, model: str = "", hook: str = "", device: str = "auto", progress: Progress = SILENT
) -> InUse:
    """Return the SAE in a place, as `find_sae` finds it, and its model; of a core, also its latents in that SAE.

    The model is the one that the SAE was made from, which `model` may say where to find. An SAE that does not say what
    it was made from needs both `model` and `hook`, and only its width is checked, when it is used.
    """
    found = find_sae(place)
    core = tuple(range(found.sae.config.n_core))
    if has_core(place):
        selected = Core.load(place)
        require_selected_from(selected, found.sae, f"the SAE in {found.directory}")
        core = tuple(selected.slots_C.tolist())
    loaded = _load_model(found, model, hook, device, progress)
    harvest = _harvest_of(found, progress)
    bos, ratio = (harvest.tokens.prepend_bos, harvest.max_norm_ratio) if harvest else (None, None)
    return InUse(found.sae.to(loaded.device), loaded, core, bos, ratio)


def _harvest_of(found: FoundSAE, progress: Progress) -> HarvestRequest | None:
    """Return how the text was harvested that an SAE was trained on, if that is recorded and still there."""
    if live := found.made_from.get("live"):
        return from_dict(HarvestRequest, live)
    if not (key := found.made_from.get("store")):
        return None
    try:
        request = open_store_of(found.directory, key).request
    except DmsaeError as error:
        progress.note(f"Whether contexts began with BOS, and which norms were left out, is not known: {error}")
        return None
    return request if isinstance(request, HarvestRequest) else None


def _load_model(found: FoundSAE, model: str, hook: str, device: str, progress: Progress) -> BaseModel:
    facts = found.made_from.get("model")
    recorded = from_dict(ModelIdentity, facts) if facts else None
    if recorded is None or recorded == ModelIdentity.imported(recorded.name):
        if not (model and hook):
            what = (
                "does not say which model and hook it was made from"
                if recorded is None
                else "was trained on imported activations, whose model and hook are not recorded"
            )
            raise ConfigError(f"{found.directory} {what}. Give both, with --model and --hook.")
        return BaseModel.load(ModelConfig(name=model, hook=hook, device=device), progress=progress)
    settings = {name: to_dict(recorded)[name] for name in ("name", "revision", "hook", "dtype")}
    settings |= {"name": model, "revision": ""} if model else {}
    settings |= {"hook": hook} if hook else {}
    config = from_dict(ModelConfig, settings | {"device": device})
    identity = identify(config, progress)
    recorded.require_same(
        identity,
        f"the SAE in {found.directory}",
        "what would run",
        "Say with --model where its model is, and leave out --hook.",
    )
    return BaseModel.load(config, identity, progress)
