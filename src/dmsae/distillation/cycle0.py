"""Cycle 0 from a published SAE: read and checked before a run begins, then copied into it."""

from pathlib import Path

from dmsae.activations.store import Store
from dmsae.config import Json, to_dict
from dmsae.disk import layout
from dmsae.distillation.config import DistillConfig
from dmsae.errors import CheckpointError, ConfigError
from dmsae.formats import Imported, load_any, locate
from dmsae.progress import SILENT, Progress
from dmsae.sae.sae import read_made_from


def read_cycle0(config: DistillConfig, store: Store, progress: Progress = SILENT) -> Imported:
    """Return the SAE that a distillation starts from, unless it does not fit the store.

    What the checkpoint says of itself counts; `cycle0.k` and `cycle0.nesting` are only for what it does not say.
    """
    name = f"cycle0.source = {config.cycle0.source}"
    imported = load_any(locate(config.cycle0.source), config.cycle0.k, config.cycle0.nesting or None)
    sae = imported.sae.config
    if sae.n_core:
        raise ConfigError(
            f"{name} holds an SAE with a core of {sae.n_core} latents; it must be one without, since cycle 0 has none. "
            "Give the SAE of a cycle 0. To train from a core that you have: 'dmsae transfer'."
        )
    if sae.d_model != store.d_model:
        raise ConfigError(
            f"{name} takes activations of width {sae.d_model}, but those of the store {store.key} have width "
            f"{store.d_model}. Choose a checkpoint, or a store, of the same model and hook."
        )
    if imported.model is not None:
        imported.model.require_same(store.model, name, f"the store {store.key}")
    for note in _notes(config, imported, store):
        progress.note(f"cycle 0: {note}")
    return imported


def save_cycle0(config: DistillConfig, imported: Imported, here: Path) -> None:
    """Copy the SAE into the run, which is then complete without its source."""
    origin: Json = {"source": config.cycle0.source, "kind": imported.kind, "sha256": imported.sha256}
    origin |= {"notes": list(imported.notes)}
    made_from = {"imported_from": origin, "model": to_dict(imported.model), "cycle": 0}
    imported.sae.save(here / layout.SAE, made_from)


def require_imported(config: DistillConfig, here: Path) -> None:
    """Raise unless the SAE in the folder of cycle 0 is the one that was copied there."""
    origin = read_made_from(here / layout.SAE).get("imported_from")
    if not isinstance(origin, dict) or origin.get("source") != config.cycle0.source:
        raise CheckpointError(
            f"{here / layout.SAE / layout.SAE}.json was not imported from {config.cycle0.source}. Restore the one that "
            "was; or remove it, and the same command imports it again."
        )


def _notes(config: DistillConfig, imported: Imported, store: Store) -> list[str]:
    """Return what a user should know about the SAE before it is used."""
    notes, sae, later = list(imported.notes), imported.sae.config, config.sae(store.d_model, 0)
    if imported.model is None:
        notes.append(f"cannot check that it was trained on {store.model.name} at {store.model.hook}.")
    names = ("width", "k", "prefixes", "center_input")
    if unlike := [name for name in names if getattr(sae, name) != getattr(later, name)]:
        pairs = (f"{name} {getattr(sae, name)} (later cycles: {getattr(later, name)})" for name in unlike)
        notes.append(f"it has {', '.join(pairs)}.")
    return notes
