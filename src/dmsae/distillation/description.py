"""What is known of a latent: when it fires, on what text, and which tokens it promotes.

Everything that shows latents starts here: `dmsae core show` prints these facts, a page could draw them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from dmsae.activations.base_model import BaseModel, ModelConfig, load_tokenizer
from dmsae.activations.identity import ModelIdentity
from dmsae.activations.store import Store
from dmsae.config import from_dict, require_whole
from dmsae.cores.attribution import Attribution
from dmsae.cores.core import Core
from dmsae.disk import layout
from dmsae.distillation.inspection import FoundSAE, load_model_of, require_latents_of, sae_of
from dmsae.distillation.matching import open_store_of
from dmsae.errors import ConfigError, DmsaeError, ModelError
from dmsae.evaluation.examples import Example, Firing, heldout_firing, require_heldout
from dmsae.evaluation.logit_lens import TokenEffect, TokenEffects, promoted_tokens
from dmsae.evaluation.subject import Dictionary
from dmsae.evaluation.survival import require_selected_from
from dmsae.progress import SILENT, Progress
from dmsae.sae.sae import SAE

T = TypeVar("T")


class LatentFacts(NamedTuple):
    """What is known of one latent; what could not be found out is None, or an empty list."""

    latent: int
    """Its index in the SAE."""
    firing_rate: float | None
    """Share of positions on which it fires."""
    mean_activation: float | None
    """Its mean activation where it fires."""
    promoted: list[TokenEffect]
    """Tokens whose logits it raises most: approximate, see `dmsae.evaluation.logit_lens`."""
    suppressed: list[TokenEffect]
    """Tokens whose logits it lowers most."""
    top: list[Example]
    """Held-out text where it fires most."""
    random: list[Example]
    """Held-out text where it fires, drawn at random."""

    @property
    def is_mostly_on(self) -> bool:
        """Whether it fires on more than half of the positions."""
        return self.firing_rate is not None and self.firing_rate > 0.5


@dataclass(frozen=True, slots=True)
class DescriptionConfig:
    """How much is said of each latent."""

    n_examples: int = 2
    """Held-out texts where it fires most."""
    n_random_examples: int = 2
    """Held-out texts drawn from all those where it fires."""
    n_tokens: int = 5
    """Promoted tokens, and as many suppressed ones. 0: none, and the model is not loaded."""
    n_around: int = 8
    """Tokens on each side of an example."""
    seed: int = 0
    """Decides which texts are drawn."""

    def __post_init__(self) -> None:
        for name in ("n_examples", "n_random_examples", "n_tokens", "n_around"):
            require_whole(name, getattr(self, name), 0)


def describe_latents(
    dictionary: Dictionary,
    latents: Sequence[int],
    store: Store | None,
    model: BaseModel | None = None,
    config: DescriptionConfig | None = None,
    progress: Progress = SILENT,
) -> list[LatentFacts]:
    """Return what a store's held-out activations and a model's unembedding say about some latents.

    Without a store there are no figures and no examples, without a model no tokens. A store without text, or a model
    whose final norm cannot be found, is reported, and the rest is returned.
    """
    config = config or DescriptionConfig()
    firing: Sequence[Firing | None] = [None] * len(latents)
    effects = [TokenEffects([], []) for _ in latents]
    if store is not None:
        firing = _firing(dictionary, latents, store, config, progress)
    if model is not None and config.n_tokens:
        try:
            effects = promoted_tokens(dictionary.W_dec[list(latents)], model, config.n_tokens)
        except ModelError as error:
            progress.note(f"No promoted tokens: {error}")
    return [
        LatentFacts(
            latent=latent,
            firing_rate=fires.rate if fires else None,
            mean_activation=fires.mean if fires else None,
            promoted=effect.promoted,
            suppressed=effect.suppressed,
            top=fires.top if fires else [],
            random=fires.random if fires else [],
        )
        for latent, fires, effect in zip(latents, firing, effects, strict=True)
    ]


def describe_core(
    place: Path,
    core: Core,
    n_latents: int,
    config: DescriptionConfig | None = None,
    root: Path | None = None,
    progress: Progress = SILENT,
) -> list[LatentFacts]:
    """Return what is known of the first latents of a core, in the SAE that it was selected from.

    Without its store, rates and means are those of the pairs that it was scored on. What is missing is reported.
    """
    config = config or DescriptionConfig()
    directory = sae_of(place, core)
    sae = SAE.load(directory)
    require_selected_from(core, sae, f"the SAE in {directory}")
    latents = core.slots_C[:n_latents].tolist()
    find = partial(_heldout_store, sae, place, core.provenance.store, root)
    store = _unless_missing("No example texts", find, progress)
    model = _model_for_tokens(core.provenance.model, config, progress)
    facts = describe_latents(sae, latents, store, model, config, progress)
    return facts if store else _with_scored_activity(facts, directory.parent)


def describe_found(
    one: FoundSAE,
    latents: list[int],
    config: DescriptionConfig | None = None,
    key: str = "",
    root: Path | None = None,
    progress: Progress = SILENT,
) -> list[LatentFacts]:
    """Return what is known of some latents of an SAE, in the store given or that it was made from.

    A store that is named must be there. Anything else that is missing is reported.
    """
    config = config or DescriptionConfig()
    require_latents_of(one.sae, latents)
    its_own = one.made_from.get("store") or one.made_from.get("heldout_store") or ""
    find = partial(_heldout_store, one.sae, one.directory, key or its_own, root)
    store = find() if key else _unless_missing("No example texts", find, progress)
    made_from = one.made_from.get("model")
    identity = store.model if store else from_dict(ModelIdentity, made_from) if made_from else None
    model = _model_for_tokens(identity, config, progress) if identity else None
    return describe_latents(one.sae, latents, store, model, config, progress)


def _firing(
    dictionary: Dictionary, latents: Sequence[int], store: Store, config: DescriptionConfig, progress: Progress
) -> list[Firing]:
    tokenizer = None
    if config.n_examples or config.n_random_examples:
        tokenizer = _unless_missing("No example texts", partial(_tokenizer_of, store), progress)
    counts = (config.n_examples, config.n_random_examples, config.n_around)
    return heldout_firing(dictionary, latents, store, tokenizer, *counts, config.seed, progress)


def _with_scored_activity(facts: list[LatentFacts], cycle: Path) -> list[LatentFacts]:
    """Return facts with the rates and means of the pairs that a cycle was scored on, if they are there."""
    scored = Attribution.load(cycle) if layout.has_artifact(cycle, layout.ATTRIBUTION) else None
    if scored is None or scored.mean_activations_P is None:
        return facts
    place_of = {latent: place for place, latent in enumerate(scored.latents_P.tolist())}
    rates, means = scored.firing_rates_P.tolist(), scored.mean_activations_P.tolist()
    return [
        one._replace(firing_rate=rates[place_of[one.latent]], mean_activation=means[place_of[one.latent]])
        for one in facts
    ]


def _heldout_store(sae: SAE, place: Path, key: str, root: Path | None) -> Store:
    """Return the store of what is in a place, with held-out activations for its SAE."""
    if not key:
        raise ConfigError(f"{place} does not say which store it was made from. Give one with --store.")
    store = open_store_of(place, key, root)
    require_heldout(sae, store)
    return store


def _tokenizer_of(store: Store) -> Any:
    store.require_text()
    return load_tokenizer(ModelConfig(name=store.model.name, revision=store.model.revision))


def _model_for_tokens(identity: ModelIdentity, config: DescriptionConfig, progress: Progress) -> BaseModel | None:
    if not config.n_tokens:
        return None
    return _unless_missing("No promoted tokens", partial(load_model_of, identity, progress), progress)


def _unless_missing(what: str, find: Callable[[], T], progress: Progress) -> T | None:
    """Return what is found, or None, with a note that says why it is missing."""
    try:
        return find()
    except DmsaeError as error:
        progress.note(f"{what}: {error}")
        return None
