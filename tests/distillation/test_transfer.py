"""Algorithm 3: which SAEs a transfer trains, and that the core's rows arrive untouched in each."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dmsae.cores.core import Core, Lineage, Provenance, RandomKind
from dmsae.distillation.status import stages
from dmsae.distillation.transfer import TransferConfig, k_noncore, members, transfer
from dmsae.errors import ConfigError
from dmsae.sae.sae import CoreMode, load_sae, read_made_from
from dmsae.training.learner import State
from dmsae.training.schedule import TrainConfig
from planted import MODEL, Planted, planted_store

pytestmark = pytest.mark.usefixtures("one_thread")
TRAIN = TrainConfig(tokens=60 * 128, batch_size=128, lr=3e-3, log_every=20, device="cpu")
EVERYTHING = TransferConfig(
    k=(2, 4),
    width=64,
    prefixes=(16, 64),
    core_modes=(CoreMode.DENSE, CoreMode.SPARSE),
    random_cores=(RandomKind.UNIT, RandomKind.NORM_MATCHED),
    baselines=("msae", "batchtopk"),
    train=TRAIN,
)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return planted_store(tmp_path_factory.mktemp("planted") / "store")


@pytest.fixture(scope="module")
def core(planted: Planted) -> Core:
    n = planted.n_loud
    return Core(
        encoder_CD=planted.directions[:n] * torch.linspace(0.5, 2, n)[:, None],
        scores_C=torch.linspace(1, 0.1, n, dtype=torch.float64),
        slots_C=torch.arange(n),
        lineage=tuple(Lineage(0, i, (0,)) for i in range(n)),
        cycle=0,
        provenance=Provenance(MODEL, planted.store.key, {}),
    )


@pytest.mark.parametrize(("k", "expected"), [(20, 20), (40, 40), (80, 80), (160, 160), (320, 319), (640, 638)])
def test_k_noncore_is_the_paper_s(k: int, expected: int) -> None:
    assert k_noncore(k, 65_536, 197) == expected


def test_members_are_what_their_names_say(core: Core) -> None:
    found = {member.name: member for member in members(EVERYTHING, core)}
    kinds = ["dense", "random-unit-dense", "random-norm_matched-dense"]
    kinds += ["sparse", "random-unit-sparse", "random-norm_matched-sparse", "msae", "batchtopk"]
    assert list(found) == [f"{kind}-k{k}" for k in (2, 4) for kind in kinds]
    assert found["dense-k4"].sae.k == k_noncore(4, 64, len(core))
    assert found["sparse-k4"].sae.k == 4
    assert found["dense-k4"].sae.prefixes == (16 + len(core), 64)
    assert (found["msae-k2"].sae.prefixes, found["batchtopk-k2"].sae.prefixes) == ((16, 64), (64,))
    assert found["msae-k2"].sae.n_core == found["batchtopk-k2"].sae.n_core == 0
    matched, unit = found["random-norm_matched-dense-k2"].core_rows, found["random-unit-dense-k2"].core_rows
    assert matched is not None
    assert unit is not None
    torch.testing.assert_close(matched.norm(dim=1), core.encoder_CD.norm(dim=1))
    torch.testing.assert_close(unit.norm(dim=1), torch.ones(len(core)))


def test_every_sae_is_trained_and_holds_the_core_to_the_bit(planted: Planted, core: Core, tmp_path: Path) -> None:
    outcomes = transfer(EVERYTHING, core, planted.store, tmp_path / "run")
    assert {outcome.state for outcome in outcomes} == {State.FINISHED}
    for outcome in outcomes:
        sae = load_sae(outcome.directory)
        if outcome.name.startswith(("dense", "sparse")):
            assert torch.equal(sae.W_enc_core, core.encoder_CD)
        if sae.config.n_core:
            dense = sae.config.core_mode is CoreMode.DENSE
            assert (sae.threshold[: sae.config.n_core] == 0).all() == dense
        assert (sae.threshold[sae.config.n_core :] > 0).all()
        distilled = outcome.name.startswith(("dense", "sparse"))
        assert (read_made_from(outcome.directory)["core"] == core.digest()) == distilled
    assert all(stage.state == "done" for stage in stages(tmp_path / "run"))


def test_width_may_differ_from_that_of_the_distillation(planted: Planted, core: Core, tmp_path: Path) -> None:
    config = replace(EVERYTHING, k=(2,), width=128, prefixes=(), core_modes=(CoreMode.DENSE,), random_cores=())
    outcomes = transfer(replace(config, baselines=()), core, planted.store, tmp_path / "run")
    assert load_sae(outcomes[0].directory).config.width == 128


@pytest.mark.parametrize("field", ["weights_sha256", "hook"])
def test_a_core_of_another_model_or_place_is_refused(planted: Planted, core: Core, tmp_path: Path, field: str) -> None:
    other = replace(core, provenance=replace(core.provenance, model=MODEL | {field: "another"}))
    with pytest.raises(ConfigError, match=f"{field} another"):
        transfer(EVERYTHING, other, planted.store, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_impossible_settings_name_the_field(planted: Planted, core: Core, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"k = \[2, 2\]"):
        TransferConfig(k=(2, 2))
    with pytest.raises(ConfigError, match="Nothing to train"):
        TransferConfig(core_modes=())
    with pytest.raises(ConfigError, match="n_core is 8"):
        transfer(replace(EVERYTHING, width=16, prefixes=(14, 16)), core, planted.store, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_empty_core_is_refused(planted: Planted, core: Core, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="core is empty"):
        transfer(EVERYTHING, core.take([]), planted.store, tmp_path / "run")
    assert not (tmp_path / "run").exists()
