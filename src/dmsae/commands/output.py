"""Where results are printed, and how."""

import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dmsae.text.visible import visible

BESIDE_NULLS = "null: the one to beat, the best of them. part: of the way from it to the ceiling."
"""What two columns mean, below a table that has them."""


class PlainConsole(Console):
    """A console on which text is only ever text.

    Names, paths and texts of strangers may hold brackets and colons, which are not markup or the name of an emoji, and
    control characters, which are shown and not sent to the terminal. Line ends are kept: our own messages have them.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, soft_wrap=True, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Return text to be drawn, with nothing in it that acts on the terminal."""
        return super().render_str(visible(text, keep="\n"), **settings)


# In a file or a pipe there is no screen width to respect: a key or number that is cut off cannot be pasted.
out = PlainConsole(width=None if sys.stdout.isatty() else 180)


class _PlainTable(Table):
    """A table whose cells are one line each."""

    def add_row(self, *cells: Any, **settings: Any) -> None:
        super().add_row(*(visible(cell) if isinstance(cell, str) else cell for cell in cells), **settings)


def plain_table(*columns: str) -> Table:
    """Return an empty table without lines."""
    return _PlainTable(*columns, box=None, pad_edge=False, header_style="bold")


def number(value: float | None, digits: int = 3) -> str:
    """Return a number for a table, or a dash."""
    return "–" if value is None else f"{value:.{digits}f}"
