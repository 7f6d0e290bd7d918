"""A mesh of data × latents on torch.distributed, under torchrun: nccl on GPUs, gloo on CPUs.

    torchrun --nproc-per-node 4 -m dmsae train … --mesh.data 2 --mesh.latents 2

Rank d·n_latents + l is the place (d, l). What ranks exchange is written down in `sae/comms.py`. A rank that is lost
closes its connections, and every other then ends with a `LostRankError`; one that stays silent is given up after
`timeout_seconds`. Either way torchrun sees failed ranks, and restarts all of them if it was told to (`--max-restarts`):
the run resumes from its last checkpoint.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from dmsae.config import Json, require, require_whole
from dmsae.devices import training_device
from dmsae.disk.run import differences
from dmsae.errors import ConfigError, DmsaeError, LostRankError, MeshError, first_line
from dmsae.own_code import code_digest
from dmsae.ranks import Axis
from dmsae.sae.comms import ALONE, Comms
from dmsae.training.shared_memory import add_up_, shared_among

T = TypeVar("T")

_PATIENCE = timedelta(days=7)
"""How long ranks wait for the first one to have something to do: it may harvest or score meanwhile. Should it die, they
hear of it at once."""

_RECORDS = "TORCH_FR_BUFFER_SIZE"
"""The variable that says how many of its last exchanges torch keeps a record of, to debug a hang. With gloo the records
come to lie between the tensors of a step, and the heap grows around them; there are none unless it is set."""


@dataclass(frozen=True, slots=True)
class MeshConfig:
    """How training is spread over the processes that torchrun starts; data × latents is their number."""

    data: int = 1
    """Parts into which every batch is split. Ranks with different parts read different shards of the store, which must
    have at least as many."""
    latents: int = 1
    """Parts into which the latents of every SAE are split, with their gradients and Adam state."""
    timeout_seconds: float = 1800.0
    """A rank that stays silent for this long during training is given up."""
    share_memory: bool = True
    """Whether ranks on one machine's CPU sum gradients in memory that they share. Changes the time, and with more than
    two parts of a batch the rounding."""

    def __post_init__(self) -> None:
        require_whole("mesh.data", self.data, 1)
        require_whole("mesh.latents", self.latents, 1)
        require(0 < self.timeout_seconds < 1e9, "mesh.timeout_seconds", self.timeout_seconds, "be a positive number")

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.data * self.latents


class Group:
    """An axis of a mesh: a process group of torch.distributed."""

    def __init__(
        self, group: dist.ProcessGroup, waiting: dist.ProcessGroup | None = None, share_memory: bool = False
    ) -> None:
        self._group, self._waiting, self._share_memory = group, waiting or group, share_memory
        self._held: dict[int, list[Tensor]] = {}
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group itself, for torch's own collective functions."""
        return self._group

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its sum over the ranks, and return it."""
        if parts := self._held.get(tensor.data_ptr()):
            self._wait()
            add_up_(parts, self.rank)
            self._wait()
            return tensor
        return self._reduce_(tensor, dist.ReduceOp.SUM)

    def holding(self, like: Iterable[Tensor]) -> tuple[Axis, list[Tensor]]:
        """Return this axis, and zeros like some tensors, which its `sum_` does not send where all ranks see them."""
        axis, zeros = copy(self), []
        axis._held = {}
        for tensor in like:
            parts = shared_among(self, tensor) if self._share_memory and self.size > 1 else None
            zeros.append(parts[self.rank] if parts else torch.zeros_like(tensor))
            if parts:
                axis._held[zeros[-1].data_ptr()] = parts
        return axis, zeros

    def min_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its smallest over the ranks, entry by entry, and return it."""
        return self._reduce_(tensor, dist.ReduceOp.MIN)

    def max_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its largest over the ranks, entry by entry, and return it."""
        return self._reduce_(tensor, dist.ReduceOp.MAX)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks in their order; they may differ in their number of rows."""
        if self.size == 1:
            return [tensor]
        with talking():
            mine = torch.tensor([len(tensor)], device=tensor.device)
            counts = [torch.empty_like(mine) for _ in range(self.size)]
            dist.all_gather(counts, mine, self._group)
            most = max(int(count) for count in counts)
            padded = tensor.new_zeros(most, *tensor.shape[1:])
            padded[: len(tensor)] = tensor
            parts = [torch.empty_like(padded) for _ in counts]
            dist.all_gather(parts, padded, self._group)
        return [part[: int(count)] for part, count in zip(parts, counts, strict=True)]

    def of_first(self, value: T) -> T:
        """Return what the first rank gave, however long that takes."""
        box = [value]
        with talking():
            dist.broadcast_object_list(box, group=self._waiting, group_src=0, device=torch.device("cpu"))
        return box[0]

    def of_each(self, value: T) -> list[T]:
        """Return what each rank gave, in their order."""
        box: list[Any] = [None] * self.size
        with talking():
            dist.all_gather_object(box, value, self._group)
        return box

    def settle(self, error: DmsaeError | None) -> None:
        """Raise on every rank when there is an error on one: its own there, elsewhere one that names rank and cause."""
        if not int(self.max_(torch.tensor(error is not None).int())):
            return
        messages = self.of_each(None if error is None else str(error))
        if error is not None and self.rank == 0:
            raise error
        rank, cause = next((rank, cause) for rank, cause in enumerate(messages) if cause is not None)
        raise MeshError(f"Rank {rank} of {self.size}: {cause}") from error

    def _wait(self) -> None:
        """Wait until every rank is here."""
        with talking():
            dist.all_reduce(torch.zeros(1), group=self._group)

    def _reduce_(self, tensor: Tensor, operation: Any) -> Tensor:
        if self.size > 1 and tensor.numel():
            with talking():
                dist.all_reduce(tensor, operation, self._group)
        return tensor


def join(config: MeshConfig, device: str = "auto", facts: Json | None = None) -> Comms:
    """Return this rank's place in the mesh that torchrun has started; `ALONE` when it is one process.

    All ranks must run the same code, with the same facts (such as the settings of the command).
    """
    _require_started(config)
    if "WORLD_SIZE" not in os.environ:
        return ALONE
    backend = "gloo"
    if training_device(device).type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    else:
        os.environ.setdefault(_RECORDS, "0")
    timeout = timedelta(seconds=config.timeout_seconds)
    with talking():
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        # torchrun may keep one store for all attempts, and in it the addresses of ranks that are gone.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    comms = place(config)
    require_same({"code": _code(), "settings": facts or {}}, comms.both)
    return comms


def place(config: MeshConfig) -> Comms:
    """Return this rank's place in a mesh over all processes of the default group."""
    timeout = timedelta(seconds=config.timeout_seconds)
    ranks = torch.arange(config.size).view(config.data, config.latents)
    with talking():
        data = _own_group(ranks.T.tolist(), timeout)
        latents = _own_group(ranks.tolist(), timeout)
        # Objects are small and on the CPU; while the first rank is busy, the others wait here.
        waiting = dist.new_group(backend="gloo", timeout=_PATIENCE)
    world = dist.group.WORLD
    assert world is not None
    return Comms(Group(data, share_memory=config.share_memory), Group(latents), Group(world, waiting))


def leave() -> None:
    """Close all connections."""
    if dist.is_initialized():
        dist.destroy_process_group()


def require_fits(config: MeshConfig, batch_size: int, widths: dict[str, int], n_shards: int | None = None) -> None:
    """Raise unless a batch and every SAE, by name, can be split evenly over a mesh, and each data rank has a shard."""
    must = f"be a multiple of mesh.data ({config.data})"
    require(batch_size % config.data == 0, "batch_size", batch_size, must, "Change one of them.")
    for name, width in widths.items():
        if width % config.latents:
            raise ConfigError(
                f"{name}: width = {width}; it must be a multiple of mesh.latents ({config.latents}). Change one."
            )
    if n_shards is not None:
        must = f"be at most {n_shards}, the training shards of the store: each data rank reads shards of its own"
        remedy = "Give the other processes to mesh.latents, start fewer, or harvest with a smaller shard_tokens."
        require(config.data <= n_shards, "mesh.data", config.data, must, remedy)


def shape_of(comms: Comms) -> MeshConfig:
    """Return the mesh that a rank has its place in."""
    return MeshConfig(comms.data.size, comms.latents.size)


def _own_group(groups: list[list[int]], timeout: timedelta) -> dist.ProcessGroup:
    """Make all of these groups, as every rank must, and return the one that this rank is in."""
    made = [dist.new_group(ranks, timeout=timeout) for ranks in groups]
    rank = dist.get_rank()
    mine: dist.ProcessGroup = next(group for group, ranks in zip(made, groups, strict=True) if rank in ranks)
    return mine


def started() -> int:
    """Return how many processes torchrun has started; 1 when it has started none."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _require_started(config: MeshConfig) -> None:
    """Raise unless as many processes were started as the mesh has places."""
    n_started = started()
    if n_started == config.size:
        return
    asked = f"mesh.data × mesh.latents = {config.data} × {config.latents}"
    if "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            f"{asked}, but this is one process. Start it with: torchrun --nproc-per-node {config.size} -m dmsae …"
        )
    raise ConfigError(
        f"{asked}, but torchrun started {n_started} processes. Make them equal: --mesh.data {n_started} splits every "
        f"batch, --mesh.latents {n_started} every SAE."
    )


def require_same(facts: Json, everyone: Axis) -> None:
    """Raise on every rank when one has other facts than the first."""
    first, *others = everyone.of_each(facts)
    for rank, theirs in enumerate(others, start=1):
        if found := differences(first, theirs):
            shown = "\n  ".join(found)
            raise MeshError(
                f"Rank {rank} of {everyone.size} is not what rank 0 is (which `was` stands for):\n  {shown}\nStart all "
                "ranks with the same command and the same version of dmsae."
            )


def _code() -> Json:
    """Return what the numbers of a training depend on besides its settings: versions, and a hash of our own code."""
    python = ".".join(map(str, sys.version_info[:2]))
    return {"dmsae": version("dmsae"), "sha256": code_digest(), "torch": torch.__version__, "python": python}


@contextmanager
def talking() -> Iterator[None]:
    """Turn a failure of torch.distributed, most often because another rank is gone, into an error that says so."""
    try:
        yield
    except (RuntimeError, ConnectionError, EOFError) as error:
        rank = os.environ.get("RANK", "?")
        raise LostRankError(
            f"Rank {rank} has lost contact with the others: {first_line(error)}. Another rank has probably ended: its "
            "message says why. The same command resumes from the last checkpoint."
        ) from error
