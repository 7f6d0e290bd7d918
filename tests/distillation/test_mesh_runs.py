"""Whole runs on meshes: a distillation, and `dmsae transfer` under torchrun, beside the same in one process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from dmsae.activations.store import Store
from dmsae.cores.attribution import Attribution, AttributionConfig, attribute
from dmsae.cores.core import Core
from dmsae.disk import layout
from dmsae.distillation.distill import DistillConfig
from dmsae.distillation.transfer import TransferConfig, transfer
from dmsae.evaluation.fidelity import kept_fidelity
from dmsae.sae.config import CoreMode
from dmsae.sae.sae import SAE
from dmsae.training.config import TrainConfig
from mesh_stages import distill_here
from meshes import meshes
from planted import planted_store

pytestmark = pytest.mark.usefixtures("one_thread")

TRAIN = TrainConfig(tokens=128 * 40, batch_size=128, lr=3e-3, device="cpu")
TRANSFER = TransferConfig((4,), 64, (16, 64), (CoreMode.DENSE, CoreMode.SPARSE), baselines=("msae",), train=TRAIN)


class Run(NamedTuple):
    store: Store
    directory: Path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A distillation on two ranks."""
    store = planted_store(tmp_path_factory.mktemp("stores") / "store").store
    directory = tmp_path_factory.mktemp("mesh") / "run"
    scores = AttributionConfig(quantile=0.95, batch_size=128)
    config = DistillConfig(width=64, k=4, nesting=(16, 64), cycles=2, train=TRAIN, attribution=scores)
    with meshes() as mesh:
        mesh.run((2, 1), distill_here, config, store.path, directory)
    return Run(store, directory)


def test_a_distillation_on_a_mesh_scores_as_one_process_does(run: Run) -> None:
    for cycle in range(2):
        here = layout.cycle_directory(run.directory, cycle)
        kept = Attribution.load(here)
        alone = attribute(SAE.load(here), run.store, AttributionConfig(quantile=0.95, batch_size=128))
        assert torch.equal(kept.scores_P, alone.scores_P)
        assert kept.bootstrap_XP is not None
        assert alone.bootstrap_XP is not None
        assert torch.equal(kept.bootstrap_XP, alone.bootstrap_XP)
    assert len(Core.load(run.directory))


def test_a_transfer_under_torchrun_is_that_of_one_process(run: Run, tmp_path: Path) -> None:
    alone = transfer(TRANSFER, Core.load(run.directory), run.store, tmp_path / "alone")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "dmsae"]
    given = ["--core", run.directory, "--out", tmp_path / "mesh", "--mesh.data", 2, "--k", 4, "--width", 64]
    given += ["--nesting", 16, 64, "--core-modes", "dense", "sparse", "--baselines", "msae", "--train.device", "cpu"]
    given += ["--train.tokens", TRAIN.tokens, "--train.batch-size", TRAIN.batch_size, "--train.lr", TRAIN.lr]
    command = [str(word) for word in (*launcher, "transfer", *given)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for result in alone:
        assert done.stdout.count(f"\n{result.name} ") == 1, done.stdout  # one table, from the first rank
        place = tmp_path / "mesh" / result.name
        mine, theirs = SAE.load(place), SAE.load(result.directory)
        assert mine.config == theirs.config
        for name, tensor in theirs.state_dict().items():
            torch.testing.assert_close(mine.state_dict()[name], tensor, rtol=1e-2, atol=1e-2)
        assert torch.equal(mine.W_enc_core, theirs.W_enc_core)
        assert (place / layout.FIDELITY).is_file()
        figures, expected = (kept_fidelity(one, run.store) for one in (place, result.directory))
        assert figures is not None
        assert expected is not None
        assert figures.fve == pytest.approx(expected.fve, abs=1e-3)
        assert figures.l0_noncore == pytest.approx(expected.l0_noncore, abs=0.1)
