"""That what a run trains on fits the store that it is scored and measured with, and where that store is."""

import json
from pathlib import Path

from dmsae.activations.identity import ModelIdentity
from dmsae.activations.sources import ActivationSource
from dmsae.activations.store import Store, open_store
from dmsae.config import Json, from_dict, to_dict
from dmsae.disk import layout
from dmsae.disk.artifact import read_facts
from dmsae.disk.run import differences
from dmsae.errors import ConfigError, DmsaeError
from dmsae.progress import Progress

_NOT_THE_SPLIT = (
    "format",
    "source",
    "model",
    "train_tokens",
    "heldout_tokens",
    "pair_tokens",
    "max_contexts_per_document",
    "skip_boundary_targets",
    "shard_tokens",
    "dtype",
    "gradient_dtype",
    "max_norm_ratio",
)
"""What a request says beside which documents go to which split, and in which order."""


def require_matching(source: ActivationSource, store: Store) -> None:
    """Raise unless a source gives activations of the store's model and hook and, if it is live, of the same split.

    With another split or seed, a live source would train on text that the store holds out.
    """
    facts = source.facts
    if facts.get("model"):
        model = from_dict(ModelIdentity, facts["model"])
        remedy = "Train on activations of the store's own model and hook."
        model.require_same(store.model, "what the SAEs would train on", f"the store {store.key}", remedy)
    if "live" not in facts:
        return
    stored, live = ({k: v for k, v in one.items() if k not in _NOT_THE_SPLIT} for one in _requests(store, facts))
    if changed := differences(stored, live):
        shown = "\n  ".join(changed)
        raise ConfigError(
            f"The live activations would not be of the text of the store {store.key}, which is split so that its "
            f"held-out text is never trained on:\n  {shown}\nGive the harvest settings of that store, for example its "
            "--recipe. To train on other text, harvest it and give that store with --store."
        )


def _requests(store: Store, facts: dict[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """Return what the store was made from, and what the live source is made from, as JSON values."""
    stored, live = json.loads(json.dumps([to_dict(store.request), facts["live"]]))
    return stored, live


RESELECTED = "reselected"
"""What a core that was selected anew records in its provenance: the run, and how it was selected."""


def recorded_run(provenance: Json) -> Path | None:
    """Return the run that a core was selected from anew, by the config of its provenance, if that is still there."""
    run = provenance.get(RESELECTED, {}).get("run")
    return Path(run) if run and (Path(run) / layout.SETTINGS).is_file() else None


def recorded_root(place: Path) -> Path | None:
    """Return the directory of stores that was used for what is in a place, if that is recorded and still there.

    A distillation records it in its settings, an SAE beside its held-out figures. A core that was selected anew
    records its run.
    """
    places = [place, place.parent]
    if layout.has_artifact(place, layout.CORE):
        run = recorded_run(read_facts(place, layout.CORE)["provenance"]["config"])
        places = [run, *places] if run else places
    for file in (*(one / layout.SETTINGS for one in places), place / layout.FIDELITY):
        try:
            root = json.loads(file.read_text(encoding="utf8")).get("root")
        except (OSError, ValueError, AttributeError):
            continue
        if root and Path(root).is_dir():
            return Path(root)
    return None


def open_store_of(place: Path, key: str, root: Path | None = None) -> Store:
    """Open a store by its key: under `root` when given, else where it was for what is in `place`, else by default."""
    if root is None and (recorded := recorded_root(place)) and any(recorded.glob(f"{key}*")):
        root = recorded
    return open_store(key, root)


def warn_of_other_starts(place: Path, key: str, store: Store, root: Path | None, progress: Progress) -> None:
    """Warn when a store's contexts start otherwise than those that the core in a place was distilled from.

    `key` is that of the core's own store. A BOS token changes the activations of everything after it.
    """
    if key == store.key:
        return
    try:
        own = open_store_of(place, key, root)
    except DmsaeError as error:
        progress.note(f"Whether contexts start as they did for the core, with or without BOS, is not known: {error}")
        return
    if not (own.has_text and store.has_text):
        return
    before, now = own.first_token(), store.first_token()
    if before != now:
        progress.warn(
            f"Contexts of the core's store {own.key} start {_start(before)}, those of the store {store.key} "
            f"{_start(now)}. Activations depend on that, so the core's latents will fire otherwise than in its "
            "distillation. Harvest with the same tokens.prepend_bos."
        )


def _start(first_token: int | None) -> str:
    return "without a BOS token" if first_token is None else f"with token {first_token}, as with a BOS token"
