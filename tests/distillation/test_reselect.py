"""Selecting again from stored scores: the run's own settings give the run's own core, others another."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dmsae.activations.store import Store
from dmsae.cores.attribution import QuantileOver
from dmsae.cores.core import Core
from dmsae.disk import layout
from dmsae.distillation.distill import DistillConfig, distill
from dmsae.distillation.prices import held
from dmsae.distillation.reselect import reselect
from dmsae.errors import AttributionError, ConfigError
from dmsae.training.config import TrainConfig
from planted import planted_store

pytestmark = pytest.mark.usefixtures("one_thread")


TRAIN = TrainConfig(tokens=100 * 128, batch_size=128, lr=3e-3, device="cpu")
CONFIG = DistillConfig(width=64, k=4, nesting=(16, 64), cycles=1, train=TRAIN)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return planted_store(tmp_path_factory.mktemp("stores") / "store").store


@pytest.fixture(scope="module")
def run(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("reselect") / "run"
    distill(CONFIG, store, where)
    return where


@pytest.mark.parametrize("cycle", [0, 1])
def test_the_run_s_own_settings_give_the_run_s_own_core(run: Path, cycle: int) -> None:
    again, own = reselect(run, cycle).core, Core.load(layout.cycle_directory(run, cycle))
    assert torch.equal(again.encoder_CD, own.encoder_CD)
    assert again.lineage == own.lineage


def test_rows_have_the_norms_that_the_run_gives_them(store: Store, tmp_path: Path) -> None:
    distill(replace(CONFIG, core_norm="unit"), store, tmp_path / "run")
    for cycle in (0, 1):
        again = reselect(tmp_path / "run", cycle).core
        assert torch.equal(again.encoder_CD, Core.load(layout.cycle_directory(tmp_path / "run", cycle)).encoder_CD)


def test_the_share_of_the_attribution_is_that_of_the_positions_it_was_selected_over(run: Path, tmp_path: Path) -> None:
    core = reselect(run, 1, over=QuantileOver.ACTIVE, coverage=0.5).core
    core.save(tmp_path / "selected")
    known = held(tmp_path / "selected", Core.load(tmp_path / "selected"))
    assert known is not None
    assert 0.5 <= known.share < 0.9


def test_a_lower_coverage_selects_the_head_of_the_same_ranking(run: Path) -> None:
    own, fewer = Core.load(layout.cycle_directory(run, 1)), reselect(run, 1, coverage=0.4)
    assert 0 < len(fewer.core) < len(own)
    assert fewer.core.identities == own.identities[: len(fewer.core)]
    assert fewer.report.n_selected == len(fewer.core)


def test_other_positions_and_a_cap_on_rates_select_others(run: Path) -> None:
    own = Core.load(layout.cycle_directory(run, 1))
    active = reselect(run, 1, over=QuantileOver.ACTIVE).core
    assert active.scores_C[0] != own.scores_C[0]
    assert active.provenance.config["reselected"]["over"] == "active"
    capped = reselect(run, 0, max_rate=0.2)
    assert capped.report.median_rate <= 0.2
    with pytest.raises(AttributionError, match="leaves no candidate"):
        reselect(run, 0, max_rate=1e-6)


def test_the_last_cycle_is_the_default_and_others_must_exist(run: Path) -> None:
    assert reselect(run).core.cycle == 1
    with pytest.raises(ConfigError, match="cycle = 3; it must be one that has been scored, from 0 to 1"):
        reselect(run, 3)


def test_what_is_no_distillation_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match="holds one cycle of a distillation, and this needs a distillation"):
        reselect(layout.cycle_directory(run, 0), 0)
