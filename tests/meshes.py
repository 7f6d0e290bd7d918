"""Processes that are the ranks of gloo meshes, started once and given many things to do.

They are forked from a server that has already imported the package, so that starting them takes no time.
"""

import multiprocessing
import os
import pickle
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dmsae.sae.comms import Comms
from dmsae.training.mesh import MeshConfig, place

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["torch._dynamo", "transformers.models.llama.modeling_llama", "mesh_evaluations", "mesh_stages", "mesh_trainings"]
)

SHAPES = [(2, 1), (1, 2), (2, 2)]
"""Data × latents."""


class Ranks:
    """Two or four processes; `run` calls a function with each one's place in a mesh."""

    def __init__(self, n: int, folder: Path) -> None:
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(n):
            mine, theirs = SERVER.Pipe()
            process = SERVER.Process(target=_serve, args=(theirs, rank, n, folder / f"rendezvous-{n}"), daemon=True)
            process.start()
            self._ends.append(mine)
            self._processes.append(process)

    def run(self, shape: tuple[int, int], function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what a function, called as `function(comms, *args)`, returns on each rank."""
        for end in self._ends:
            # As plain bytes: tensors would otherwise travel through shared memory, which takes longer for small ones.
            end.send_bytes(pickle.dumps((shape, function, args)))
        answers = [pickle.loads(end.recv_bytes()) for end in self._ends]
        failed = [f"rank {rank}:\n{answer}" for rank, (good, answer) in enumerate(answers) if not good]
        assert not failed, "\n".join(failed)
        return [answer for _, answer in answers]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()


class Meshes:
    """Meshes of every shape, made when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._ranks = folder, dict[int, Ranks]()

    def run(self, shape: tuple[int, int], function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what a function returns on each rank of a mesh of data × latents."""
        n = shape[0] * shape[1]
        if n not in self._ranks:
            self._ranks[n] = Ranks(n, self._folder)
        return self._ranks[n].run(shape, function, *args)

    def close(self) -> None:
        """End all processes."""
        for ranks in self._ranks.values():
            ranks.close()


def start_ranks(n: int, target: Callable[..., None], *args: Any) -> list[ForkServerProcess]:
    """Start processes that call `target(rank, port, *args)`, and so can be killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [SERVER.Process(target=target, args=(rank, port, *args), daemon=True) for rank in range(n)]
    for rank in ranks:
        rank.start()
    return ranks


def join_all(ranks: list[ForkServerProcess]) -> list[int | None]:
    """Wait for all ranks to end by themselves, and return their exit codes."""
    for rank in ranks:
        rank.join(90)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    return codes


@contextmanager
def meshes() -> Iterator[Meshes]:
    """Yield meshes that end with the block."""
    with tempfile.TemporaryDirectory() as folder:
        opened = Meshes(Path(folder))
        try:
            yield opened
        finally:
            opened.close()


def _serve(end: Connection, rank: int, n: int, rendezvous: Path) -> None:
    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=n)
    known: dict[tuple[int, int], Comms] = {}
    while True:
        shape, function, args = pickle.loads(end.recv_bytes())
        try:
            if shape not in known:
                known[shape] = place(MeshConfig(data=shape[0], latents=shape[1], timeout_seconds=60))
            answer = True, function(known[shape], *args)
        except Exception:
            answer = False, traceback.format_exc()
        end.send_bytes(pickle.dumps(answer))
