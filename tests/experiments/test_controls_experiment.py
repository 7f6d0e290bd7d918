"""The controls experiment, whole but small: every part, what it keeps, and that the same command goes on."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from dmsae.config import Json, to_dict
from dmsae.cores.attribution import AttributionConfig
from dmsae.cores.consensus import ConsensusConfig
from dmsae.cores.controls import Rule
from dmsae.distillation.config import DistillConfig
from dmsae.errors import CheckpointError, ConfigError
from dmsae.experiments.controls import ControlsConfig, Part, run_part
from dmsae.experiments.results import Spread, kept_or_run, over_seeds, read_results, result_file
from dmsae.experiments.tables import tables, text
from dmsae.training.config import TrainConfig
from planted import Planted, planted_store

pytestmark = pytest.mark.usefixtures("one_thread")
TRAIN = TrainConfig(tokens=60 * 64, batch_size=64, lr=3e-3, log_every=30, device="cpu")
DISTILL = DistillConfig(
    width=64, k=6, nesting=(16, 64), cycles=1, attribution=AttributionConfig(n_bootstrap=0), train=TRAIN
)
AGREEMENT = ConsensusConfig(min_similarity=0.2)
CONFIG = ControlsConfig(DISTILL, 0.5, (Rule.FIRING_RATE, Rule.RANDOM_SUBSET), members=2, consensus=AGREEMENT)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return planted_store(tmp_path_factory.mktemp("planted") / "store")


@pytest.fixture(scope="module")
def results(planted: Planted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("controls")
    for seed, parts in ((0, tuple(Part)), (1, (Part.PAPER,))):
        for part in parts:
            work = partial(run_part, part, CONFIG, planted.store, directory / f"seed-{seed}", seed)
            kept_or_run(directory / "results", part, seed, to_dict(CONFIG), planted.store, work)
    return directory / "results"


def figures(results: Path, part: Part, seed: int = 0) -> Json:
    read: Json = json.loads(result_file(results, part, seed).read_text())["figures"]
    return read


def test_each_part_has_its_saes_and_controls(results: Path) -> None:
    names = {part: [row["sae"] for row in figures(results, part)["rows"]] for part in Part}
    assert {"dense-k6", "random-norm_matched-dense-k6", "detector-k6", "random-detector-k6"} <= set(names[Part.PAPER])
    capped = {"detector-k6", "random-detector-k6", "firing_rate-detector-k6", "random_subset-detector-k6"}
    assert capped | set(figures(results, Part.CAPPED)["left_out"]) >= capped
    for part in Part:
        assert any(name.startswith("unconstrained-1") for name in names[part]), part
    for row in figures(results, Part.PAPER)["rows"]:
        assert 0 < row["fve"] < 1
        assert (row["kept_all"] is None) == (row["n_core"] == 0)
        assert row["n_core"] == 0 or 0 <= row["kept_active"] <= row["n_core"]


def test_detectors_of_one_core_fire_alike_and_random_ones_as_often(results: Path) -> None:
    rows = {row["sae"]: row for row in figures(results, Part.CAPPED)["rows"]}
    one, other = rows["detector-k6"], rows["random-detector-k6"]
    assert one["n_core"] == other["n_core"]
    assert other["l0_core"] == pytest.approx(one["l0_core"], abs=0.6), "held-out sample of 64 tokens"


def test_persistence_stands_beside_a_random_start(results: Path) -> None:
    cycles = figures(results, Part.CYCLES)["cycles"]
    runs = {cycle["run"] for cycle in cycles}
    assert runs == {"dense-selected", "dense-random", "detector-selected", "detector-random"}
    first = [cycle for cycle in cycles if cycle["cycle"] == 0]
    assert all(cycle["of_first"] == cycle["size"] for cycle in first)


def test_what_was_kept_is_not_run_again(results: Path, planted: Planted) -> None:
    def never() -> Json:
        raise AssertionError("it was run again")

    kept_or_run(results, Part.PAPER, 0, to_dict(CONFIG), planted.store, never)
    with pytest.raises(ConfigError, match=r"was made with other settings \(settings\)"):
        kept_or_run(results, Part.PAPER, 0, to_dict(replace(CONFIG, max_rate=0.4)), planted.store, never)


def test_seeds_are_repetitions_with_a_spread(results: Path) -> None:
    spread = over_seeds(read_results(results), Part.PAPER, ["fve"])["dense-k6"]["fve"]
    assert spread is not None
    assert spread.n == 2
    assert spread.sd is not None
    assert spread.sd > 0
    made = tables(read_results(results))
    assert len(made) == 5, "four parts, one of which has a table of cycles as well"
    assert "±" in next(table for table in made if table.title.startswith("paper")).markdown()


def test_a_figure_as_text() -> None:
    assert text(Spread.of([0.5, None, 0.7]), 2) == "0.60 ± 0.14"
    assert text(Spread.of([0.5]), 2) == "0.50"
    assert text(Spread.of([None, float("nan")]), 2) == "–"


def test_damaged_results_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no results"):
        read_results(tmp_path)
    result_file(tmp_path, "paper", 0).write_text("[]")
    with pytest.raises(CheckpointError, match=r"paper-seed-0.json is not the result of an experiment"):
        read_results(tmp_path)
