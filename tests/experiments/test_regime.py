"""The search for a regime, and its confirmation: what is chosen, on which seeds and text, and what has to be beaten."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from dmsae.config import Json
from dmsae.cores.attribution import AttributionConfig
from dmsae.cores.controls import RandomKind, Rule
from dmsae.distillation.config import DistillConfig
from dmsae.errors import ConfigError
from dmsae.experiments.catalog import PARTS, settings_of
from dmsae.experiments.grid import FRESH, GRIDS, Preset, Regime
from dmsae.experiments.lab import Lab
from dmsae.experiments.parts.regime import ANY, HOLDING, MIN_SHARE, chosen, confirm, margin
from dmsae.experiments.results import kept_or_run, part_results, result_file
from dmsae.experiments.sweep import part_jobs, run_part
from dmsae.sae.config import CoreMode
from dmsae.training.config import TrainConfig
from planted import planted_store

pytestmark = pytest.mark.usefixtures("one_thread")
TRAIN = TrainConfig(tokens=60 * 64, batch_size=64, lr=3e-3, log_every=30, device="cpu")
BASE = DistillConfig(
    width=64, k=6, nesting=(16, 64), cycles=1, attribution=AttributionConfig(n_bootstrap=0), train=TRAIN
)
GRID = GRIDS[Preset.SMOKE]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    directory = tmp_path_factory.mktemp("regimes")
    lab = Lab(planted_store(directory / "store").store, BASE, directory)
    for part in ("regime", "confirmation"):
        kept_or_run(lab.results, part, 0, settings_of(part, lab, GRID), partial(PARTS[part].run, lab, GRID, 0))
    return lab


def figures(lab: Lab, part: str) -> Json:
    found: Json = part_results(lab.results, part)[0]["figures"]
    return found


def test_a_regime_is_confirmed_with_a_fresh_seed(lab: Lab) -> None:
    tried, confirmed = figures(lab, "regime")["regimes"], figures(lab, "confirmation")
    assert [one["regime"] for one in tried] == ["as the recipe", "half"]
    assert confirmed["chosen"][ANY] == max(tried, key=lambda one: margin([one]))["regime"]
    assert {one["seed"] for one in tried} == {0}
    assert [one["regime"] for one in confirmed["regimes"]] == list(dict.fromkeys(confirmed["chosen"].values()))
    assert {one["seed"] for one in confirmed["regimes"]} == {FRESH}
    kept = result_file(lab.results, "confirmation", 0)
    other = json.loads(kept.read_text())
    other["figures"]["chosen"] = {ANY: "another"}
    try:
        result_file(lab.results, "confirmation", 7).write_text(json.dumps(other | {"seed": 7}))
        with pytest.raises(ConfigError, match="other regimes best than those that were confirmed"):
            confirm(lab, GRID, 1)
    finally:
        result_file(lab.results, "confirmation", 7).unlink()
    with pytest.raises(ConfigError, match="run the part regime first"):
        chosen(Lab(lab.store, BASE, lab.results))


def test_rows_have_to_beat_random_rows_of_both_kinds_and_principal_components(lab: Lab) -> None:
    rules = (Rule.FIRING_RATE, Rule.PRINCIPAL_COMPONENTS)
    kinds = (RandomKind.NORM_MATCHED, RandomKind.COVARIANCE_MATCHED)
    grid = replace(GRID, rules=rules, random_cores=kinds, regimes=(Regime("rows", core_mode=CoreMode.DENSE),))
    (found,) = PARTS["regime"].run(lab, grid, 0)["regimes"]
    controls = {"firing_rate", "principal_components", "random-norm_matched", "random-covariance_matched"}
    assert set(found["margins"]) == controls, found
    prices = {row["sae"].rpartition("-k")[0]: row["price"] for row in found["rows"]}
    assert found["margins"]["firing_rate"] == pytest.approx(prices["firing_rate-dense"] - prices["dense"])


def test_a_part_does_not_build_on_what_other_settings_gave(lab: Lab, tmp_path: Path) -> None:
    given = (lab.store.path, BASE, GRID, tmp_path)
    stale = {"part": "regime", "seed": 5, "settings": {"version": 1}, "figures": {"regimes": []}}
    (tmp_path / "results").mkdir()
    result_file(tmp_path / "results", "regime", 5).write_text(json.dumps(stale))
    with pytest.raises(ConfigError, match="made with other settings"):
        run_part("confirmation", 0, *given)


def test_seeds_of_second_runs_are_refused(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="second runs and confirmations"):
        part_jobs(["tau"], (0, FRESH), lab, GRID, tmp_path)


def test_a_core_that_holds_next_to_nothing_is_the_best_of_all_alone(lab: Lab, tmp_path: Path) -> None:
    def tried(name: str, over: float, share: float) -> Json:
        rows = [{"sae": "random-detector-k6", "attribution_share": None}]
        margins = {"firing_rate": over, "random": over + 0.1}
        return {"regime": name, "margins": margins, "rows": [*rows, {"sae": "detector-k6", "attribution_share": share}]}

    here = Lab(lab.store, BASE, tmp_path)
    here.results.mkdir()
    for seed, share in enumerate((0.2, MIN_SHARE)):
        regimes = [tried("tiny", 0.5, share / 2), tried("real", -0.1, share), tried("worse", -0.2, share)]
        found = {"part": "regime", "seed": seed, "figures": {"regimes": regimes}}
        result_file(here.results, "regime", seed).write_text(json.dumps(found))
    assert chosen(here) == {ANY: "tiny", HOLDING: "real"}


def test_a_search_that_finds_nothing_is_a_result(lab: Lab, tmp_path: Path) -> None:
    here = Lab(lab.store, BASE, tmp_path)
    here.results.mkdir()
    found = {"part": "regime", "seed": 0, "figures": {"regimes": [{"regime": "half", "margins": {}, "rows": []}]}}
    result_file(here.results, "regime", 0).write_text(json.dumps(found))
    assert confirm(here, GRID, 0) == {"rows": [], "chosen": {}, "regimes": []}
    with pytest.raises(ConfigError, match="regime first"):
        confirm(Lab(lab.store, BASE, tmp_path / "empty"), GRID, 0)
