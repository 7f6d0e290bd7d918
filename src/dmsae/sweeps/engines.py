"""What starts jobs: this process itself, or processes and a Slurm cluster through submitit.

submitit (https://github.com/facebookincubator/submitit) is an extra: `pip install dmsae[sweep]`. Ray is in `ray.py`.
"""

import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from dmsae.errors import SweepError, first_line
from dmsae.progress import SILENT, Progress
from dmsae.sweeps.cluster import ClusterConfig
from dmsae.sweeps.job import Job, JobState, read_status
from dmsae.sweeps.work import Work, attempt

if TYPE_CHECKING:
    import submitit

_YEAR_MINUTES = 365 * 24 * 60
"""submitit ends local jobs after a time; this one never comes."""
_ASK_AGAIN_SECONDS = 30.0
"""How long a job that was told to stop may take to save what it has."""


class Handle(Protocol):
    """A job that has been started."""

    def is_over(self) -> bool:
        """Return whether it has ended, in whatever way."""

    def stop(self) -> None:
        """Tell it to save and end, if it ends with this process; may be called again and again."""


class Engine(Protocol):
    """What starts jobs."""

    poll_seconds: float
    """How long to wait between two looks at them."""
    outlives_us: bool
    """Whether jobs go on when this process ends."""

    def start(self, job: Job, directory: Path) -> Handle:
        """Start a job, whose folder is given."""

    def find(self, directory: Path) -> Handle | None:
        """Return the job that an earlier command started in this folder, if it still waits to be run."""


class Over:
    """A job that has ended."""

    def is_over(self) -> bool:
        return True

    def stop(self) -> None:
        pass


class ThisProcess:
    """Runs each job at once, here, and prints what it prints. Needs nothing else."""

    poll_seconds, outlives_us = 0.0, False

    def __init__(self, progress: Progress = SILENT) -> None:
        self._progress = progress

    def start(self, job: Job, directory: Path) -> Handle:
        try:
            attempt(job, directory, self._progress)
        except Exception:
            if read_status(directory).state is not JobState.FAILED:  # otherwise that says why
                raise
        return Over()

    def find(self, directory: Path) -> Handle | None:
        return None


class LocalProcesses:
    """A process of this machine for each job; n of them at a time share its cores and GPUs."""

    poll_seconds, outlives_us = 0.1, False

    def __init__(self, n: int, n_threads: int, gpus: Sequence[str] = ()) -> None:
        self._submitit = require_submitit(f"--jobs {n}")
        self._n_threads, self._gpus = max(1, n_threads // n), gpus
        self._slots: list[Handle] = [Over()] * n

    @classmethod
    def of_all(cls, n: int) -> "LocalProcesses":
        """Return n processes that share all threads and GPUs that this one would use."""
        import torch

        return cls(
            n, torch.get_num_threads(), gpu_names(os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count())
        )

    def start(self, job: Job, directory: Path) -> Handle:
        slot = next(i for i, handle in enumerate(self._slots) if handle.is_over())
        gpus = self._gpus[slot % len(self._gpus)] if self._gpus else ""
        executor = self._submitit.LocalExecutor(directory)
        executor.update_parameters(timeout_min=_YEAR_MINUTES, stderr_to_stdout=True)
        with _interrupts_kept_from_children():
            started = executor.submit(Work(job, directory, Path.cwd(), self._n_threads, gpus))
        self._slots[slot] = _LocalHandle(started)
        return self._slots[slot]

    def find(self, directory: Path) -> Handle | None:
        return None  # one that still runs holds its lock, and there are none that wait


class _LocalHandle:
    """A process of submitit's, which starts that of the job and passes SIGTERM on to it."""

    def __init__(self, job: "submitit.Job[Any]") -> None:
        self._job, self._asked = job, Asked()

    def is_over(self) -> bool:
        return self._job.done()

    def stop(self) -> None:
        if not self.is_over():
            self._asked.to_end(int(self._job.job_id))


class Asked:
    """Asks a process to end: a training then saves. Asked again, it ends at once, so that it gets time in between."""

    def __init__(self) -> None:
        self._last: float | None = None

    def to_end(self, process: int) -> None:
        """Send SIGTERM, unless one was sent a moment ago."""
        now = time.monotonic()
        if self._last is None or now - self._last > _ASK_AGAIN_SECONDS:
            self._last = now
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(process, signal.SIGTERM)


class Slurm:
    """A Slurm cluster."""

    poll_seconds, outlives_us = 2.0, True

    def __init__(self, cluster: ClusterConfig) -> None:
        self._submitit = require_submitit("--cluster.engine slurm")
        for command in ("sbatch", "srun"):
            if shutil.which(command) is None:
                raise SweepError(f"There is no {command} here: run this where Slurm is, or leave out --cluster.engine.")
        self._cluster = cluster

    def start(self, job: Job, directory: Path) -> Handle:
        executor = self._submitit.SlurmExecutor(directory)
        executor.update_parameters(**slurm_parameters(self._cluster, f"dmsae-{job.name}"))
        try:
            started = executor.submit(Work(job, directory, Path.cwd(), self._cluster.cpus))
        except self._submitit.core.utils.FailedJobError as error:
            raise SweepError(f"sbatch did not take the job {job.name}: {first_line(error)}.") from error
        return _SlurmHandle(started)

    def find(self, directory: Path) -> Handle | None:
        scripts = sorted(directory.glob("*_submission.sh"), key=lambda path: path.stat().st_mtime)
        for script in scripts[-1:]:
            job: submitit.SlurmJob[None] = self._submitit.SlurmJob(directory, script.name.partition("_")[0])
            if job.get_info().get("State") and not job.done():
                return _SlurmHandle(job)
        return None


class _SlurmHandle:
    def __init__(self, job: "submitit.Job[Any]") -> None:
        self._job = job

    def is_over(self) -> bool:
        return self._job.done()

    def stop(self) -> None:
        """Leave it on the cluster."""


def slurm_parameters(cluster: ClusterConfig, name: str) -> dict[str, Any]:
    """Return what submitit is told about a job on Slurm."""
    parameters: dict[str, Any] = {
        "job_name": name,
        "time": max(1, round(60 * cluster.hours)),
        "cpus_per_task": cluster.cpus,
        "stderr_to_stdout": True,
        "additional_parameters": {key: value or True for key, value in cluster.directives.items()},
    }
    if cluster.partition:
        parameters["partition"] = cluster.partition
    if cluster.memory_gb:
        parameters["mem"] = f"{max(1, round(1024 * cluster.memory_gb))}M"
    if cluster.gpus:
        parameters["gpus_per_node"] = cluster.gpus
    if cluster.setup:
        parameters["setup"] = list(cluster.setup)
    return parameters


def require_submitit(wanted: str) -> ModuleType:
    """Return the package submitit, or raise an error that says how to install it."""
    try:
        import submitit
    except ImportError as error:
        raise SweepError(
            f"{wanted} needs the package submitit: pip install 'dmsae[sweep]'. Jobs that run one after another, "
            "--jobs 1, need nothing else."
        ) from error
    return submitit


def gpu_names(visible: str | None, count: int) -> list[str]:
    """Return the names of the GPUs that this process may use."""
    if not count:
        return []
    return visible.split(",")[:count] if visible else [str(i) for i in range(count)]


@contextmanager
def _interrupts_kept_from_children() -> Iterator[None]:
    """Start processes that Ctrl-C in the terminal does not reach: we get it, and tell them to save and end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
