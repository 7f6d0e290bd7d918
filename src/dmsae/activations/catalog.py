"""The stores on a disk: listed, found by the first letters of their key, locked and removed.

Nothing here imports torch: `dmsae store list` should start fast.
"""

import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, NamedTuple

from dmsae.activations.journal import (
    has_old_format,
    read_journal,
    read_json,
    read_seal,
    recover_journal,
    rows_by_split,
)
from dmsae.activations.splits import Split
from dmsae.disk import layout
from dmsae.disk.files import exclusive_lock
from dmsae.errors import StoreError, nearest

State = Literal["complete", "unfinished", "old format", "damaged"]


class Summary(NamedTuple):
    """One store as a line in a list."""

    key: str
    state: State
    model: str
    hook: str
    source: str
    rows: dict[Split, int]
    size_bytes: int


def list_stores(root: Path | None = None) -> list[Summary]:
    """Return the stores under a root, finished or not; a damaged one is listed as such."""
    return [_summary(path) for path in _paths(root or layout.stores_directory())]


def find_store(key: str, root: Path | None = None) -> Path:
    """Return the path of the one store whose key begins with `key`."""
    root = root or layout.stores_directory()
    known = [path.name for path in _paths(root)]
    matches = [name for name in known if name.startswith(key)]
    if len(matches) == 1:
        return root / matches[0]
    if matches:
        raise StoreError(f"{key!r} could be {' or '.join(matches)}: give more letters.")
    raise StoreError(f"No store under {root} has a key that begins with {key!r}. {nearest(key, known)}")


def is_complete(store: Path) -> bool:
    """Return whether a store has been finished."""
    return (store / layout.STORE_COMPLETE).is_file()


def store_lock(store: Path) -> AbstractContextManager[None]:
    """Return a context that keeps other processes from writing the store."""
    return exclusive_lock(store / layout.LOCK, f"The store {store.name}")


def remove_store(store: Path) -> None:
    """Remove a store that nobody is writing; a half-removed one never looks complete, nor its shards finished."""
    with store_lock(store):
        for name in (layout.STORE_COMPLETE, layout.STORE_JOURNAL):
            (store / name).unlink(missing_ok=True)
        shutil.rmtree(store)


def store_bytes(store: Path) -> int:
    """Return the size of all files of a store."""
    return sum(file.stat().st_size for file in store.rglob("*") if file.is_file())


def _paths(root: Path) -> list[Path]:
    return sorted(request.parent for request in root.glob(f"*/{layout.STORE_REQUEST}"))


def _summary(store: Path) -> Summary:
    size = store_bytes(store)
    try:
        state = _state(store)
        request = read_json(store / layout.STORE_REQUEST)
        model, hook, source = request["model"]["name"], request["model"]["hook"], request["source"]
        rows = rows_by_split(recover_journal(store) if state == "unfinished" else read_journal(store))
    except (StoreError, KeyError, TypeError, ValueError):
        return Summary(store.name, "damaged", "", "", "", dict.fromkeys(Split, 0), size)
    return Summary(store.name, state, model, hook, source, rows, size)


def _state(store: Path) -> State:
    if not is_complete(store):
        return "unfinished"
    if has_old_format(store):
        return "old format"
    read_seal(store)
    return "complete"
