"""`dmsae figures`: draw what experiments found."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from dmsae.commands.output import out
from dmsae.disk import layout


@dataclass(frozen=True)
class FiguresCommand:
    """Draw the figures of an experiment, as SVG and PNG, from its JSON files alone."""

    run: Annotated[Path, tyro.conf.Positional]
    """Directory of an experiment, its folder `results`, or a copy of that."""
    to: Path | None = None
    """Directory for the figures. Default: `figures` beside the results."""


def command(recipe: str) -> FiguresCommand:
    """Return the command; a recipe has nothing to say about it."""
    return FiguresCommand(run=tyro.MISSING)


def run(command: FiguresCommand) -> None:
    """Draw all figures that there are results for, and print where they are."""
    from dmsae.report.figures import draw

    inside = command.run / layout.RESULTS
    results = inside if inside.is_dir() else command.run
    for path in draw(results, command.to or results.parent / "figures"):
        out.print(str(path), soft_wrap=True, markup=False, highlight=False)
