"""`dmsae store`: activations on disk. Only commands that read tensors import torch."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.filesize import decimal as human_bytes

from dmsae.activations.catalog import find_store, list_stores, remove_store, require_store, summary_of
from dmsae.activations.dtypes import DtypeName
from dmsae.activations.splits import Split
from dmsae.commands.output import out, plain_table
from dmsae.commands.terminal import TERMINAL
from dmsae.disk.layout import stores_directory
from dmsae.errors import ConfigError, StoreError
from dmsae.text.assets import ASSETS

if TYPE_CHECKING:
    from dmsae.activations.store import Store

Name = Annotated[str, tyro.conf.Positional]
_LETTERS = 4
"""How many letters of a key remove a store without asking."""


def store_list(root: Path | None = None) -> None:
    """List stores, finished or not.

    Args:
        root: Directory of stores.
    """
    summaries = list_stores(root)
    table = plain_table("key", "state", "model", "hook", "text", *Split, "size")
    for one in summaries:
        counts = (f"{one.rows[split]:,}" for split in Split)
        table.add_row(one.key, one.state, one.model, one.hook, one.source, *counts, human_bytes(one.size_bytes))
    out.print(table if summaries else f"No stores under {root or stores_directory()}. 'dmsae harvest' makes one.")


def store_show(key: Name, root: Path | None = None) -> None:
    """Show what a store holds and what it was made from.

    Args:
        key: The store's key, or its first letters.
        root: Directory of stores.
    """
    from dmsae.activations.store import open_store

    show_store(open_store(key, root))


def store_verify(key: Name, root: Path | None = None) -> None:
    """Check every byte of a store.

    Args:
        key: The store's key, or its first letters.
        root: Directory of stores.
    """
    from dmsae.activations.store import open_store

    store = open_store(key, root)
    wrong = []
    with TERMINAL.bar("verify", len(store.records), "files") as bar:
        for _, problem in store.verify():
            bar.advance(1)
            wrong += [problem] if problem else []
    if wrong:
        raise StoreError("\n".join(wrong))
    out.print(f"{store.key}: {len(store.records)} files, {human_bytes(store.size_bytes())}, all as written")


def store_remove(key: Name, root: Path | None = None, yes: bool = False) -> None:
    """Remove a store from the disk.

    Args:
        key: The store's key, or its first letters. With fewer than four, you are asked whether the right one was found.
        root: Directory of stores.
        yes: Do not ask.
    """
    path = find_store(key, root)
    require_store(path)
    one = summary_of(path)
    rows = ", ".join(f"{one.rows[split]:,} {split}" for split in Split if one.rows[split]) or "no rows"
    out.print(f"{path}: {one.state}, {human_bytes(one.size_bytes)}, {one.model} {one.hook}, {one.source}, {rows}")
    if len(key) < _LETTERS and not yes and not _agreed(key, path):
        raise StoreError("Nothing was removed.")
    remove_store(path)
    out.print(f"Removed {path}")


def _agreed(key: str, path: Path) -> bool:
    """Return whether the user wants a store removed that so few letters have named."""
    if not sys.stdin.isatty():
        raise ConfigError(
            f"key = {key!r}; it must have at least {_LETTERS} letters to remove a store without asking. Give "
            f"{path.name[:8]}, or --yes."
        )
    return input("Remove it? [y/N] ").strip().lower() in ("y", "yes")


def store_import(
    name: Name,
    x: Path,
    heldout: Path | None = None,
    pairs_x: Path | None = None,
    pairs_g: Path | None = None,
    dtype: DtypeName = "float16",
    seed: int = 0,
    root: Path | None = None,
) -> None:
    """Make a store of your own activations, from any model or domain.

    Each file is a .npy array or a .safetensors file with activations [rows, width].

    Args:
        name: What the activations are of. Cores and SAEs can be carried between stores of the same name.
        x: Activations to train on.
        heldout: Activations that training never sees, for evaluation.
        pairs_x: Activations for attribution, which distillation needs.
        pairs_g: Gradients of the loss at the rows of `pairs_x`.
        dtype: How activations are stored. Gradients are stored as float32.
        seed: Decides the order of the training activations.
        root: Directory of stores.
    """
    from dmsae.activations.importing import import_store

    if (pairs_x is None) != (pairs_g is None):
        given, missing = ("--pairs-x", "--pairs-g") if pairs_g is None else ("--pairs-g", "--pairs-x")
        raise ConfigError(f"{given} was given without {missing}. Give both, or neither.")
    pairs = (pairs_x, pairs_g) if pairs_x and pairs_g else None
    show_store(
        import_store(name, x, heldout=heldout, pairs=pairs, root=root, dtype=dtype, seed=seed, progress=TERMINAL)
    )


def show_store(store: "Store") -> None:
    """Print a store's facts and statistics of its first shards."""
    from dmsae.activations.request import HarvestRequest

    request, model = store.request, store.model
    out.print(f"Store {store.key}  {store.path}  {human_bytes(store.size_bytes())}", style="bold")
    if isinstance(request, HarvestRequest):
        out.print(f"model  {model.name} {model.revision} at {model.hook}, weights {model.weights_sha256[:12]}…")
        if model.name in ASSETS:
            out.print(f"       {ASSETS[model.name].about}")
        out.print(f"text   {request.source}, contexts of {request.tokens.context_length}, seed {request.seed}")
        first = store.first_token()
        start = "with different tokens: no BOS" if first is None else f"with token {first}, as with a BOS"
        out.print(f"       contexts start {start}")
    else:
        out.print(f"name   {model.name}, imported from {request.source}, seed {request.seed}")
    table = plain_table("split", "documents", "rows", "shards", "dtype", "mean ‖x‖", "max ‖x‖", "dropped")
    for split in Split:
        shards = store.shards(split)
        if not shards:
            continue
        x = store.read(shards[0])["x"]
        norms = x.float().norm(dim=1)
        drops = (f"{reason.replace('_', ' ')} {n:,}" for reason, n in store.dropped(split).items() if n)
        dropped = ", ".join(drops) or "nothing"
        size = f"{store.n_rows(split):,} × {store.d_model}"
        dtype = str(x.dtype).removeprefix("torch.")
        documents = f"{store.n_documents(split):,}" if store.has_text else "–"
        lengths = f"{norms.mean():.1f}", f"{norms.max():.1f}"
        table.add_row(split, documents, size, str(len(shards)), dtype, *lengths, dropped)
    out.print(table)


COMMANDS = {
    "list": store_list,
    "show": store_show,
    "verify": store_verify,
    "import": store_import,
    "remove": store_remove,
}
