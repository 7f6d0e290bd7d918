"""Commands that run several jobs: how many at a time, where, and one for each seed. Nothing here imports torch."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dmsae.commands.terminal import TERMINAL
from dmsae.config import require_whole, to_dict
from dmsae.disk import layout
from dmsae.errors import ConfigError
from dmsae.sweeps.cluster import ClusterConfig, EngineKind
from dmsae.sweeps.job import Job, was_done
from dmsae.sweeps.sweep import make_engine, run_jobs


@dataclass(frozen=True)
class FanOut:
    """How many jobs run at a time, and where."""

    jobs: int | None = None
    """Jobs at a time. More than one share the cores of this machine, and its GPUs. Default: one, in this process; on a
    cluster all of them."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Where jobs run. A recipe has a table [cluster] for it."""

    def __post_init__(self) -> None:
        if self.jobs is not None:
            require_whole("jobs", self.jobs, 1)

    def at_once(self, n: int) -> int:
        """Return how many of n jobs run at a time."""
        if self.jobs is not None:
            return self.jobs
        return 1 if self.cluster.engine is EngineKind.LOCAL else max(1, n)


def sweep(jobs: Sequence[Job], run: Path, fan_out: FanOut) -> None:
    """Run what is left of some jobs; raise at the end if one of them failed."""
    at_once = fan_out.at_once(len(jobs))
    left = sum(not job.is_done for job in jobs)
    TERMINAL.note(f"{left} of {len(jobs)} jobs to run, {at_once} at a time. To see how they do: dmsae status {run}")
    run_jobs(jobs, run, make_engine(fan_out.cluster, at_once, TERMINAL), at_once, TERMINAL)


def seed_jobs(
    seeds: Sequence[int], of_seed: Callable[[int, Path], Any], run: Callable[[Any], None], out: Path
) -> list[Job]:
    """Return a job for each seed: `run`, given the command that `of_seed` makes of the seed and its directory."""
    jobs = []
    for seed in dict.fromkeys(seeds):
        directory = layout.seed_directory(out, seed)
        one = of_seed(seed, directory)
        is_done = was_done(out, directory.name, to_dict(one)) and (directory / layout.SETTINGS).is_file()
        jobs.append(Job(directory.name, partial(run, one), to_dict(one), is_done=is_done))
    return jobs


def require_sweepable(out: Path) -> None:
    """Raise unless jobs can be started from here, each with a directory of its own below `out`."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("--seeds starts a process for each seed: leave out torchrun, or give one --seed at a time.")
    if (out / layout.SETTINGS).is_file():
        raise ConfigError(f"{out} holds a run. Several seeds need a directory of their own: give a new one.")
