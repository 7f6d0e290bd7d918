"""Runs in separate processes, killed at random and resumed: the result is as if nothing had happened.

The processes are forked from a server that has already imported the package, so that many can be started.
"""

import json
import math
import multiprocessing
import os
import random
import signal
import sys
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from dmsae.disk.checkpoint import read_state
from dmsae.disk.layout import CHECKPOINT
from dmsae.errors import BusyError
from dmsae.training.learner import SAESpec
from zipf import DENSE, small_sae, trainer

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["dmsae.training.trainer", "torch._dynamo", "pytest"])  # Adam imports the second
CORE = 0.3 * torch.randn(5, 32, generator=torch.Generator().manual_seed(1))


def work(directory: Path, deaf: bool, changes: dict[str, Any]) -> None:
    """Train two SAEs on two threads; what a new process runs."""
    torch.set_num_threads(2)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 (as long as the process)
    # Whoever runs the tests may ignore SIGINT, as a shell does for what it starts in the background.
    signal.signal(signal.SIGINT, signal.SIG_IGN if deaf else signal.default_int_handler)
    specs = [SAESpec("plain", small_sae()), SAESpec("core", small_sae(DENSE), CORE)]
    try:
        trainer(directory, *specs, **{"log_every": 1} | changes).run()
    except KeyboardInterrupt:
        sys.exit(130)


def start(directory: Path, deaf: bool = False, **changes: Any) -> ForkServerProcess:
    process = SERVER.Process(target=work, args=(directory, deaf, changes), daemon=True)
    process.start()
    return process


def finish(directory: Path, **changes: Any) -> None:
    process = start(directory, **changes)
    process.join(120)
    assert process.exitcode == 0


def n_lines(directory: Path) -> int:
    """Return how many steps have been logged."""
    path = directory / "core" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(process: ForkServerProcess, directory: Path, lines: int) -> None:
    while process.is_alive() and n_lines(directory) < lines:
        time.sleep(0.001)


def contents(directory: Path) -> dict[str, bytes]:
    """Return everything in a run directory except the lock and the timings."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in (".lock", "timing.jsonl")
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an undisturbed run leaves."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    finish(directory)
    left = contents(directory)
    files = ("metrics.jsonl", "sae.json", "sae.safetensors", "status.json")
    assert list(left) == ["config.json", *(f"{name}/{file}" for name in ("core", "plain") for file in files)]
    return left


@pytest.mark.parametrize("checkpoint_seconds", [0.0, 0.05])
def test_killed_again_and_again(tmp_path: Path, whole: dict[str, bytes], checkpoint_seconds: float) -> None:
    chance = random.Random(str(checkpoint_seconds))
    n_killed = 0
    for _ in range(8):
        process = start(tmp_path / "run", checkpoint_seconds=checkpoint_seconds)
        wait_for(process, tmp_path / "run", min(55, n_lines(tmp_path / "run") + chance.randint(0, 12)))
        time.sleep(chance.choice([0, 0, chance.uniform(0, 0.03)]))
        process.kill()
        process.join()
        n_killed += process.exitcode == -signal.SIGKILL
    assert n_killed >= 4
    finish(tmp_path / "run", checkpoint_seconds=checkpoint_seconds)
    assert contents(tmp_path / "run") == whole


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_before_it_stops(tmp_path: Path, whole: dict[str, bytes], number: signal.Signals) -> None:
    process = start(tmp_path / "run", checkpoint_seconds=math.inf)
    wait_for(process, tmp_path / "run", 5)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == 130
    step = read_state(tmp_path / "run" / CHECKPOINT)["step"]
    assert 5 <= step < 60
    assert n_lines(tmp_path / "run") == step
    assert not (tmp_path / "run" / "core" / "status.json").exists()
    finish(tmp_path / "run", checkpoint_seconds=math.inf)
    assert contents(tmp_path / "run") == whole
    assert json.loads((tmp_path / "run" / "core" / "timing.jsonl").read_text().splitlines()[-1])["step"] == 60


def test_an_ignored_signal_stays_ignored(tmp_path: Path, whole: dict[str, bytes]) -> None:
    process = start(tmp_path / "run", deaf=True)
    wait_for(process, tmp_path / "run", 10)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 0
    assert contents(tmp_path / "run") == whole


def test_a_second_process_cannot_enter_the_same_run(tmp_path: Path, whole: dict[str, bytes]) -> None:
    process = start(tmp_path / "run")
    wait_for(process, tmp_path / "run", 1)
    os.kill(process.pid or 0, signal.SIGSTOP)
    try:
        settings = json.loads((tmp_path / "run" / "config.json").read_text())
        with pytest.raises(BusyError, match=f"in use by process {process.pid}"):
            trainer(tmp_path / "run").run()
        assert json.loads((tmp_path / "run" / "config.json").read_text()) == settings
    finally:
        os.kill(process.pid or 0, signal.SIGCONT)
    process.join(60)
    assert contents(tmp_path / "run") == whole


def test_killed_while_finishing(tmp_path: Path, whole: dict[str, bytes]) -> None:
    """One SAE is saved and the other not yet: the run resumes from its checkpoint, here from the start."""
    finish(tmp_path / "run")
    (tmp_path / "run" / "plain" / "status.json").unlink()
    (tmp_path / "run" / f"{CHECKPOINT}.tmp").mkdir()
    (tmp_path / "run" / f"{CHECKPOINT}.tmp" / ".tmpAbCdEf").write_bytes(b"half")
    finish(tmp_path / "run")
    assert contents(tmp_path / "run") == whole
