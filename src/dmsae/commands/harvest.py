"""`dmsae harvest`: text through a model, into a store."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
from rich.filesize import decimal as human_bytes

from dmsae.activations.catalog import is_complete
from dmsae.activations.harvest import Estimate, Harvest
from dmsae.activations.request import HarvestConfig
from dmsae.activations.splits import Split
from dmsae.commands.output import out, plain_table
from dmsae.commands.recipes import read_sections
from dmsae.commands.stores import show_store
from dmsae.commands.terminal import TERMINAL
from dmsae.config import to_dict
from dmsae.progress import human_seconds
from dmsae.sae.comms import Comms
from dmsae.training.crew import harvest_on, run_on_mesh
from dmsae.training.mesh import MeshConfig, started


@dataclass(frozen=True)
class HarvestCommand:
    """Run text through a model once and keep its activations and loss gradients on disk.

    The same request is never harvested twice: the store's key is a hash of all that its content depends on. Run the
    same command again to resume a harvest that was interrupted. Processes that torchrun starts share the work.
    """

    config: Annotated[HarvestConfig, tyro.conf.arg(name="")] = field(default_factory=HarvestConfig)
    recipe: str = ""
    """Take the settings from a recipe: one that ships with dmsae, by name, or a .toml file. Flags win."""
    root: Path | None = None
    """Directory of stores. Default: `stores` in the cache directory ($DMSAE_CACHE)."""
    dry_run: bool = False
    """Print what it would cost in time and disk space, and write nothing."""
    timeout_seconds: float = MeshConfig().timeout_seconds
    """Of several processes that torchrun has started, one that stays silent for this long is given up."""


def command(recipe: str) -> HarvestCommand:
    """Return the command with the defaults of a recipe."""
    return HarvestCommand(config=read_sections(recipe).harvest, recipe=recipe)


def run(command: HarvestCommand) -> None:
    """Harvest, or estimate, and show the store."""
    mesh = MeshConfig(data=started(), timeout_seconds=command.timeout_seconds)
    run_on_mesh(mesh, command.config.model.device, to_dict(command), partial(_run, command))


def _run(command: HarvestCommand, comms: Comms) -> None:
    harvest = Harvest(command.config, command.root, TERMINAL)
    if is_complete(harvest.path):
        TERMINAL.note(f"Store {harvest.path.name} is complete: nothing to do.")
    elif command.dry_run:
        _print_estimate(harvest.path, harvest.dry_run())
        return
    show_store(harvest_on(comms, harvest))


def _print_estimate(store: Path, estimate: Estimate) -> None:
    table = plain_table("split", "documents", "rows", "disk", "time")
    for split in Split:
        size, seconds = human_bytes(estimate.size_bytes[split]), human_seconds(estimate.seconds[split])
        rows = f"{estimate.rows[split]:,} × {estimate.d_model}"
        table.add_row(split, f"{estimate.documents[split]:,}", rows, size, seconds)
    size, seconds = human_bytes(sum(estimate.size_bytes.values())), human_seconds(sum(estimate.seconds.values()))
    table.add_row("all", "", "", size, seconds)
    out.print(f"Store {store.name} would be made in {store.parent}:", style="bold")
    out.print(table)
