"""Detector cores through distillation and transfer: activations that no cycle, seed, width or sparsity changes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dmsae.activations.splits import Split
from dmsae.cores.controls import RandomKind
from dmsae.cores.core import Core
from dmsae.disk import layout
from dmsae.distillation.distill import DistillConfig, distill
from dmsae.distillation.transfer import Budget, TransferConfig, sae_specs, transfer
from dmsae.errors import ConfigError, TrainingError
from dmsae.sae.config import CoreMode, DetectorCore
from dmsae.sae.detectors import detect
from dmsae.sae.sae import SAE
from dmsae.training.config import TrainConfig
from dmsae.training.result import TrainState
from planted import Planted, planted_store

pytestmark = pytest.mark.usefixtures("one_thread")
TRAIN = TrainConfig(tokens=150 * 128, batch_size=128, lr=3e-3, log_every=50, device="cpu")
CONFIG = DistillConfig(width=64, k=4, nesting=(16, 64), cycles=2, core_mode=CoreMode.DETECTOR, train=TRAIN)
TRANSFER = TransferConfig(
    k=(6, 8),
    width=96,
    nesting=(16, 96),
    core_modes=(CoreMode.DETECTOR,),
    budget=Budget.TOTAL,
    random_cores=(RandomKind.NORM_MATCHED,),
    train=TRAIN,
)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return planted_store(tmp_path_factory.mktemp("planted") / "store")


@pytest.fixture(scope="module")
def run(planted: Planted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("distilled") / "run"
    distill(CONFIG, planted.store, directory)
    return directory


def test_a_latent_fires_the_same_in_every_cycle_that_carries_it(planted: Planted, run: Path) -> None:
    x = planted.store.heldout()
    cores = [Core.load(layout.cycle_directory(run, cycle)) for cycle in range(3)]
    first_codes: dict[tuple[int, int], torch.Tensor] = {}
    for core in cores:
        assert core.detectors is not None
        codes = detect(x, core.encoder_CD, core.detectors)
        for identity, column in zip(core.identities, codes.T, strict=True):
            first_codes.setdefault(identity, column)
            assert torch.equal(column, first_codes[identity])
    for cycle in (1, 2):  # and so do the SAEs of the cycles, of which a core is the first latents
        sae = SAE.load(layout.cycle_directory(run, cycle) / layout.SAE)
        for identity, column in zip(cores[cycle - 1].identities, sae.encode(x).T, strict=False):
            assert torch.equal(column, first_codes[identity])
    assert len(Core.load(run)) > 0


def test_every_transferred_sae_gives_the_same_activations_and_the_l0_asked_for(
    planted: Planted, run: Path, tmp_path: Path
) -> None:
    core = Core.load(run).take([0, 1, 2])
    results = transfer(TRANSFER, core, planted.store, tmp_path / "run")
    names = ("detector", "random-detector")
    assert [result.name for result in results] == [f"{name}-k{k}" for k in (6, 8) for name in names]
    assert {result.state for result in results} == {TrainState.FINISHED}
    x, codes = planted.store.heldout(), []
    for result in results:
        sae = SAE.load(result.directory)
        assert isinstance(sae.config.core, DetectorCore)
        k = int(result.name.rpartition("-k")[2])
        # Thresholds are averages over the last steps: after a short training some per cent off.
        assert float((sae.encode(x) > 0).sum(1).double().mean()) == pytest.approx(k, rel=0.1)
        if not result.name.startswith("random"):
            codes.append(sae.encode(x)[:, :3])
    assert torch.equal(codes[0], codes[1])


def test_what_detectors_leave_of_k_goes_to_the_others(planted: Planted, run: Path) -> None:
    core = Core.load(run)
    assert core.detectors is not None
    sample = next(planted.store.batches(Split.TRAIN, 8192))["x"]
    l0 = float((detect(sample, core.encoder_CD, core.detectors) > 0).sum(1).float().mean())
    spec = sae_specs(replace(TRANSFER, k=(30,), random_cores=()), core, planted.store)[0]
    assert abs(spec.sae.k_selected - (30 - l0)) <= 1
    with pytest.raises(ConfigError, match=r"k = 1; it must exceed the \d+\.\d detectors that fire"):
        sae_specs(replace(TRANSFER, k=(1,), random_cores=()), core, planted.store)
    with pytest.raises(ConfigError, match="give a store"):
        sae_specs(TRANSFER, core)


def test_a_core_of_rows_alone_says_that_it_has_no_detectors(planted: Planted, run: Path) -> None:
    rows = replace(Core.load(run), detectors=None)
    with pytest.raises(ConfigError, match="no offsets and thresholds"):
        sae_specs(replace(TRANSFER, random_cores=()), rows, planted.store)


def test_frequent_latents_can_be_kept_out_of_every_core(planted: Planted, tmp_path: Path) -> None:
    done = distill(replace(CONFIG, max_rate=0.2), planted.store, tmp_path / "run")
    x = next(planted.store.batches(Split.TRAIN, 8192))["x"]
    for core in done.cores:
        assert core.detectors is not None
        assert (detect(x, core.encoder_CD, core.detectors) > 0).float().mean(0).max() < 0.3  # 0.2 and sampling error


def test_a_dense_distillation_remembers_the_detectors_of_each_latent_s_birth(planted: Planted, tmp_path: Path) -> None:
    """In a dense core the bias is learned anew in every cycle, and the threshold is 0: neither says what it detects."""
    done = distill(replace(CONFIG, core_mode=CoreMode.DENSE), planted.store, tmp_path / "run")
    born: dict[tuple[int, int], tuple[float, ...]] = {}
    for core in done.cores:
        assert core.detectors is not None
        for place, identity in enumerate(core.identities):
            values = tuple(float(values_C[place]) for values_C in core.detectors)
            assert born.setdefault(identity, values) == values
    assert done.distilled.detectors is not None
    assert (done.distilled.detectors.thresholds_C > 0).all()


def test_a_cycle_from_which_nothing_can_be_selected_ends_the_run_with_a_summary(
    planted: Planted, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match="cannot be selected from"):
        distill(replace(CONFIG, max_rate=1e-6), planted.store, tmp_path / "run")
    assert "failure" in (tmp_path / "run" / layout.SUMMARY).read_text()


def test_a_sparse_core_may_be_distilled_too(planted: Planted, tmp_path: Path) -> None:
    done = distill(replace(CONFIG, core_mode=CoreMode.SPARSE), planted.store, tmp_path / "run")
    assert done.last_sae.config.core is not None
    assert done.last_sae.config.core.kind == "sparse"
