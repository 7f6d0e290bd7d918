"""What became of a core: told for every SAE that carries it, for every core from one SAE to the next, and by cycle."""

from dataclasses import replace
from pathlib import Path

import pytest

from dmsae.cores.controls import RandomKind, Rule
from dmsae.cores.core import Core
from dmsae.cores.norms import with_norm
from dmsae.distillation.distill import DistillConfig, distill
from dmsae.distillation.rules import cores_by_rule
from dmsae.distillation.survivors import survivors
from dmsae.distillation.transfer import TransferConfig, transfer
from dmsae.errors import ConfigError
from dmsae.sae.config import CoreMode
from dmsae.training.config import TrainConfig
from planted import planted_store

pytestmark = pytest.mark.usefixtures("one_thread")


def test_detectors_survive_to_the_bit_and_random_cores_are_compared_with_themselves(tmp_path: Path) -> None:
    store = planted_store(tmp_path / "store").store
    train = TrainConfig(tokens=60 * 128, batch_size=128, lr=3e-3, device="cpu")
    config = DistillConfig(width=64, k=4, nesting=(16, 64), cycles=1, core_mode=CoreMode.DETECTOR, train=train)
    core = distill(config, store, tmp_path / "run").distilled
    modes = (CoreMode.DENSE, CoreMode.DETECTOR)
    everything = TransferConfig(
        k=(4, 6),
        width=64,
        nesting=(16, 64),
        core_modes=modes,
        random_cores=(RandomKind.UNIT,),
        baselines=("msae",),
        train=train,
    )
    saes = [result.directory for result in transfer(everything, core, store, tmp_path / "saes")]
    rows = {(row.before, row.after): row.summary for row in survivors(tmp_path / "run", core, saes, store)}
    names = [f"{mode}-k{k}" for k in (4, 6) for mode in modes]
    sources = ("dense", "detector", "random-unit-dense", "random-detector")
    assert set(rows) == {("distillation", name) for name in names} | {(f"{one}-k4", f"{one}-k6") for one in sources}
    for k in (4, 6):
        detector = rows["distillation", f"detector-k{k}"]
        assert (detector.jaccard, detector.top_overlap) == (1.0, 1.0)
        assert detector.rate_before == detector.rate_after
    assert rows["random-detector-k4", "random-detector-k6"].jaccard == 1.0
    with pytest.raises(ConfigError, match="None of these SAEs carries the core"):
        survivors(tmp_path / "run", Core.load(tmp_path / "run"), [tmp_path / "saes" / "msae-k4"], store)


def test_cores_of_other_rules_are_compared_with_the_cycle_that_they_come_from(tmp_path: Path) -> None:
    store = planted_store(tmp_path / "store").store
    train = TrainConfig(tokens=60 * 128, batch_size=128, lr=3e-3, device="cpu")
    config = DistillConfig(width=64, k=4, nesting=(16, 64), cycles=2, train=train, core_norm="unit")
    done = distill(config, store, tmp_path / "run")
    rules = (Rule.FIRING_RATE, Rule.PRINCIPAL_COMPONENTS)
    beside = cores_by_rule(tmp_path / "run", rules, len(done.distilled), store, 0)
    chosen = TransferConfig(k=(4,), width=64, nesting=(16, 64), core_norm="unit", train=train)
    saes = [one.directory for one in transfer(chosen, done.distilled, store, tmp_path / "saes", beside=beside)]
    core, *others = (with_norm(one, "unit") for one in (done.distilled, *beside.values()))
    rows = survivors(tmp_path / "run", core, saes, store, others=others)
    assert [(row.before, row.after) for row in rows] == [
        ("distillation", "dense-k4"),
        ("cycle 0", "firing_rate-dense-k4"),
    ]


@pytest.mark.parametrize("mode", [CoreMode.DENSE, CoreMode.DETECTOR])
def test_every_cycle_says_what_became_of_its_core(tmp_path: Path, mode: CoreMode) -> None:
    store = planted_store(tmp_path / "store").store
    train = TrainConfig(tokens=60 * 128, batch_size=128, lr=3e-3, device="cpu")
    config = DistillConfig(width=64, k=4, nesting=(16, 64), cycles=2, core_mode=mode, train=train)
    first, *later = distill(config, store, tmp_path / "run").reports
    assert first.survival is None
    for report in later:
        assert report.survival is not None
        assert report.survival.n_latents == report.n_frozen
        assert report.survival.jaccard is not None
        assert (report.survival.jaccard == 1.0) is (mode is CoreMode.DETECTOR)
    random = replace(config, random_start=RandomKind.NORM_MATCHED)
    known = [report.survival is not None for report in distill(random, store, tmp_path / "random").reports]
    assert known == [False, False, True], "a random core was in no SAE before"
