"""What became of a core: told for every SAE that carries it, and for random cores from one SAE to the next."""

from pathlib import Path

import pytest

from dmsae.cores.controls import RandomKind
from dmsae.cores.core import Core
from dmsae.distillation.distill import DistillConfig, distill
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
    assert set(rows) == {("distillation", name) for name in names} | {
        ("random-unit-dense-k4", "random-unit-dense-k6"),
        ("random-detector-k4", "random-detector-k6"),
    }
    for k in (4, 6):
        detector = rows["distillation", f"detector-k{k}"]
        assert (detector.jaccard, detector.top_overlap) == (1.0, 1.0)
        assert detector.rate_before == detector.rate_after
    assert rows["random-detector-k4", "random-detector-k6"].jaccard == 1.0
    with pytest.raises(ConfigError, match="None of these SAEs carries the core"):
        survivors(tmp_path / "run", Core.load(tmp_path / "run"), [tmp_path / "saes" / "msae-k4"], store)
