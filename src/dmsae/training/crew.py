"""A command on a mesh: the first rank runs it as if it were alone, the others take part in the trainings it starts.

The first rank reads, harvests, scores, selects, prints and holds the locks. When it comes to a training it sends the
others what they need to take part: the SAEs, the settings, and how to open the activations. Between trainings they
wait. An error of the first rank ends all of them, with the same message.
"""

import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dmsae.activations.sources import ActivationSource
from dmsae.config import Json
from dmsae.errors import DmsaeError, LostRankError, MeshError
from dmsae.progress import SILENT, Progress
from dmsae.sae.comms import ALONE, Comms, settled
from dmsae.training.config import TrainConfig
from dmsae.training.learner import SAESpec
from dmsae.training.mesh import MeshConfig, join, leave
from dmsae.training.result import TrainResult
from dmsae.training.trainer import train_together


class Job(NamedTuple):
    """A training, as the first rank sends it to the others."""

    specs: Sequence[SAESpec]
    source: ActivationSource
    directory: Path
    config: TrainConfig | None
    made_from: Json | None

    def run(self, progress: Progress, comms: Comms) -> list[TrainResult]:
        """Take part in the training."""
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
    job = Job(specs, source, directory, config, made_from)
    if comms.both.size > 1:
        job = job._replace(directory=directory.resolve())
        _send(job, comms)
    return job.run(progress, comms)


def run_on_mesh(config: MeshConfig, device: str, settings: Json, command: Callable[[Comms], None]) -> None:
    """Run a command with the mesh that torchrun has started, or alone; all ranks must have these settings."""
    comms = join(config, device, settings)
    if comms is ALONE:
        command(ALONE)
        return
    try:
        _lead(comms, command) if comms.is_first else follow(comms)
    finally:
        leave()


def _lead(comms: Comms, command: Callable[[Comms], None]) -> None:
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
    """Take part in every training that the first rank starts, until it has nothing more to do."""
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
