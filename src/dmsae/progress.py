"""How long work reports itself: library functions take a `Progress` and never print.

`SILENT`, the default everywhere, says nothing. The command line passes one that draws bars and prints notes
(`commands/terminal.py`); any object with these two methods will do.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Bar(Protocol):
    """One piece of long work with a known size."""

    def advance(self, count: int, note: str = "") -> None:
        """Count finished work, with an optional short note on its current state."""

    def skip(self, count: int) -> None:
        """Count work that an earlier run did: finished, but not part of the rate."""


class Progress(Protocol):
    """Where long work reports what it is doing."""

    def bar(self, what: str, total: int, unit: str) -> AbstractContextManager[Bar]:
        """Return a bar for `total` units of work, shown while the block runs."""

    def note(self, message: str) -> None:
        """Report a fact worth knowing."""

    def warn(self, message: str) -> None:
        """Report a fact that the user should act on."""


class _SilentBar:
    def advance(self, count: int, note: str = "") -> None:
        pass

    def skip(self, count: int) -> None:
        pass


class _Silent:
    @contextmanager
    def bar(self, what: str, total: int, unit: str) -> Iterator[Bar]:
        yield _SilentBar()

    def note(self, message: str) -> None:
        pass

    def warn(self, message: str) -> None:
        pass


SILENT: Progress = _Silent()
"""Reports nothing."""


def human_seconds(seconds: float) -> str:
    """Return a duration as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
