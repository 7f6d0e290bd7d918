"""Other ways to a core, each a run like any other: a consensus, a random start, other norms, other rules, a price."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dmsae.cores.attribution import AttributionConfig
from dmsae.cores.controls import RandomKind, Rule
from dmsae.cores.core import Core
from dmsae.disk import layout
from dmsae.distillation.config import Cycle0, DistillConfig, DistillRule
from dmsae.distillation.distill import distill
from dmsae.distillation.prices import held, prices
from dmsae.distillation.rules import cores_by_rule
from dmsae.distillation.status import StageState, stages
from dmsae.distillation.transfer import Budget, TransferConfig, sae_specs, transfer, unconstrained_ks
from dmsae.errors import ConfigError
from dmsae.sae.config import CoreMode
from dmsae.sae.sae import SAE
from dmsae.training.config import TrainConfig
from planted import Planted, planted_store

pytestmark = pytest.mark.usefixtures("one_thread")
TRAIN = TrainConfig(tokens=80 * 128, batch_size=128, lr=3e-3, log_every=40, device="cpu")
CONFIG = DistillConfig(
    width=64, k=4, nesting=(16, 64), cycles=1, attribution=AttributionConfig(n_bootstrap=10), train=TRAIN
)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return planted_store(tmp_path_factory.mktemp("planted") / "store")


@pytest.fixture(scope="module")
def run(planted: Planted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("distilled") / "run"
    distill(CONFIG, planted.store, directory)
    return directory


def test_the_summary_says_what_each_selection_did(run: Path) -> None:
    for cycle in json.loads((run / layout.SUMMARY).read_text())["cycles"]:
        selection = cycle["selection"]
        assert selection["n_selected"] == cycle["core"]["size"]
        assert selection["coverage_curve"][8] == selection["n_selected"], "the ninth tenth is the coverage of the run"
        assert selection["coverage_curve"] == sorted(selection["coverage_curve"])
        assert 0 < cycle["row_norms"]["smallest"] <= cycle["row_norms"]["largest"]


def test_a_consensus_starts_with_the_sae_of_cycle_0_and_takes_one_pass(planted: Planted, tmp_path: Path) -> None:
    config = replace(CONFIG, rule=DistillRule.CONSENSUS, members=3)
    distill(CONFIG, planted.store, tmp_path / "cycles")
    tmp_path /= "consensus"
    agreed = distill(config, planted.store, tmp_path)
    first, other = (SAE.load(tmp_path / "cycle-0" / name) for name in ("sae", "member-1"))
    assert torch.equal(first.W_dec, SAE.load(tmp_path.parent / "cycles" / "cycle-0" / "sae").W_dec)
    assert not torch.equal(first.W_dec, other.W_dec)
    assert Core.load(tmp_path).digest() == agreed.distilled.digest()
    assert agreed.distilled.provenance.config["consensus"]["members"] == 3
    assert min(agreed.distilled.provenance.config["consensus"]["similarity"]) > 0
    listed = stages(tmp_path)
    assert [stage.name for stage in listed][:3] == [f"cycle 0: train {n}" for n in ("sae", "member-1", "member-2")]
    assert {stage.state for stage in listed} == {StageState.DONE}
    again = distill(config, planted.store, tmp_path)
    assert again.distilled.digest() == agreed.distilled.digest()


@pytest.mark.parametrize("fault", [{"random_start": RandomKind.UNIT}, {"cycle0": Cycle0(source="somewhere")}])
def test_a_consensus_has_a_cycle_0_of_its_own(fault: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="rule = 'consensus'; it must be cycles"):
        replace(CONFIG, rule=DistillRule.CONSENSUS, **fault)


@pytest.mark.parametrize("mode", [CoreMode.DENSE, CoreMode.DETECTOR])
def test_a_random_start_goes_on_with_random_rows(planted: Planted, run: Path, tmp_path: Path, mode: CoreMode) -> None:
    config = replace(CONFIG, core_mode=mode, random_start=RandomKind.NORM_MATCHED)
    done = distill(config, planted.store, tmp_path)
    selected = Core.load(run / "cycle-0")
    assert len(done.cores[0]) == len(selected)
    assert not torch.equal(done.cores[0].encoder_CD, selected.encoder_CD)
    assert set(done.cores[0].lineage[0].selected_in) == set(), "nothing selected a random row"
    assert ("random_detectors" if mode is CoreMode.DETECTOR else "random_core") in done.cores[0].provenance.config
    assert torch.equal(SAE.load(tmp_path / "cycle-1" / "sae").W_enc_core, done.cores[0].encoder_CD)
    assert distill(config, planted.store, tmp_path).distilled.digest() == done.distilled.digest()


def test_a_factor_is_applied_once_and_unit_rows_stay_unit(planted: Planted, run: Path, tmp_path: Path) -> None:
    found = Core.load(run / "cycle-0")
    longer = distill(replace(CONFIG, core_norm=1.5), planted.store, tmp_path / "factor")
    torch.testing.assert_close(longer.cores[0].encoder_CD, 1.5 * found.encoder_CD)
    before = dict(zip(longer.cores[0].identities, longer.cores[0].encoder_CD, strict=True))
    kept = [
        (row, before[i])
        for i, row in zip(longer.cores[1].identities, longer.cores[1].encoder_CD, strict=True)
        if i in before
    ]
    assert kept
    assert all(torch.equal(now, then) for now, then in kept)
    unit = distill(replace(CONFIG, core_norm="unit"), planted.store, tmp_path / "unit")
    for core in unit.cores:
        torch.testing.assert_close(core.encoder_CD.norm(dim=1), torch.ones(len(core)))


def test_cores_of_other_rules_train_beside_the_core_and_all_have_a_price(
    planted: Planted, run: Path, tmp_path: Path
) -> None:
    core = Core.load(run / "cycle-0")
    rules = (Rule.FIRING_RATE, Rule.RANDOM_SUBSET, Rule.PRINCIPAL_COMPONENTS)
    beside = cores_by_rule(run, rules, len(core), planted.store, seed=0)
    assert list(beside) == ["firing_rate", "random_subset", "principal_components"]
    assert {len(one) for one in beside.values()} == {len(core)}
    config = TransferConfig(
        k=(4,), width=64, nesting=(16, 64), random_cores=(RandomKind.UNIT,), baselines=("unconstrained",), train=TRAIN
    )
    results = transfer(config, core, planted.store, tmp_path, beside=beside)
    names = [result.name for result in results]
    carriers = ["dense-k4", "random-unit-dense-k4", *(f"{rule}-dense-k4" for rule in rules)]
    free = [f"unconstrained-{i}-k4" for i in (1, 2, 3)]
    assert names == [*carriers, *free]
    assert torch.equal(SAE.load(tmp_path / "firing_rate-dense-k4").W_enc_core, beside["firing_rate"].encoder_CD)
    share = held(run / "cycle-0", core)
    assert share is not None
    assert 0.9 <= share.share <= 1
    priced = dict(prices(results, planted.store, [share]))
    assert list(priced) == carriers
    assert {price.n_kept for price in priced.values()} == {len(core)}
    assert priced["dense-k4"].attribution_share == share.share
    assert priced["random-unit-dense-k4"].attribution_share is None


def test_without_an_unconstrained_sae_there_is_no_price(planted: Planted, run: Path, tmp_path: Path) -> None:
    config = TransferConfig(k=(4,), width=64, nesting=(16, 64), baselines=("msae",), train=TRAIN)
    assert prices(transfer(config, Core.load(run / "cycle-0"), planted.store, tmp_path), planted.store) == []


def test_unconstrained_saes_stand_on_both_sides_of_the_l0(run: Path) -> None:
    core = Core.load(run / "cycle-0")
    config = TransferConfig(k=(4,), width=64, nesting=(16, 64), baselines=("unconstrained",), train=TRAIN)
    free = [spec.sae for spec in sae_specs(config, core) if not spec.sae.core]
    assert {sae.prefixes for sae in free} == {(16 + len(core), 64)}
    assert min(unconstrained_ks(32, 50, Budget.TOTAL)) < 32 < max(unconstrained_ks(32, 50, Budget.TOTAL))
    assert unconstrained_ks(1, 5, Budget.TOTAL)[0] == 1
