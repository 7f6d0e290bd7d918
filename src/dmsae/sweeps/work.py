"""A job at work, in this process or in one that an engine started for it."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from dmsae.disk import layout
from dmsae.disk.files import append_text, exclusive_lock
from dmsae.errors import DmsaeError, SweepError
from dmsae.own_code import code_digest
from dmsae.progress import SILENT, Progress
from dmsae.sweeps.job import Job, begun, ended, write_status

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission


def attempt(job: Job, directory: Path, progress: Progress = SILENT) -> None:
    """Do the work of a job, and write down how it ends; another process that already does it is waited for."""
    with exclusive_lock(directory / layout.LOCK, f"The job {job.name}", progress):
        status = begun(job)
        write_status(directory, status)
        try:
            job.call()
        except Exception as error:
            is_ours = isinstance(error, DmsaeError)
            append_text(directory / layout.LOG, f"error: {error}\n" if is_ours else traceback.format_exc())
            write_status(directory, ended(status, str(error) if is_ours else f"{type(error).__name__}: {error}"))
            raise
        write_status(directory, ended(status))


@dataclass(frozen=True)
class Work:
    """A job on its way to a process of its own. Engines pickle it, and call it there."""

    job: Job
    directory: Path
    """The folder of the job, whose log takes all that the process prints."""
    at: Path
    """The working directory."""
    n_threads: int | None = None
    """How many threads torch uses. None: as many as it likes."""
    gpus: str | None = None
    """Which GPUs it sees. None: what the engine says."""
    code: str = field(default_factory=code_digest)
    """The code that made it: other code may read its settings wrongly."""

    def __call__(self) -> None:
        with chdir(self.at), _printing_to(self.directory / layout.LOG), _stoppable():
            self._take_share()
            _Printed().note(f"{self.job.name} begins.")  # below what an earlier attempt may have left
            try:
                same = self.code == code_digest()
                attempt(self.job if same else self.job._replace(call=_refuse), self.directory, _Printed())
            except KeyboardInterrupt:
                append_text(self.directory / layout.LOG, "Interrupted. What was finished is kept.\n")
                raise SystemExit(130) from None

    def checkpoint(self) -> "DelayedSubmission":
        """Return what submitit puts into the queue again when the time is up: the same job, which resumes."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def _take_share(self) -> None:
        """Leave the other jobs of the machine their share of it."""
        if self.gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.gpus
        if self.n_threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(self.n_threads)
            if "torch" in sys.modules:  # it came with what was unpickled; imported later, it reads the variable
                sys.modules["torch"].set_num_threads(self.n_threads)


def _refuse() -> None:
    raise SweepError("dmsae has changed since the sweep was started. Run the same command again.")


class _Printed:
    """Prints what a job waits for, into its log. It has no bars."""

    def bar(self, what: str, total: int, unit: str) -> Any:
        return SILENT.bar(what, total, unit)

    def note(self, message: str) -> None:
        os.write(2, f"{message}\n".encode())

    warn = note


@contextmanager
def _printing_to(log: Path) -> Iterator[None]:
    """Send all that this process prints to the end of a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = os.dup(1), os.dup(2)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        os.dup2(file, 1)
        os.dup2(file, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, old in zip((1, 2), before, strict=True):
            os.dup2(old, number)
        for opened in (file, *before):
            os.close(opened)


@contextmanager
def _stoppable() -> Iterator[None]:
    """Let SIGTERM interrupt, as Ctrl-C does: a training saves first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
