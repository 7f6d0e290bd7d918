"""The directory of a run: its settings, and the lock of the process that works in it.

The same command run again resumes where it stopped, also after a signal. A directory made with other settings is
refused, the difference is shown, and nothing in it is touched.
"""

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from dmsae.config import Json
from dmsae.disk import layout
from dmsae.disk.files import exclusive_lock, write_json
from dmsae.errors import CheckpointError, ConfigError

_LEFTOVERS = (layout.LOCK, f"{layout.SETTINGS}.tmp")
"""What a run leaves that was killed before it wrote its settings."""


@contextmanager
def claimed(directory: Path, settings: Json) -> Iterator[None]:
    """Hold a directory for the run that `settings` describe, as long as the block lasts."""
    _require_run_or_empty(directory)
    with exclusive_lock(directory / layout.LOCK, f"The run in {directory}"):
        require_claimable(directory, settings)
        if not (directory / layout.SETTINGS).is_file():
            write_json(directory / layout.SETTINGS, settings)
        yield


def require_claimable(directory: Path, settings: Json) -> None:
    """Raise unless a directory is empty, or holds the run that `settings` describe."""
    _require_run_or_empty(directory)
    if (directory / layout.SETTINGS).is_file():
        _refuse_other(directory, settings)


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM so that work can be saved first; a second one has its usual effect."""
    received: list[int] = []
    previous: dict[int, Any] = {}

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, previous[number])

    # Only the main thread receives signals; one that the parent told us to ignore stays ignored.
    if threading.current_thread() is threading.main_thread():
        handlers = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        previous = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
    try:
        for number in previous:
            signal.signal(number, note)
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def read_settings(directory: Path) -> Json:
    """Return the settings that a directory was made with."""
    path = directory / layout.SETTINGS
    try:
        settings: Json = json.loads(path.read_text(encoding="utf8"))
    except FileNotFoundError:
        raise CheckpointError(f"{directory} holds no run: {path} is missing.") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}. Restore it, or use a new directory.") from error
    return settings


def differences(old: Any, new: Any, name: str = "") -> list[str]:
    """Return one line per setting that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        inner = {key: f"{name}.{key}" if name else key for key in [*old, *(key for key in new if key not in old)]}
        return [line for key, path in inner.items() for line in differences(old.get(key), new.get(key), path)]
    return [] if old == new else [f"{name}: was {json.dumps(old)}, now {json.dumps(new)}"]


def _require_run_or_empty(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file; give a directory for the results.")
    if not (directory / layout.SETTINGS).is_file() and (others := _others(directory)):
        raise ConfigError(
            f"{directory} is not empty and holds no run (there is {others[0]}). Give a new or empty directory."
        )


def _others(directory: Path) -> list[str]:
    return (
        sorted(file.name for file in directory.iterdir() if file.name not in _LEFTOVERS) if directory.is_dir() else []
    )


def _refuse_other(directory: Path, settings: Json) -> None:
    changed = differences(read_settings(directory), json.loads(json.dumps(settings)))
    if changed:
        shown = "\n  ".join(changed)
        raise ConfigError(
            f"{directory} was made with other settings:\n  {shown}\nUse the old settings to resume it, or give a new "
            "directory. Nothing has been changed."
        )
