"""Pages of the site that are not written by hand: commands and public names."""

import io
import os
import re
from contextlib import redirect_stdout
from importlib import import_module
from unittest import mock

import dmsae
from dmsae.cli import ENTRIES, main

_COLUMNS = "92"
_STAGES = {
    "activations": "Models, stores and activations",
    "sae": "Sparse autoencoders",
    "training": "Training",
    "cores": "Attribution and cores",
    "distillation": "Distillation and transfer",
    "evaluation": "Evaluation",
    "interventions": "Inside a model",
    "formats": "Other formats",
    "errors": "Errors",
}
"""Headings of the Python reference, by the folder of `src/dmsae` that a name comes from."""


def commands() -> list[tuple[str, ...]]:
    """Return every command as the words that a user types."""
    found: list[tuple[str, ...]] = []
    for name, entry in ENTRIES.items():
        module = import_module(f"dmsae.commands.{entry.module}")
        if hasattr(module, "command"):
            found.append((name,))
        found += [(name, verb) for verb in getattr(module, "COMMANDS", {})]
    return found


def help_of(command: tuple[str, ...]) -> str:
    """Return what `--help` prints of a command."""
    printed = io.StringIO()
    with mock.patch.dict(os.environ, {"COLUMNS": _COLUMNS}), redirect_stdout(printed):
        try:
            main([*command, "--help"])
        except SystemExit:
            return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())
    raise AssertionError(f"--help of {command} did not end the command")


def cli_page() -> str:
    """Return the page of all commands: what each says of itself, then its usage and flags."""
    sections = [
        "# Commands",
        "What `--help` prints, made from the code. Flags override a recipe (`--recipe`), a recipe overrides the "
        "defaults shown here. `dmsae --version` prints the version.",
    ]
    for command in commands():
        usage, _, rest = help_of(command).partition("\n\n")
        at = re.search(r"^ (?:positional arguments|options)$", rest, flags=re.MULTILINE)
        about, flags = (rest[: at.start()], rest[at.start() :]) if at else (rest, "")
        sections += [f"## dmsae {' '.join(command)}", _as_text(about), f"```text\n{usage}\n\n{_dedented(flags)}\n```"]
    return "\n\n".join(sections) + "\n"


def _as_text(about: str) -> str:
    """Return a description with nothing in it that Markdown would act on, and with its lists set apart."""
    plain = about.strip().replace("<", "&lt;").replace("*", r"\*").replace("_", r"\_")
    return re.sub(r"(?m)^((?!- ).+)\n(?=- )", r"\1\n\n", plain)


def _dedented(flags: str) -> str:
    return "\n".join(line.removeprefix(" ") for line in flags.strip("\n").splitlines())


def api_page() -> str:
    """Return the page of all public names, by stage."""
    sections = [
        "# Python",
        "Everything that a command does, a function does. These are the names that `import dmsae` offers; they are "
        "imported on first use. Every example below is run by the tests.",
    ]
    homes = {name: getattr(dmsae, name).__module__ for name in dmsae.__all__ if name != "__version__"}
    for stage, title in _STAGES.items():
        names = [name for name, home in homes.items() if home.split(".")[1] == stage]
        if names:
            sections.append(f"## {title}")
        sections += [_documented(name, homes.pop(name)) for name in names]
    if homes:
        raise AssertionError(f"No heading for {homes}: add their stages to _STAGES")
    return "\n\n".join(sections) + "\n"


def _documented(name: str, home: str) -> str:
    return f"::: {home}.{name}\n    options:\n      heading: dmsae.{name}\n      toc_label: {name}"
