"""Ranks that are killed or fall silent: the others end with a message, and a restart ends as if nothing had been."""

import os
import random
import signal
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from mesh_ranks import train_as_rank
from meshes import SHAPES, join_all, start_ranks
from planted import planted_store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Four shards, of which 24 steps take nearly two epochs."""
    return planted_store(tmp_path / "store", n_rows=800).store.path


def start(directory: Path, store: Path, shape: tuple[int, int], **changes: Any) -> list[ForkServerProcess]:
    return start_ranks(shape[0] * shape[1], train_as_rank, shape, store, directory, changes)


def n_lines(directory: Path) -> int:
    path = directory / "plain" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(directory: Path, lines: int, ranks: list[ForkServerProcess]) -> None:
    while n_lines(directory) < lines and all(rank.is_alive() for rank in ranks):
        time.sleep(0.002)


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in (".lock", "timing.jsonl")
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_killed_again_and_again(tmp_path: Path, store: Path, shape: tuple[int, int]) -> None:
    whole, run, everyone = tmp_path / "whole", tmp_path / "run", list(range(shape[0] * shape[1]))
    assert join_all(start(whole, store, shape)) == [0 for _ in everyone]
    chance = random.Random(str(shape))
    for victims in ([chance.choice(everyone[1:])], [0], everyone, [chance.choice(everyone)]):
        ranks = start(run, store, shape, checkpoint_seconds=0.05)
        wait_for(run, min(20, n_lines(run) + chance.randint(1, 6)), ranks)
        time.sleep(chance.uniform(0, 0.05))
        for victim in victims:
            ranks[victim].kill()
        codes = join_all(ranks)
        assert codes == [-signal.SIGKILL if rank in victims else 2 for rank in everyone]
    assert join_all(start(run, store, shape)) == [0 for _ in everyone]
    assert contents(run) == contents(whole)
    assert "has lost contact with the others" in (tmp_path / "rank-0.log").read_text()


def test_a_silent_rank_is_given_up(tmp_path: Path, store: Path) -> None:
    ranks = start(tmp_path / "run", store, (2, 1), tokens=64 * 5000)
    wait_for(tmp_path / "run", 3, ranks)
    assert ranks[1].pid is not None
    os.kill(ranks[1].pid, signal.SIGSTOP)
    try:
        ranks[0].join(60)
        assert ranks[0].exitcode == 2
    finally:
        os.kill(ranks[1].pid, signal.SIGCONT)
    assert join_all(ranks) == [2, 2]
