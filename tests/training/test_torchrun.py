"""`dmsae train` under torchrun itself: meshes of two and four, a killed rank, a mesh that does not fit."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dmsae.activations.store import Store
from dmsae.disk import layout
from dmsae.disk.run import running_process
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE
from dmsae.training.config import TrainConfig
from dmsae.training.trainer import train
from planted import planted_store

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPE = TrainConfig(tokens=128 * 60, batch_size=128, lr=3e-3, device="cpu", log_every=1)


def torchrun(n: int, restarts: int, *arguments: object) -> "subprocess.Popen[str]":
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", restarts]
    launcher += ["--monitor-interval", 5]  # seconds: a rank notices what it lost before torchrun does
    flags = ["--tokens", RECIPE.tokens, "--batch-size", RECIPE.batch_size, "--lr", RECIPE.lr, "--device", "cpu"]
    command = [*launcher, "--nproc-per-node", n, "-m", "dmsae", "train", "--log-every", 1, *flags, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def test_torchrun_restarts_a_mesh_that_lost_a_rank(tmp_path: Path) -> None:
    store = planted_store(tmp_path / "store").store
    out = tmp_path / "run"
    shape = ("--width", 64, "--nesting", 16, 64, "--k", 4, "--mesh.data", 1, "--mesh.latents", 2)
    process = torchrun(2, 1, "--store", store.path, "--out", out, *shape, "--checkpoint-seconds", 0)
    metrics = out / layout.SAE / layout.METRICS
    while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 5):
        time.sleep(0.01)
    holder = running_process(out)
    assert holder is not None, process.communicate()[0]
    os.kill(holder, signal.SIGKILL)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "has lost contact with the others" in said
    assert said.count("Resuming at step") == 1
    assert len(metrics.read_text().splitlines()) == 60
    assert_like_one_process(out, store, tmp_path / "alone")


def test_a_mesh_of_four_trains_as_one_process_does(tmp_path: Path) -> None:
    store = planted_store(tmp_path / "store").store
    shape = ("--width", 64, "--nesting", 16, 64, "--k", 4, "--mesh.data", 2, "--mesh.latents", 2)
    process = torchrun(4, 0, "--store", store.path, "--out", tmp_path / "run", *shape)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert_like_one_process(tmp_path / "run", store, tmp_path / "alone")


def assert_like_one_process(out: Path, store: Store, alone: Path) -> None:
    train(SAEConfig(32, 64, 4, (16, 64)), store, alone, RECIPE)
    mesh, expected = SAE.load(out), SAE.load(alone)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(mesh.state_dict()[name], tensor, rtol=1e-2, atol=1e-2)


def test_a_mesh_of_four_that_does_not_fit_is_refused_on_every_rank(tmp_path: Path) -> None:
    store = planted_store(tmp_path / "store").store
    shape = ("--width", 62, "--nesting", 16, 62, "--k", 4, "--mesh.data", 1, "--mesh.latents", 4)
    process = torchrun(4, 0, "--store", store.path, "--out", tmp_path / "run", *shape)
    said, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "error: sae: width = 62; it must be a multiple of mesh.latents (4)" in said
    assert said.count("error: Rank 0 of 4: sae: width = 62") == 3, said
    assert not (tmp_path / "run").exists()
