"""Batches that the ranks of a mesh read together."""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from torch import Tensor

from dmsae.activations.shards import ShardMaker
from dmsae.activations.sources import StoreSource
from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.activations.stream import ActivationStream, Cursor
from dmsae.errors import DmsaeError
from dmsae.sae.comms import Comms
from dmsae.training.config import TrainConfig
from dmsae.training.crew import follow, lead, train_on
from mesh_trainings import SHORT, specs


class Streamed(NamedTuple):
    """What one rank got of some batches."""

    batches: list[Tensor]
    read: list[str]
    """The shards that it opened, or the contexts that went through its model."""
    cursor: Cursor


def read_stream(comms: Comms, make: Callable[[], Any], batch_size: int, n: int, at: Cursor | None = None) -> Streamed:
    """Take batches from a stream on all ranks, and note what each of them reads."""
    read: list[str] = []
    of_store, of_model = Store.read, ShardMaker.make

    def opened(self: Store, record: Any) -> Any:
        read.append(record.file)
        return of_store(self, record)

    def made(self: ShardMaker, split: Split, contexts: Any, quota: int, index: int = 0) -> Any:
        read.append(str(index))
        return of_model(self, split, contexts, quota, index)

    stream = ActivationStream(make(), batch_size, 0, "cpu", comms.data, comms.both)
    with patch.object(Store, "read", opened), patch.object(ShardMaker, "make", made), closing(stream):
        stream.seek(at or Cursor())
        return Streamed(list(islice(stream, n)), read, stream.cursor)


def hear_of_stream(comms: Comms, make: Callable[[], Any], batch_size: int, n: int) -> str:
    """Take batches, and return what each rank hears."""
    try:
        read_stream(comms, make, batch_size, n)
    except DmsaeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def train_on_store(comms: Comms, store: Path, directory: Path) -> str:
    """Train on a store, and return what each rank hears."""
    command = partial(_train_on_store, store, directory)
    try:
        lead(comms, command) if comms.is_first else follow(comms)
    except DmsaeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _train_on_store(store: Path, directory: Path, comms: Comms) -> None:
    train_on(comms, specs()[:1], StoreSource(Store.open(store)), directory, TrainConfig(**SHORT))
