"""Progress that a person can read: a live bar on a terminal, a line now and then in a log file.

Progress and notes go to standard error; results go to standard output (`output.py`).
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from dmsae import progress
from dmsae.commands.output import PlainConsole
from dmsae.progress import human_seconds
from dmsae.text.visible import visible

console = PlainConsole(stderr=True)

_SECONDS_BETWEEN_LINES = 20.0


class _Bar:
    """A bar that is drawn live, or printed as a line every so often when there is nowhere to draw it."""

    def __init__(self, what: str, total: int, unit: str, live: Progress | None, task: TaskID | None) -> None:
        self._what, self._total, self._unit = visible(what), total, unit
        self._live, self._task = live, task
        self._done = self._uncounted = 0
        self._note = ""
        self._since = self._last_line = time.monotonic()
        self._is_warm = False

    def skip(self, count: int) -> None:
        self._done += count
        self._uncounted += count
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=self._done)

    def advance(self, count: int, note: str = "") -> None:
        now = time.monotonic()
        self._note = visible(note) or self._note
        self._done += count
        elapsed, counted = now - self._since, self._done - self._uncounted
        rate = counted / elapsed if elapsed > 0 else 0.0
        if not self._is_warm:  # the first piece also pays for starting up: from now on it does not count
            self._since, self._uncounted, self._is_warm = now, self._done, True
        shown = f"{_short(rate)} {self._unit}/s {self._note}".rstrip() if rate else self._note
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=self._done, rate=shown)
        elif time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            percent = 100 * self._done / max(self._total, 1)
            left = f"{human_seconds((self._total - self._done) / rate)} left" if rate else ""
            parts = (f"{percent:.0f} % of {_short(self._total)}", shown, left)
            console.print(f"{self._what}: {', '.join(part for part in parts if part)}")


class _Terminal:
    """The command line's `Progress`."""

    @contextmanager
    def bar(self, what: str, total: int, unit: str) -> Iterator[progress.Bar]:
        if not sys.stderr.isatty():
            yield _Bar(what, total, unit, None, None)
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}", markup=False),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as live:
            yield _Bar(what, total, unit, live, live.add_task(visible(what), total=total, rate=""))

    def note(self, message: str) -> None:
        console.print(message)

    def warn(self, message: str) -> None:
        console.print(f"Warning: {message}", style="yellow")


TERMINAL: progress.Progress = _Terminal()
"""What every command passes to the library."""


def _short(count: float) -> str:
    for unit in ("", "k", "M"):
        if abs(count) < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}G"
