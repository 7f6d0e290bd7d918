"""A command on a mesh: the first rank runs it as if it were alone, the others take part in the jobs it has for them.

The first rank reads, selects, prints and holds the locks. When it comes to a job for all (a harvest, a training, scores
of latents) it sends the others what they need to take part, such as settings and how to open the activations. Between
jobs they wait. An error of the first rank ends all of them, with the same message.
"""

import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from dmsae.activations.harvest import Harvest
from dmsae.activations.sources import ActivationSource
from dmsae.activations.store import Store
from dmsae.config import Json, to_dict
from dmsae.errors import DmsaeError, LostRankError, MeshError
from dmsae.progress import SILENT, Progress
from dmsae.ranks import settled
from dmsae.sae.comms import ALONE, Comms
from dmsae.training.config import TrainConfig
from dmsae.training.learner import SAESpec
from dmsae.training.mesh import MeshConfig, join, leave, require_same
from dmsae.training.result import TrainResult
from dmsae.training.trainer import train_together

T = TypeVar("T")


class Job(Protocol):
    """Something for all ranks to do, as the first one sends it to the others."""

    def run(self, progress: Progress, comms: Comms) -> Any:
        """Take part in it."""


class _Harvest(NamedTuple):
    harvest: Harvest

    def run(self, progress: Progress, comms: Comms) -> Store:
        require_same(to_dict(self.harvest.request), comms.both)
        return self.harvest.run(comms.both)


class _Training(NamedTuple):
    specs: Sequence[SAESpec]
    source: ActivationSource
    directory: Path
    config: TrainConfig | None
    made_from: Json | None

    def run(self, progress: Progress, comms: Comms) -> list[TrainResult]:
        return train_together(
            self.specs, self.source, self.directory, self.config, self.made_from, progress, comms=comms
        )


class _Dismissal(NamedTuple):
    """What the first rank sends when it has nothing more to do."""

    error: str | None


def train_on(
    comms: Comms,
    specs: Sequence[SAESpec],
    source: ActivationSource,
    directory: Path,
    config: TrainConfig | None = None,
    made_from: Json | None = None,
    progress: Progress = SILENT,
) -> list[TrainResult]:
    """Train SAEs together, as `train_together` does, with all ranks of a mesh whose first one calls this."""
    where = directory.resolve() if comms.both.size > 1 else directory
    result: list[TrainResult] = share(comms, _Training(specs, source, where, config, made_from), progress)
    return result


def harvest_on(comms: Comms, harvest: Harvest) -> Store:
    """Return the store of a harvest, with its shards made by all ranks of a mesh whose first one calls this."""
    store: Store = share(comms, _Harvest(harvest))
    return store


def share(comms: Comms, job: Job, progress: Progress = SILENT) -> Any:
    """Do a job with all ranks of a mesh whose first one calls this, and return what it gives there."""
    if comms.both.size > 1:
        _send(job, comms)
    return job.run(progress, comms)


def run_on_mesh(config: MeshConfig, device: str, settings: Json, command: Callable[[Comms], Any]) -> None:
    """Run a command with the mesh that torchrun has started, or alone; all ranks must have these settings."""
    comms = join(config, device, settings)
    if comms is ALONE:
        command(ALONE)
        return
    try:
        lead(comms, command) if comms.is_first else follow(comms)
    finally:
        leave()


def run_on_all(config: MeshConfig, device: str, settings: Json, command: Callable[[Comms], T]) -> T:
    """Run a command on every rank of the mesh that torchrun has started, or alone, and return what it gives."""
    comms = join(config, device, settings)
    try:
        return command(comms)
    finally:
        leave()


def lead(comms: Comms, command: Callable[[Comms], Any]) -> None:
    """Run a command on the first rank, with the others at hand for its jobs until it ends."""
    try:
        command(comms)
    except MeshError:
        raise  # the others have it too, or are gone
    except DmsaeError as error:
        with suppress(LostRankError):
            _send(_Dismissal(str(error)), comms)
        raise
    _send(_Dismissal(None), comms)


def follow(comms: Comms) -> None:
    """Take part in every job that the first rank has, until there is nothing more to do."""
    while True:
        sent = comms.both.of_first(b"")
        with settled(comms.both):
            job: Job | _Dismissal = pickle.loads(sent)  # from our own first rank; opens the activations here
        if isinstance(job, _Dismissal):
            if job.error is not None:
                raise MeshError(f"Rank 0 of {comms.both.size}: {job.error}")
            return
        try:
            job.run(SILENT, comms)
        except MeshError:
            raise
        except DmsaeError:
            continue  # all ranks have it, and what follows from it is for the first to say


def _send(job: Job | _Dismissal, comms: Comms) -> None:
    comms.both.of_first(pickle.dumps(job))
    comms.both.settle(None)
