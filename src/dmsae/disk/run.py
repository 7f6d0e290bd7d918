"""The directory of a run: its settings, and the lock of the process that works in it.

The same command run again resumes where it stopped, also after a signal. A directory made with other settings is
refused, the difference is shown, and nothing in it is touched.
"""

import fcntl
import json
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from dmsae.config import Json
from dmsae.disk import layout
from dmsae.disk.files import exclusive_lock, open_regular, read_json_value, write_json
from dmsae.errors import CheckpointError, ConfigError, DmsaeError

_LEFTOVERS = (layout.LOCK, f"{layout.SETTINGS}.tmp")
"""What a run leaves that was killed before it wrote its settings."""


@contextmanager
def claimed(directory: Path, settings: Json, may_change: Sequence[str] = ()) -> Iterator[None]:
    """Hold a directory for the run that `settings` describe, as long as the block lasts.

    Settings named in `may_change` may differ from those on disk, which are then brought up to date. When the block
    fails with an error of ours before anything was written, the directory is left as it was: nothing has begun.
    """
    _require_run_or_empty(directory)
    path, lock = directory / layout.SETTINGS, directory / layout.LOCK
    created = [place for place in (lock, directory, *directory.parents) if not place.exists()]
    never_began = False
    try:
        with exclusive_lock(lock, f"The run in {directory}"):
            require_claimable(directory, settings, may_change)
            is_new = not path.is_file()
            if is_new or read_settings(directory) != _as_json(settings):
                write_json(path, settings)
            try:
                yield
            except DmsaeError:
                never_began = is_new and not _others(directory, (*_LEFTOVERS, layout.SETTINGS))
                if never_began:
                    _remove([path, *(place for place in created if place == lock)])  # while the lock is still held
                raise
    finally:
        if never_began:
            _remove(created)


def require_claimable(directory: Path, settings: Json, may_change: Sequence[str] = ()) -> None:
    """Raise unless a directory is empty, or holds the run that `settings` describe."""
    _require_run_or_empty(directory)
    if (directory / layout.SETTINGS).is_file():
        _refuse_other(directory, settings, may_change)


def running_process(directory: Path) -> int | None:
    """Return the process that works in a directory now, if there is one; its lock is looked at, never kept."""
    try:
        with open_regular(directory / layout.LOCK) as file:
            # Whoever ends in order empties the file, so an idle directory's lock is not even probed.
            if not (holder := file.read(32).decode("ascii", "replace").strip()):
                return None
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(holder) if holder.isdigit() else None
            return None
    except OSError:
        return None


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
        settings: Json = read_json_value(path)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{directory} holds no run: {_look_around(directory)}") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}. Restore it, or use a new directory.") from error
    if not isinstance(settings, dict):
        raise CheckpointError(
            f"{path} holds a {type(settings).__name__}, not settings. Restore it, or use a new directory."
        )
    return settings


def require_distillation(run: Path) -> Json:
    """Return the settings of a distillation, or raise when a directory holds something else."""
    settings = read_settings(run)
    if settings.get("kind") != "distill":
        raise ConfigError(f"{run} holds {_kind(settings)}, and this needs a distillation.")
    return settings


def differences(old: Any, new: Any, name: str = "") -> list[str]:
    """Return one line per setting that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        inner = {key: f"{name}.{key}" if name else key for key in [*old, *(key for key in new if key not in old)]}
        return [line for key, path in inner.items() for line in differences(old.get(key), new.get(key), path)]
    return [] if old == new else [f"{name}: was {json.dumps(old)}, now {json.dumps(new)}"]


def _require_run_or_empty(directory: Path) -> None:
    try:
        os.fspath(directory).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{directory}: the name is not UTF-8. Give a directory whose name is.") from None
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file; give a directory for the results.")
    if not (directory / layout.SETTINGS).is_file() and (others := _others(directory)):
        raise ConfigError(
            f"{directory} is not empty and holds no run (there is {others[0]}): {layout.SETTINGS} is missing. Restore "
            "it, or give a new or empty directory."
        )


def _others(directory: Path, besides: Sequence[str] = _LEFTOVERS) -> list[str]:
    return sorted(file.name for file in directory.iterdir() if file.name not in besides) if directory.is_dir() else []


def _remove(created: list[Path]) -> None:
    """Remove what was created for nothing, up to the first directory that holds something."""
    for place in created:
        try:
            place.rmdir() if place.is_dir() else place.unlink(missing_ok=True)
        except OSError:
            return


def _refuse_other(directory: Path, settings: Json, may_change: Sequence[str]) -> None:
    before, now = read_settings(directory), _as_json(settings)
    if (kind := _kind(before)) != (wanted := _kind(now)):
        raise ConfigError(
            f"{directory} holds {kind}, as its {layout.SETTINGS} says, and this is {wanted}: give a new directory."
        )
    old, new = ({key: value for key, value in one.items() if key not in may_change} for one in (before, now))
    if changed := differences(old, new):
        shown = "\n  ".join(changed)
        raise ConfigError(
            f"{directory} was made with other settings, as its {layout.SETTINGS} says:\n  {shown}\nUse the old "
            "settings to resume it, or give a new directory. Nothing has been changed."
        )


def _kind(settings: Json) -> str:
    """Return what a run is, in words."""
    kind, made_from = settings.get("kind"), settings.get("made_from")
    made_from = made_from if isinstance(made_from, dict) else {}
    if kind == "train" and "transferred" in made_from:
        return "a transfer"
    if kind == "train" and "cycle" in made_from:
        return "one cycle of a distillation"
    return {"train": "the training of one SAE", "distill": "a distillation"}.get(str(kind), f"a run of kind {kind!r}")


def _look_around(directory: Path) -> str:
    """Return why a directory holds no run: it is not there, or the runs are below it."""
    if not directory.is_dir():
        return "there is no such directory."
    if below := [path.parent for path in sorted(directory.glob(f"*/{layout.SETTINGS}")) if _is_run(path)]:
        return f"the runs are below it. Give one of {', '.join(map(str, below[:12]))}."
    return f"{directory / layout.SETTINGS} is missing."


def _is_run(path: Path) -> bool:
    try:
        return "kind" in read_json_value(path)
    except (OSError, ValueError, TypeError):
        return False


def _as_json(settings: Json) -> Json:
    """Return settings as they come back from the disk."""
    read: Json = json.loads(json.dumps(settings))
    return read
