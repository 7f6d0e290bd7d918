"""Several processes share the shards of one store: the same bytes as from one process, whoever is killed meanwhile."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dmsae.activations.harvest import harvest
from dmsae.activations.request import HarvestConfig
from dmsae.cli import main
from mesh_ranks import harvest_as_rank
from mesh_stages import harvest_here
from meshes import Meshes, join_all, meshes, start_ranks
from tiny_recipe import write_recipe

pytestmark = pytest.mark.usefixtures("one_thread")
MakeConfig = Callable[..., HarvestConfig]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Meshes]:
    with meshes() as opened:
        yield opened


def content(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def test_a_mesh_makes_the_store_of_one_process(mesh: Meshes, tiny_config: MakeConfig, tmp_path: Path) -> None:
    harvest(tiny_config(), tmp_path / "one")
    for _ in range(2):  # the second time it is there already
        assert mesh.run((2, 1), harvest_here, tiny_config(), tmp_path / "many") == ["nothing"] * 2
        assert content(tmp_path / "many") == content(tmp_path / "one")


def test_what_one_process_began_a_mesh_finishes(mesh: Meshes, tiny_config: MakeConfig, tmp_path: Path) -> None:
    whole = harvest(tiny_config(), tmp_path / "one")
    harvest(tiny_config(), tmp_path / "many")
    path = tmp_path / "many" / whole.key
    (path / "store.json").unlink()
    for gone in ("pairs/00001", "train/00000", "train/00003", "train/00004"):
        (path / f"{gone}.safetensors").unlink()
    assert mesh.run((2, 1), harvest_here, tiny_config(), tmp_path / "many") == ["nothing"] * 2
    assert content(tmp_path / "many") == content(tmp_path / "one")


def test_a_rank_that_cannot_make_its_shard_is_named_on_all(
    mesh: Meshes, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    for heard in mesh.run((2, 1), harvest_here, tiny_config(), tmp_path / "many", 1):
        assert heard.startswith("Rank 1 of 2: The activations at 'model.layers.0' are not finite")
    assert mesh.run((2, 1), harvest_here, tiny_config(), tmp_path / "many") == ["nothing"] * 2  # the lock is free again


def test_killed_again_and_again(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config(train_tokens=1000, batch_contexts=4)
    whole = harvest(config, tmp_path / "one")
    killed, chance = tmp_path / "killed", random.Random(0)
    journal = killed / whole.key / "shards.jsonl"
    for victims in ([1], [0], [0, 1]):
        ranks = start_ranks(2, harvest_as_rank, 2, config, killed, 0.02)
        n_lines = _n_lines(journal) + chance.randint(1, 3)
        while _n_lines(journal) < n_lines and all(rank.is_alive() for rank in ranks):
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.1))
        for victim in victims:
            ranks[victim].kill()
        codes = join_all(ranks)
        assert codes == [-signal.SIGKILL if rank in victims else 2 for rank in range(2)]
    assert join_all(start_ranks(2, harvest_as_rank, 2, config, killed, 0.0)) == [0, 0]
    assert content(killed) == content(tmp_path / "one")
    assert "has lost contact with the others" in (tmp_path / "rank-0.log").read_text()


def _n_lines(journal: Path) -> int:
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def test_the_command_under_torchrun(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.toml", tiny_model, tiny_text)
    main(["harvest", "--recipe", str(recipe), "--root", str(tmp_path / "one")])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "dmsae", "harvest", "--recipe", str(recipe), "--root", str(tmp_path / "many")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "many") == content(tmp_path / "one")
    (store,) = (tmp_path / "many").iterdir()
    assert done.stdout.count(f"Store {store.name}") == 1, done.stdout  # the first rank alone prints
