"""A training step on two ranks of one thread each, beside one process of two threads, on the same global batch.

The mesh splits batches (2 × 1) or latents (1 × 2), over gloo; batches once with gradients summed in shared memory, as
ranks on one machine do, and once with all of them sent, as between machines. A mesh of one (1 × 1) is one process with
two threads that was started as torchrun starts it, and shows what the mesh itself costs. One process and mesh take
turns, and the ratio of their throughputs is the median over turns: 1 is as fast as one process. *Wire* is what one rank
sends in a step, from the counters of the loopback device (so other traffic on it counts too, and the headers of
packets), beside what the design says (`step_bytes` and `batch_bytes`) of ranks that share no memory. *Memory* is the
peak of the largest rank above what its imports and the data take, as a share of that of one process. Where a process's
memory lies differs from start to start, and with it both ratios by some per cent, also those of one process to itself
(1 × 1); so all processes are started several times, and the table has the median over starts with its range. The step
is `Learner.advance` on the next batch of a stream whose data ranks exchange rows; data as in `step.py`, none dead.

    python benchmarks/mesh.py [--starts 5] [--turns 5] [--width 16384] [--d-model 576] [--batch 2048] [--k 40 320]
"""

import argparse
import json
import multiprocessing
import os
import resource
import socket
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dmsae.activations.sources import MIX_SHARDS, WHOLE, Shards, Share, joined_
from dmsae.activations.stream import ActivationStream
from dmsae.config import Json
from dmsae.sae.comms import batch_bytes, step_bytes
from dmsae.sae.config import SAEConfig, matryoshka_nesting
from dmsae.sae.variance import variance
from dmsae.training.config import TrainConfig
from dmsae.training.learner import Learner, SAESpec
from dmsae.training.mesh import MeshConfig, join

MESHES = (MeshConfig(1, 1), MeshConfig(2, 1), MeshConfig(2, 1, share_memory=False), MeshConfig(1, 2))
N_BATCHES = MIX_SHARDS
STEPS_PER_TURN = 3


class Cell(NamedTuple):
    """A step to measure."""

    width: int
    k: int
    d_model: int
    batch: int


def make_batches(cell: Cell) -> list[torch.Tensor]:
    """Return sums of fixed random directions of unequal frequency, on the training scale."""
    made = torch.Generator().manual_seed(0)
    directions = torch.randn(4096, cell.d_model, generator=made)
    frequency = torch.arange(1, 4097) ** -0.8
    frequency = (60 * frequency / frequency.sum()).clamp_max(0.8)
    batches = []
    for _ in range(N_BATCHES):
        on = torch.rand(cell.batch, 4096, generator=made) < frequency
        x = (on * torch.rand(cell.batch, 4096, generator=made)) @ directions
        x += 0.05 * torch.randn(cell.batch, cell.d_model, generator=made)
        batches.append(x / x.square().sum(1).mean().sqrt())
    return batches


class InMemory:
    """Batches as the shards of one block, of which data ranks have different ones and exchange the rows."""

    def __init__(self, shards: list[torch.Tensor]) -> None:
        self._shards, self.d_model = shards, shards[0].shape[1]
        self.facts: Json = {}

    def block(self, epoch: int, index: int, seed: int) -> torch.Tensor | None:
        """Return all shards, joined as those of a store are."""
        shards = self.shards(epoch, index, seed)
        return None if shards is None else joined_(shards, self.d_model)

    def shards(self, epoch: int, index: int, seed: int, share: Share = WHOLE) -> Shards | None:
        """Return the shards of a share."""
        return None if index else {at: x for at, x in enumerate(self._shards) if at % share[1] == share[0]}


def work(end: Connection, cell: Cell, mesh: MeshConfig, rank: int, port: int, alone: bool) -> None:
    """Take as many steps as asked for, again and again; answer with the seconds and the memory used."""
    torch.set_num_threads(2 if mesh.size == 1 else 1)
    if not alone:  # as torchrun starts them
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(mesh.size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    comms = join(mesh, "cpu")
    stream = ActivationStream(InMemory(make_batches(cell)), cell.batch, data=comms.data, everyone=comms.both)
    next(stream)
    at_first = resident_bytes()
    config = TrainConfig(tokens=10**9, batch_size=cell.batch, device="cpu")
    sae = SAEConfig(cell.d_model, cell.width, cell.k, matryoshka_nesting(cell.width))
    learner = Learner(SAESpec("sae", sae), config, config.schedule(), torch.zeros(cell.d_model), 1.0, comms)
    step = 0
    while n_steps := end.recv():
        comms.both.settle(None)
        begun = time.perf_counter()
        for _ in range(n_steps):
            x_BD = next(stream)
            learner.advance(step, x_BD, variance(x_BD, comms.data))
            step += 1
        end.send((time.perf_counter() - begun, peak_bytes() - at_first))


def resident_bytes() -> int:
    """Return the memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_bytes() -> int:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def name_of(mesh: MeshConfig) -> str:
    """Return what a row of the table is called."""
    return f"{mesh.data}x{mesh.latents}" + ("" if mesh.share_memory else ", sent")


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


class Workers:
    """The processes of one mesh."""

    def __init__(self, cell: Cell, mesh: MeshConfig, alone: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self.n_ranks = mesh.size
        self._ends, self._processes = [], []
        for rank in range(self.n_ranks):
            mine, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, cell, mesh, rank, port, alone), daemon=True)
            process.start()
            self._ends.append(mine)
            self._processes.append(process)

    def turn(self, n_steps: int) -> tuple[float, int]:
        """Take some steps; return the seconds that the slowest rank took, and the memory of the largest."""
        for end in self._ends:
            end.send(n_steps)
        answers = [end.recv() for end in self._ends]
        return max(seconds for seconds, _ in answers), max(size for _, size in answers)

    def close(self) -> None:
        """End the processes."""
        for end in self._ends:
            end.send(0)
        for process in self._processes:
            process.join()


def loopback_bytes() -> int:
    """Return how much has been sent over the loopback device since the machine started."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split()[9])
    return 0


def measure(cell: Cell, starts: int, turns: int) -> list[dict[str, Any]]:
    """Return a row for each mesh: medians over starts, and the range of what differs between them."""
    rows = []
    for of_mesh in zip(*(measure_once(cell, turns) for _ in range(starts)), strict=True):
        row = dict(of_mesh[0])
        for name in ("throughput_ratio", "wire_bytes", "wire_ratio", "memory_ratio"):
            row[name] = statistics.median(one[name] for one in of_mesh)
        for name in ("throughput_ratio", "memory_ratio"):
            row[f"{name}_range"] = [choose(one[name] for one in of_mesh) for choose in (min, max)]
        rows.append(row)
    return rows


def measure_once(cell: Cell, turns: int) -> list[dict[str, Any]]:
    """Return a row for each mesh, with processes started for it."""
    alone = Workers(cell, MeshConfig(), alone=True)
    meshes = {mesh: Workers(cell, mesh) for mesh in MESHES}
    for workers in (alone, *meshes.values()):
        workers.turn(2)  # warms up: the first selection has no threshold to start from
    ratios: dict[MeshConfig, list[float]] = {mesh: [] for mesh in MESHES}
    wire: dict[MeshConfig, list[float]] = {mesh: [] for mesh in MESHES}
    memory: dict[MeshConfig, int] = {}
    for _ in range(turns):
        one, one_bytes = alone.turn(STEPS_PER_TURN)
        for mesh, workers in meshes.items():
            before = loopback_bytes()
            seconds, memory[mesh] = workers.turn(STEPS_PER_TURN)
            wire[mesh].append((loopback_bytes() - before) / STEPS_PER_TURN / workers.n_ranks)
            ratios[mesh].append(one / seconds)
    for workers in (alone, *meshes.values()):
        workers.close()
    rows = []
    for mesh in MESHES:
        n_prefixes = len(matryoshka_nesting(cell.width))
        designed = step_bytes(cell.batch, cell.d_model, cell.width, n_prefixes, mesh.data, mesh.latents)
        designed += batch_bytes(cell.batch, cell.d_model, mesh.data, MIX_SHARDS)
        sent = statistics.median(wire[mesh])
        rows.append(
            cell._asdict()
            | {"mesh": name_of(mesh), "throughput_ratio": round(statistics.median(ratios[mesh]), 3)}
            | {"wire_bytes": round(sent), "designed_bytes": designed}
            | {"wire_ratio": round(sent / designed, 3) if designed else 1.0}
            | {"memory_ratio": round(memory[mesh] / one_bytes, 3)}
        )
    return rows


def main() -> None:
    """Print the table, and one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--starts", type=int, default=5, help="how often the processes are started")
    parser.add_argument("--turns", type=int, default=5, help="turns of one process and meshes in each start")
    parser.add_argument("--width", type=int, default=16384)
    parser.add_argument("--d-model", type=int, default=576)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--k", type=int, nargs="+", default=[40, 320])
    given = parser.parse_args()
    heading = f"{'throughput':>18} {'wire MB':>8} {'designed':>9} {'ratio':>6} {'memory':>18}"
    print(f"{'K':>6} {'k':>4} {'mesh':>9} {heading}")
    rows = []
    for k in given.k:
        for row in measure(Cell(given.width, k, given.d_model, given.batch), given.starts, given.turns):
            rows.append(row)
            print(
                f"{row['width']:6} {k:4} {row['mesh']:>9} {with_range(row, 'throughput_ratio'):>18} "
                f"{row['wire_bytes'] / 1e6:8.1f} {row['designed_bytes'] / 1e6:9.1f} {row['wire_ratio']:6.2f} "
                f"{with_range(row, 'memory_ratio'):>18}",
                flush=True,
            )
    print(json.dumps({"starts": given.starts, "turns": given.turns, "mesh": rows}))


def with_range(row: dict[str, Any], name: str) -> str:
    """Return a ratio as text, with its range over starts."""
    low, high = row[f"{name}_range"]
    return f"{row[name]:.2f} ({low:.2f}–{high:.2f})"


if __name__ == "__main__":
    main()
