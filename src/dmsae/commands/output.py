"""Where results are printed, and how."""

import sys
import unicodedata

from rich.console import Console
from rich.table import Table

# In a file or a pipe there is no screen width to respect: a key or number that is cut off cannot be pasted.
# Names, paths and texts may hold brackets and colons: nothing that is printed here is markup, or the name of an emoji.
out = Console(highlight=False, markup=False, emoji=False, soft_wrap=True, width=None if sys.stdout.isatty() else 180)

_INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Unicode categories of what does not show, or changes how the rest is shown: controls, direction marks, surrogates."""


def plain_table(*columns: str) -> Table:
    """Return an empty table without lines."""
    return Table(*columns, box=None, pad_edge=False, header_style="bold")


def number(value: float | None, digits: int = 3) -> str:
    """Return a number for a table, or a dash."""
    return "–" if value is None else f"{value:.{digits}f}"


def visible(text: str) -> str:
    """Return text from outside with everything invisible spelled out: it stays on its line and moves no cursor."""
    return "".join(map(_visible_character, text))


def _visible_character(character: str) -> str:
    if character == "\n":
        return "⏎"
    if unicodedata.category(character) in _INVISIBLE:
        return character.encode("unicode_escape").decode()
    return character
