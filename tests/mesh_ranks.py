"""Ranks that are processes of their own, as under torchrun, and may be killed."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from dmsae.activations.harvest import Harvest
from dmsae.activations.request import HarvestConfig
from dmsae.activations.shards import ShardMaker
from dmsae.activations.sources import StoreSource
from dmsae.activations.store import Store
from dmsae.errors import DmsaeError
from dmsae.sae.comms import Comms
from dmsae.training.config import TrainConfig
from dmsae.training.crew import harvest_on, run_on_mesh, train_on
from dmsae.training.mesh import MeshConfig
from mesh_trainings import SHORT, specs


def be_rank(
    rank: int,
    port: int,
    mesh: MeshConfig,
    log: Path,
    command: Callable[[Comms], Any],
    run: Callable[..., Any] = run_on_mesh,
) -> None:
    """Be one rank of a mesh, as under torchrun, and end with the exit code that a command would have."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(mesh.size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.stderr = (log / f"rank-{rank}.log").open("a")
    try:
        run(mesh, "cpu", {}, command)
    except DmsaeError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(2)
    os._exit(0)


def train_as_rank(
    rank: int, port: int, shape: tuple[int, int], store: Path, directory: Path, changes: dict[str, Any]
) -> None:
    """Train two SAEs from a store as a rank that may be killed."""
    mesh = MeshConfig(data=shape[0], latents=shape[1], timeout_seconds=5)
    config = TrainConfig(**SHORT | changes)

    def command(on: Comms) -> None:
        train_on(on, specs()[:2], StoreSource(Store.open(store)), directory, config)

    be_rank(rank, port, mesh, directory.parent, command)


def join_with_other_code(rank: int, port: int, log: Path) -> None:
    """Join a mesh of two, as ranks whose installations of the package differ."""
    with patch("dmsae.training.mesh.code_digest", lambda: f"code of rank {rank}"):
        be_rank(rank, port, MeshConfig(data=2, timeout_seconds=20), log, lambda _: None)


def harvest_as_rank(rank: int, port: int, n: int, config: HarvestConfig, root: Path, pause: float) -> None:
    """Harvest as a rank that may be killed; it pauses before each batch, so that there is a middle to be killed in."""
    run = ShardMaker._run

    def slowly(self: ShardMaker, *args: Any) -> Any:
        time.sleep(pause)
        return run(self, *args)

    mesh = MeshConfig(data=n, timeout_seconds=20)
    with patch.object(ShardMaker, "_run", slowly):
        be_rank(rank, port, mesh, root.parent, lambda on: harvest_on(on, Harvest(config, root)))
