"""Several processes share the SAEs and nulls of one evaluation: the results are those of one process, to the bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from dmsae.cli import main
from dmsae.config import Json
from dmsae.disk import layout
from dmsae.disk.run import running_process
from dmsae.evaluation.scores import Evaluation
from dmsae.sae.comms import ALONE
from mesh_evaluations import evaluate_as_rank, evaluate_here, hear_of_evaluation
from meshes import Meshes, join_all, meshes, start_ranks
from planted import planted_store
from tiny_recipe import write_recipe

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Meshes]:
    with meshes() as opened:
        yield opened


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return planted_store(tmp_path / "store", n_rows=512).store.path


def found(evaluation: Evaluation | Json | str) -> Json:
    """Return an evaluation without the time that it took."""
    facts: Json = asdict(evaluation) if isinstance(evaluation, Evaluation) else json.loads(json.dumps(evaluation))
    facts.pop("facts_sha256", None)  # the time is in it
    return facts | {"measures": {name: one | {"seconds": 0} for name, one in facts["measures"].items()}}


def written(out: Path) -> Json:
    return found(json.loads((out / layout.EVALUATION).read_text()))


@pytest.mark.parametrize("shape", [(2, 1), (2, 2)])
def test_a_mesh_finds_what_one_process_finds(mesh: Meshes, store: Path, tmp_path: Path, shape: tuple[int, int]) -> None:
    names = ("a", "b", "c")
    alone = evaluate_here(ALONE, store, tmp_path / "one", names)
    ranks = mesh.run(shape, evaluate_here, store, tmp_path / "many", names)
    assert all(found(rank.evaluation) == found(alone.evaluation) for rank in ranks)
    assert written(tmp_path / "many") == written(tmp_path / "one")
    calls = [name for rank in ranks for name in rank.calls]
    assert sorted(calls) == sorted(alone.calls), "each is measured by one rank"
    assert len(calls) == 7, "the SAEs, and two nulls of two of them whose decoder is not theirs; the third shares them"
    assert {len(rank.calls) for rank in ranks} <= {7 // len(ranks), 7 // len(ranks) + 1}
    again = mesh.run(shape, evaluate_here, store, tmp_path / "many", names)
    assert not any(rank.calls for rank in again), "all is kept"
    assert written(tmp_path / "many") == written(tmp_path / "one")


def test_a_measure_that_one_rank_cannot_run_is_named_and_left_out(mesh: Meshes, store: Path, tmp_path: Path) -> None:
    for rank in mesh.run((2, 1), evaluate_here, store, tmp_path / "many", ("a",), 1):
        assert list(rank.evaluation.measures) == ["fidelity", "activity"]
        assert rank.evaluation.not_run == {"redundancy": "Rank 1 of 2: rank 1 is out of luck"}
    ranks = mesh.run((2, 1), evaluate_here, store, tmp_path / "many", ("a",))
    assert [rank.calls for rank in ranks] == [["a / untrained"], []], "what rank 0 had measured was kept"
    assert not ranks[0].evaluation.not_run


def test_a_null_that_cannot_be_made_is_left_out_on_all_ranks(mesh: Meshes, store: Path, tmp_path: Path) -> None:
    asked = ("a", "b"), None, 0.0, 32
    alone = evaluate_here(ALONE, store, tmp_path / "one", *asked)
    ranks = mesh.run((2, 1), evaluate_here, store, tmp_path / "many", *asked)
    assert all(found(rank.evaluation) == found(alone.evaluation) for rank in ranks)
    assert list(found(alone.evaluation)["nulls_not_made"]) == ["a / random_encoder"]


def test_what_cannot_be_evaluated_is_refused_on_all_ranks(mesh: Meshes, store: Path, tmp_path: Path) -> None:
    first, second = mesh.run((2, 1), hear_of_evaluation, store, tmp_path / "many", ())
    assert first == "ConfigError: saes = []; it must name at least one SAE."
    assert second == "MeshError: Rank 0 of 2: saes = []; it must name at least one SAE."
    assert not (tmp_path / "many").exists()


def test_killed_again_and_again(store: Path, tmp_path: Path) -> None:
    evaluate_here(ALONE, store, tmp_path / "one", ("a", "b"))
    many, chance = tmp_path / "many", random.Random(0)
    for victims in ([1], [0], [0, 1]):
        (many / layout.LOCK).unlink(missing_ok=True)  # it still names who held it last
        ranks = start_ranks(2, evaluate_as_rank, (2, 1), store, many, 0.5)
        while running_process(many) is None and all(rank.is_alive() for rank in ranks):
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.4))
        for victim in victims:
            ranks[victim].kill()
        assert join_all(ranks) == [-signal.SIGKILL if rank in victims else 2 for rank in range(2)]
        assert not (many / layout.EVALUATION).exists()
    assert "has lost contact with the others" in (tmp_path / "rank-0.log").read_text()
    assert join_all(start_ranks(2, evaluate_as_rank, (2, 1), store, many, 0.0)) == [0, 0]
    assert written(many) == written(tmp_path / "one")


def test_the_command_under_torchrun(
    tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = str(write_recipe(tmp_path / "tiny.toml", tiny_model, tiny_text))
    main(["harvest", "--recipe", recipe, "--root", "stores"])
    (store,) = (path.name for path in Path("stores").iterdir() if path.is_dir())
    main(
        ["train", "--store", store, "--out", "sae", "--width", "64", "--k", "4", "--recipe", recipe, "--root", "stores"]
    )
    asked = ["evaluate", "sae", "--measures", "fidelity", "splice", "--nulls", "untrained", "random_firing"]
    main([*asked, "--out", "one"])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dmsae"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, *asked, "--out", "many"], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert written(Path("many")) == written(Path("one"))
    assert done.stdout.count("Everything is in many/evaluation.json.") == 1, done.stdout
