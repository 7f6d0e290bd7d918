"""`dmsae report`: one page of what was run and found."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from dmsae.commands.output import out
from dmsae.commands.terminal import TERMINAL
from dmsae.errors import ConfigError


@dataclass(frozen=True)
class ReportCommand:
    """Write one self-contained HTML page about runs: verdicts, figures, cycles, and the latents of their cores.

    It opens from disk, needs no network and runs no script.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Directories of experiments, distillations and transfers."""
    to: Path = Path("report.html")
    """The page."""
    latents: int = 24
    """Latents to show of each core."""
    root: Path | None = None
    """Directory of stores. Default: the one that each run used."""


def command(recipe: str) -> ReportCommand:
    """Return the command; a recipe has nothing to say about it."""
    return ReportCommand(runs=tyro.MISSING)


def run(command: ReportCommand) -> None:
    """Write the page and say where it is."""
    from dmsae.report.report import write_report

    if not command.runs:
        raise ConfigError("Name at least one run or experiment to report on.")
    write_report(command.runs, command.to, command.latents, command.root, TERMINAL)
    out.print(f"The report is in {command.to}", soft_wrap=True, markup=False, highlight=False)
