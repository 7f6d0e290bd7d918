"""Four equal jobs on two processes, beside the same four one after another in this process.

Each job trains one SAE on activations of its own, with one thread. The ideal is half the time of the four one after
another; the ratio is the ideal over what the two processes took, so 1 is as good as can be. Starting a process and
importing torch in it counts, so jobs should take a minute or more. Both ways take turns, in random order.

    python benchmarks/sweep.py [--turns 3] [--steps 400] [--width 4096] [--d-model 576] [--batch 1024]
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from dmsae.activations.sources import ArraySource
from dmsae.sae.config import SAEConfig, matryoshka_nesting
from dmsae.sweeps.engines import Engine, LocalProcesses, ThisProcess
from dmsae.sweeps.job import Job
from dmsae.sweeps.sweep import run_jobs
from dmsae.training.config import TrainConfig
from dmsae.training.learner import SAESpec
from dmsae.training.trainer import train_together

N_JOBS = 4
N_PROCESSES = 2


class Size(NamedTuple):
    """How much a job does."""

    steps: int
    width: int
    d_model: int
    batch: int


def train(size: Size, seed: int, out: Path) -> None:
    """Train one SAE."""
    x = torch.randn(8 * size.batch, size.d_model, generator=torch.Generator().manual_seed(seed))
    config = TrainConfig(tokens=size.steps * size.batch, batch_size=size.batch, device="cpu", seed=seed)
    sae = SAEConfig(size.d_model, size.width, k=32, prefixes=matryoshka_nesting(size.width))
    train_together([SAESpec("sae", sae)], ArraySource(x), out, config)


def seconds(engine: Engine, at_once: int, size: Size) -> float:
    """Return how long the jobs take."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        jobs = [Job(f"{i}", partial(train, size, i, here / f"sae-{i}"), {}) for i in range(N_JOBS)]
        begun = time.perf_counter()
        run_jobs(jobs, here, engine, at_once)
        return time.perf_counter() - begun


def main() -> None:
    """Print the times, and one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--d-model", type=int, default=576)
    parser.add_argument("--batch", type=int, default=1024)
    given = parser.parse_args()
    size = Size(given.steps, given.width, given.d_model, given.batch)
    torch.set_num_threads(1)
    rows = []
    print(f"{'one after another, s':>21} {'two processes, s':>17} {'of the ideal':>13}")
    for _ in range(given.turns):
        times: dict[int, float] = {}
        for at_once in random.sample((1, N_PROCESSES), 2):
            engine: Engine = ThisProcess() if at_once == 1 else LocalProcesses(N_PROCESSES, N_PROCESSES)
            times[at_once] = seconds(engine, at_once, size)
        rows.append((times[1], times[N_PROCESSES], times[1] / N_PROCESSES / times[N_PROCESSES]))
        print(f"{rows[-1][0]:21.1f} {rows[-1][1]:17.1f} {rows[-1][2]:13.2f}", flush=True)
    ratio = round(statistics.median(row[2] for row in rows), 3)
    print(json.dumps({"benchmark": "sweep", **size._asdict(), "turns": given.turns, "of_ideal": ratio}))


if __name__ == "__main__":
    main()
