"""A sweep: jobs that run beside each other, each by itself.

A job starts when those that it needs are done. One that fails stops no other, except those that need it. What is done
is not run again, and what an earlier command left at work is waited for.
"""

import socket
import time
from collections.abc import Sequence
from pathlib import Path

from dmsae.disk import layout
from dmsae.disk.files import exclusive_lock
from dmsae.disk.run import running_process
from dmsae.errors import BusyError, SweepError, first_line
from dmsae.progress import SILENT, Progress, human_seconds
from dmsae.sweeps.cluster import ClusterConfig, EngineKind
from dmsae.sweeps.engines import Asked, Engine, Handle, LocalProcesses, Slurm, ThisProcess
from dmsae.sweeps.job import Job, JobState, ended, job_directory, read_status, waiting, write_status
from dmsae.sweeps.ray import Ray


def make_engine(cluster: ClusterConfig, at_once: int, progress: Progress = SILENT) -> Engine:
    """Return what starts jobs where a cluster's settings say, `at_once` of them at a time."""
    match cluster.engine:
        case EngineKind.SLURM:
            return Slurm(cluster)
        case EngineKind.RAY:
            return Ray(cluster)
    return ThisProcess(progress) if at_once == 1 else LocalProcesses.of_all(at_once)


def run_jobs(jobs: Sequence[Job], run: Path, engine: Engine, at_once: int, progress: Progress = SILENT) -> None:
    """Run what is left of some jobs, at most `at_once` at a time; raise at the end if some were not done.

    On `KeyboardInterrupt` those of this machine are told to save and end.
    """
    with exclusive_lock(run / layout.JOBS / layout.LOCK, f"The sweep in {run}"):
        sweep = _Sweep(jobs, run.resolve(), engine, at_once, progress)
        try:
            while sweep.is_unfinished:
                sweep.step()
        except BaseException:
            sweep.stop()
            raise
    left = [job.name for job in jobs if read_status(job_directory(run, job.name)).state is not JobState.DONE]
    if left:
        shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        raise SweepError(
            f"{len(left)} of {len(jobs)} jobs failed, or need one that did: {shown}. Look at why: dmsae status {run}. "
            "The same command runs them again."
        )


class _Sweep:
    """The jobs of a sweep on their way: open, running, and done."""

    def __init__(self, jobs: Sequence[Job], run: Path, engine: Engine, at_once: int, progress: Progress) -> None:
        self._run, self._engine, self._at_once, self._progress = run, engine, at_once, progress
        self._names = {job.name for job in jobs}
        self._open: list[Job] = []
        self._running: list[tuple[Job, Handle]] = []
        self._done: set[str] = set()
        for job in jobs:
            if handle := self._prepare(job):
                self._running.append((job, handle))
                progress.note(f"{job.name}: at work since an earlier command; waiting for it.")
            elif job.is_done:
                self._done.add(job.name)
            else:
                self._open.append(job)

    @property
    def is_unfinished(self) -> bool:
        """Whether a job runs, or can be started."""
        return bool(self._running) or any(self._is_ready(job) for job in self._open)

    def step(self) -> None:
        """Start what can be started, wait a little, and look at what has ended."""
        room = max(0, self._at_once - len(self._running))  # an earlier command may have left more at work
        for job in [job for job in self._open if self._is_ready(job)][:room]:
            self._open.remove(job)
            self._start(job)
        time.sleep(self._engine.poll_seconds)
        over = [(job, handle) for job, handle in self._running if handle.is_over()]
        self._running = [pair for pair in self._running if pair not in over]
        for job, handle in over:
            self._settle(job, isinstance(handle, _Held))

    def _start(self, job: Job) -> None:
        """Start a job; one that cannot be started has failed, and stops no other."""
        directory = job_directory(self._run, job.name)
        self._progress.note(f"{job.name}: started.")
        try:
            self._running.append((job, self._engine.start(job, directory)))
        except SweepError as error:
            with exclusive_lock(directory / layout.LOCK, f"The job {job.name}"):
                write_status(directory, ended(waiting(job), str(error)))
            self._progress.warn(f"{job.name}: failed: {first_line(error)}.")

    def stop(self) -> None:
        """Tell jobs to end that would end with this process anyway, and wait until they have saved what they had."""
        if self._engine.outlives_us:
            self._progress.note(f"{len(self._running)} jobs stay on the cluster. The same command waits for them.")
            return
        if self._running:
            self._progress.note(f"{len(self._running)} jobs save what they have, and end.")
        while left := [handle for _, handle in self._running if not handle.is_over()]:
            for handle in left:
                handle.stop()
            if all(isinstance(handle, _Held) and not handle.is_here for handle in left):
                return
            time.sleep(self._engine.poll_seconds)

    def _prepare(self, job: Job) -> Handle | None:
        """Write down that a job waits, or is done; return it if an earlier command left it at work."""
        directory = job_directory(self._run, job.name)
        if not job.is_done and (queued := self._engine.find(directory)) is not None:
            return queued
        try:
            with exclusive_lock(directory / layout.LOCK, f"The job {job.name}"):
                if not (job.is_done and (directory / layout.STATUS).is_file()):
                    write_status(directory, waiting(job))
        except BusyError:
            if running_process(directory) is None:
                raise
            return _Held(directory)
        return None

    def _is_ready(self, job: Job) -> bool:
        return all(name in self._done for name in job.needs if name in self._names)

    def _settle(self, job: Job, was_held: bool) -> None:
        """Take note of how a job ended."""
        directory = job_directory(self._run, job.name)
        status = read_status(directory)
        took = f" after {human_seconds(status.seconds)}" if status.seconds is not None else ""
        if status.state is JobState.DONE:
            self._done.add(job.name)
            self._progress.note(f"{job.name}: done{took}. {len(self._done)} of {len(self._names)} jobs are done.")
        elif was_held:
            self._open.append(job)  # it was not ours, and may well have been told to stop
        elif status.state is JobState.FAILED:
            self._progress.warn(f"{job.name}: failed{took}: {first_line(SweepError(status.cause))}.")
        else:
            self._progress.warn(f"{job.name}: ended without a word: killed, or out of memory. See {directory}.")


class _Held:
    """A job that a process works on which an earlier command started."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._asked = directory, Asked()

    @property
    def is_here(self) -> bool:
        """Whether it runs on this machine."""
        return read_status(self._directory).host == socket.gethostname()

    def is_over(self) -> bool:
        return running_process(self._directory) is None

    def stop(self) -> None:
        if (process := running_process(self._directory)) is not None and self.is_here:
            self._asked.to_end(process)
