"""The short form of the attack, with fixed seeds: nothing goes by unnoticed, and nothing ends in a traceback."""

import random
from pathlib import Path

import pytest

from attack.damage import attack_run, attack_store, attack_unfinished_run, attack_unfinished_store
from attack.foreign import attack_foreign
from attack.processes import attack_by_full_disk, attack_by_kills, attack_by_race
from attack.scene import Scene, build
from attack.tally import Tally

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return build(tmp_path_factory.mktemp("scene"))


def require_clean(tally: Tally) -> None:
    assert tally.is_clean, "\n".join([tally.table(), *tally.examples])


def test_damaged_files_are_named_or_made_again(scene: Scene, tmp_path: Path) -> None:
    tally, draws = Tally(), random.Random(0)
    for _ in range(12):
        attack_store(scene, tmp_path, draws, tally)
        attack_run(scene, tmp_path, draws, tally)
    for _ in range(2):
        attack_unfinished_store(scene, tmp_path, draws, tally)
        attack_unfinished_run(scene, tmp_path, draws, tally)
    require_clean(tally)


def test_hostile_files_end_in_a_typed_error(tmp_path: Path) -> None:
    tally = Tally()
    attack_foreign(150, tmp_path / "foreign", 0, tally)
    require_clean(tally)


@pytest.mark.parametrize("job", ["harvest", "distill"])
def test_disturbed_work_ends_as_if_nothing_had_been(scene: Scene, tmp_path: Path, job: str) -> None:
    tally, draws = Tally(), random.Random(1)
    attack_by_kills(scene, job, tmp_path, draws, tally, at_most=2)
    attack_by_full_disk(scene, job, tmp_path, draws, tally)
    require_clean(tally)


def test_three_at_once_do_the_work_once(scene: Scene, tmp_path: Path) -> None:
    tally = Tally()
    attack_by_race(scene, "harvest", tmp_path, random.Random(2), tally)
    require_clean(tally)
