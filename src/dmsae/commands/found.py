"""The SAEs that a command was given, under names that tell them apart, and the store that they are evaluated on."""

from collections.abc import Sequence
from pathlib import Path

from dmsae.activations.identity import ModelIdentity
from dmsae.activations.store import Store
from dmsae.config import from_dict
from dmsae.disk import layout
from dmsae.distillation.inspection import FoundSAE, find_sae
from dmsae.distillation.matching import open_store_of
from dmsae.errors import ConfigError


def find_saes(places: Sequence[Path]) -> dict[str, FoundSAE]:
    """Return the SAEs in some directories under names that tell them apart."""
    if not places:
        raise ConfigError("No SAEs were given. Name the directories of those to evaluate.")
    found = [find_sae(place) for place in places]
    names = [_name(one.directory) for one in found]
    if len(set(names)) < len(names):
        names = [str(place) for place in places]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{twice[0]} was given more than once. Name every SAE once.")
    return dict(zip(names, found, strict=True))


def _name(directory: Path) -> str:
    """Return what an SAE is called: its folder, or that of its training when it is just called `sae`."""
    directory = directory.resolve()
    return directory.parent.name if directory.name == layout.SAE else directory.name


def store_of(found: dict[str, FoundSAE], key: str, root: Path | None) -> Store:
    """Return the store to evaluate on: the one named, or the one that all SAEs that name one were trained on.

    SAEs of another model or hook than the store's are refused.
    """
    named = {one.made_from.get("store") or one.made_from.get("heldout_store") or "" for one in found.values()} - {""}
    if not key and len(named) != 1:
        what = f"The SAEs name {len(named)} stores ({', '.join(sorted(named))})" if named else "No SAE names a store"
        raise ConfigError(f"{what}. Give the one to evaluate on with --store; 'dmsae store list' shows those here.")
    first = next(iter(found.values()))
    store = open_store_of(first.directory, key or named.pop(), root)
    for name, one in found.items():
        if model := one.made_from.get("model"):
            from_dict(ModelIdentity, model).require_same(store.model, name, f"the store {store.key}")
    return store
