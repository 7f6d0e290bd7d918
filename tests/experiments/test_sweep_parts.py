"""The parts of an experiment as jobs: two processes share the runs that both need, and find what one finds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dmsae.cores.attribution import AttributionConfig
from dmsae.distillation.config import DistillConfig
from dmsae.errors import ConfigError
from dmsae.experiments.grid import GRIDS, Preset
from dmsae.experiments.lab import Lab
from dmsae.experiments.results import result_file
from dmsae.experiments.sweep import part_jobs
from dmsae.sweeps.engines import LocalProcesses, ThisProcess
from dmsae.sweeps.job import last_lines, read_board
from dmsae.sweeps.sweep import run_jobs
from dmsae.training.config import TrainConfig
from planted import planted_store

pytestmark = pytest.mark.usefixtures("one_thread")
TRAIN = TrainConfig(tokens=20 * 64, batch_size=64, lr=3e-3, log_every=30, device="cpu")
BASE = DistillConfig(
    width=64, k=6, nesting=(16, 64), cycles=1, attribution=AttributionConfig(n_bootstrap=0), train=TRAIN
)
GRID = replace(GRIDS[Preset.SMOKE], coverages=(0.9,), norms=("found",))
PARTS = ("tau", "random-core")


def test_parts_that_share_runs_run_beside_each_other(tmp_path: Path) -> None:
    store = planted_store(tmp_path / "store").store
    for name, engine, at_once in (("alone", ThisProcess(), 1), ("beside", LocalProcesses(2, 2), 2)):
        lab = Lab(store, BASE, tmp_path / name)
        run_jobs(part_jobs(PARTS, [0], lab, GRID, tmp_path / name), tmp_path / name, engine, at_once)
    for part in PARTS:
        one, other = (
            json.loads(result_file(tmp_path / name / "results", part, 0).read_text()) for name in ("alone", "beside")
        )
        took = {"seconds": None, "cpu_seconds": None}
        assert one | took == other | took
    runs = {name: {path.name for path in (tmp_path / name / "runs").iterdir()} for name in ("alone", "beside")}
    assert runs["alone"] == runs["beside"], "what both need was made once"
    assert {str(status.state) for status in read_board(tmp_path / "beside").values()} == {"done"}
    done = part_jobs(PARTS, [0, 1], Lab(store, BASE, tmp_path / "beside"), GRID, tmp_path / "beside")
    assert [(job.name, job.is_done) for job in done] == [
        ("tau-seed-0", True),
        ("tau-seed-1", False),
        ("random-core-seed-0", True),
        ("random-core-seed-1", False),
    ]
    result_file(tmp_path / "beside" / "results", "tau", 0).unlink()
    again = part_jobs(PARTS, [0], Lab(store, BASE, tmp_path / "beside"), GRID, tmp_path / "beside")
    assert [job.is_done for job in again] == [False, True], "what was removed is run again"
    other_settings = Lab(store, DistillConfig(width=32, k=6, train=TRAIN), tmp_path / "beside")
    with pytest.raises(ConfigError, match="was made with other settings"):
        part_jobs(["random-core"], [0], other_settings, GRID, tmp_path / "beside")
    assert not last_lines(tmp_path / "beside" / "nowhere", 1)


def test_a_confirmation_needs_all_seeds_of_the_search(tmp_path: Path) -> None:
    lab = Lab(planted_store(tmp_path / "store").store, BASE, tmp_path / "out")
    jobs = part_jobs(["regime", "confirmation"], [0, 3], lab, GRID, tmp_path / "out")
    assert {job.name: job.needs for job in jobs} == {
        "regime-seed-0": (),
        "regime-seed-3": (),
        "confirmation-seed-0": ("regime-seed-0", "regime-seed-3"),
        "confirmation-seed-3": ("regime-seed-0", "regime-seed-3"),
    }
