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
    return [summary_of(path) for path in _paths(root or layout.stores_directory())]


def summary_of(store: Path) -> Summary:
    """Return what there is to say about a store; a damaged one is described as such."""
    size = store_bytes(store)
    try:
        state = _state(store)
        model, hook, source = _described(store)
        rows = rows_by_split(recover_journal(store) if state == "unfinished" else read_journal(store))
    except (StoreError, KeyError, TypeError, ValueError):
        return Summary(store.name, "damaged", "", "", "", dict.fromkeys(Split, 0), size)
    return Summary(store.name, state, model, hook, source, rows, size)


def find_store(key: str, root: Path | str | None = None) -> Path:
    """Return the path of the one store whose key begins with `key`."""
    root = Path(root or layout.stores_directory())
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
    require_store(store)
    with store_lock(store):
        for name in (layout.STORE_COMPLETE, layout.STORE_JOURNAL):
            (store / name).unlink(missing_ok=True)
        shutil.rmtree(store)


def require_store(directory: Path) -> None:
    """Raise unless a directory is a store and nothing else: every file in it is one that stores have."""
    if directory.is_symlink() or not directory.is_dir():
        raise StoreError(f"{directory} is not a directory of its own: it is not removed.")
    if others := [path for path in sorted(directory.rglob("*")) if not _is_of_store(path.relative_to(directory))]:
        raise StoreError(
            f"{directory} is not removed, because it holds what no store has: {others[0]}"
            f"{f' and {len(others) - 1} more' if len(others) > 1 else ''}. Move that away first."
        )
    merely_a_request = {path.name.removesuffix(".tmp") for path in directory.iterdir()} <= {
        layout.STORE_REQUEST,
        layout.LOCK,
    }
    if merely_a_request and (directory / layout.STORE_REQUEST).exists():
        try:
            _described(directory)
        except (StoreError, KeyError, TypeError) as error:
            raise StoreError(
                f"{directory} is not removed, because it is not known to be a store: its {layout.STORE_REQUEST} is not "
                "a request of dmsae. Remove it yourself if nothing in it is needed."
            ) from error


def _is_of_store(path: Path) -> bool:
    """Return whether stores have a file or folder of that name, relative to the store."""
    small = (layout.STORE_REQUEST, layout.STORE_JOURNAL, layout.STORE_COMPLETE)
    folders = (layout.TOKENS, *Split)
    match [part.removesuffix(".tmp") for part in path.parts]:
        case [name]:
            return name in (*small, *folders, layout.LOCK)
        case [folder, name]:
            return folder in folders and name.endswith(".safetensors")
    return False


def store_bytes(store: Path) -> int:
    """Return the size of all files of a store."""
    return sum(file.stat().st_size for file in store.rglob("*") if file.is_file())


def _paths(root: Path) -> list[Path]:
    return sorted(request.parent for request in root.glob(f"*/{layout.STORE_REQUEST}"))


def _described(store: Path) -> tuple[str, str, str]:
    """Return the model, hook and text that a store's request names."""
    request = read_json(store / layout.STORE_REQUEST)
    return str(request["model"]["name"]), str(request["model"]["hook"]), str(request["source"])


def _state(store: Path) -> State:
    if not is_complete(store):
        return "unfinished"
    if has_old_format(store):
        return "old format"
    read_seal(store)
    return "complete"
