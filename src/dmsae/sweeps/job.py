"""A job of a sweep, and how far it has come, as its folder tells. Nothing here imports torch.

    <run>/jobs/<job>/status.json   how far it has come
    <run>/jobs/<job>/log.txt       what it printed, and why it failed
    <run>/jobs/<job>/.lock         held while it runs

What starts jobs keeps its own files in the same folder.
"""

import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from dmsae.config import Json, from_dict, to_dict
from dmsae.disk import layout
from dmsae.disk.files import canonical_hash, open_regular, read_json_value, write_json
from dmsae.disk.run import running_process
from dmsae.errors import CheckpointError, ConfigError

_TAIL_BYTES = 16_384
"""How much of the end of a log is read."""


class Job(NamedTuple):
    """Something that runs by itself, can be resumed, and leaves what it finds on disk."""

    name: str
    """Also the name of its folder."""
    call: Callable[[], object]
    """Does the work. Another process must be able to unpickle it."""
    settings: Json
    """All that the work depends on."""
    needs: tuple[str, ...] = ()
    """Jobs that must be done before this one."""
    is_done: bool = False
    """Whether it was done before this sweep."""


class JobState(StrEnum):
    """How far a job has come."""

    WAITING = "waiting"
    RUNNING = "running"
    STOPPED = "stopped"
    """Interrupted or killed; what it had is kept."""
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class JobStatus:
    """How far a job has come, and where and when it ran."""

    state: JobState
    settings: str = ""
    """A hash of all that the work depends on."""
    needs: tuple[str, ...] = ()
    host: str = ""
    process: int = 0
    began: float | None = None
    """Seconds since 1970, as is `ended`."""
    ended: float | None = None
    cause: str = ""
    """Why it failed."""

    @property
    def seconds(self) -> float | None:
        """How long it took, or has run until now."""
        if self.began is None or self.state is JobState.STOPPED:
            return None
        return (self.ended or time.time()) - self.began


def waiting(job: Job) -> JobStatus:
    """Return the status of a job that has not begun, or does not need to."""
    state = JobState.DONE if job.is_done else JobState.WAITING
    return JobStatus(state, canonical_hash(job.settings), job.needs)


def begun(job: Job) -> JobStatus:
    """Return the status of a job that this process begins now."""
    return replace(
        waiting(job), state=JobState.RUNNING, host=socket.gethostname(), process=os.getpid(), began=time.time()
    )


def ended(status: JobStatus, cause: str = "") -> JobStatus:
    """Return the status of a job that ends now; it failed if there is a cause."""
    return replace(status, state=JobState.FAILED if cause else JobState.DONE, ended=time.time(), cause=cause)


def job_directory(run: Path, job: str) -> Path:
    """Return the folder of a job."""
    return run / layout.JOBS / job


def was_done(run: Path, job: str, settings: Json) -> bool:
    """Return whether a job of this name has been done with these settings."""
    directory = job_directory(run, job)
    if not (directory / layout.STATUS).is_file():
        return False
    status = read_status(directory)
    return status.state is JobState.DONE and status.settings == canonical_hash(settings)


def read_status(directory: Path) -> JobStatus:
    """Return how far the job in a folder has come; one that began and no longer runs was stopped."""
    path = directory / layout.STATUS
    try:
        status = from_dict(JobStatus, read_json_value(path))
    except (OSError, ValueError, ConfigError) as error:
        raise CheckpointError(
            f"{path} does not tell how far a job has come: {error}. Remove {directory}, and run the same command again."
        ) from error
    if status.state is JobState.RUNNING and running_process(directory) is None:
        # It may have ended in between: what it wrote last, it wrote before it let go of its lock.
        status = from_dict(JobStatus, read_json_value(path))
        return replace(status, state=JobState.STOPPED) if status.state is JobState.RUNNING else status
    return status


def write_status(directory: Path, status: JobStatus) -> None:
    """Write how far a job has come; the writer holds its lock."""
    write_json(directory / layout.STATUS, to_dict(status))


def read_board(run: Path) -> dict[str, JobStatus]:
    """Return how far every job of a sweep has come, by name."""
    folders = [path.parent for path in (run / layout.JOBS).glob(f"*/{layout.STATUS}")]
    return {folder.name: read_status(folder) for folder in sorted(folders, key=_natural)}


def last_lines(directory: Path, n: int) -> list[str]:
    """Return the end of a job's log."""
    try:
        with open_regular(directory / layout.LOG) as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            return file.read().decode("utf8", "replace").rstrip().splitlines()[-n:]
    except OSError:
        return []


def _natural(folder: Path) -> list[tuple[int, str]]:
    """Return a key by which seed 2 comes before seed 10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", folder.name)]
