"""Where results are printed, and how."""

import sys

from rich.console import Console
from rich.table import Table

# In a file or a pipe there is no screen width to respect: a key or number that is cut off cannot be pasted.
# Names, paths and texts may hold brackets: nothing that is printed here is markup.
out = Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 180)


def plain_table(*columns: str) -> Table:
    """Return an empty table without lines."""
    return Table(*columns, box=None, pad_edge=False, header_style="bold")


def number(value: float | None, digits: int = 3) -> str:
    """Return a number for a table, or a dash."""
    return "–" if value is None else f"{value:.{digits}f}"
