"""Algorithm 3: which SAEs a transfer trains, and that the core's rows arrive untouched in each."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dmsae.activations.identity import ModelIdentity
from dmsae.commands.recipes import read_sections
from dmsae.config import recipe_names
from dmsae.cores.controls import RandomKind
from dmsae.cores.core import Core, Lineage, Provenance
from dmsae.distillation.status import StageState, stages
from dmsae.distillation.transfer import TransferConfig, k_noncore, sae_specs, transfer
from dmsae.errors import ConfigError
from dmsae.sae.config import CoreMode, DenseCore, SparseCore
from dmsae.sae.sae import SAE, read_made_from
from dmsae.training.config import TrainConfig
from dmsae.training.result import TrainState
from planted import MODEL, Planted, planted_store

pytestmark = pytest.mark.usefixtures("one_thread")
TRAIN = TrainConfig(tokens=60 * 128, batch_size=128, lr=3e-3, log_every=20, device="cpu")
EVERYTHING = TransferConfig(
    k=(2, 4),
    width=64,
    nesting=(16, 64),
    core_modes=(CoreMode.DENSE, CoreMode.SPARSE),
    random_cores=(RandomKind.UNIT, RandomKind.NORM_MATCHED),
    baselines=("msae", "batchtopk"),
    train=TRAIN,
)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return planted_store(tmp_path_factory.mktemp("planted") / "store")


def core_of(encoder_CD: Tensor, store: str) -> Core:
    """Return a core with these rows, all of them selected after cycle 0."""
    n = len(encoder_CD)
    return Core(
        encoder_CD=encoder_CD,
        scores_C=torch.linspace(1, 0.1, n, dtype=torch.float64),
        slots_C=torch.arange(n),
        lineage=tuple(Lineage(0, i, (0,)) for i in range(n)),
        cycle=0,
        provenance=Provenance(MODEL, store, {}),
    )


@pytest.fixture(scope="module")
def core(planted: Planted) -> Core:
    n = planted.n_read
    return core_of(planted.directions[:n] * torch.linspace(0.5, 2, n)[:, None], planted.store.key)


@pytest.mark.parametrize(("k", "expected"), [(20, 20), (40, 40), (80, 80), (160, 160), (320, 319), (640, 638)])
def test_k_noncore_is_the_paper_s(k: int, expected: int) -> None:
    assert k_noncore(k, 65_536, 197) == expected


def test_specs_are_what_their_names_say(core: Core) -> None:
    specs = {spec.name: spec for spec in sae_specs(EVERYTHING, core)}
    kinds = ["dense", "random-unit-dense", "random-norm_matched-dense"]
    kinds += ["sparse", "random-unit-sparse", "random-norm_matched-sparse", "msae", "batchtopk"]
    assert list(specs) == [f"{kind}-k{k}" for k in (2, 4) for kind in kinds]
    n = len(core)
    assert {spec.sae.k for name, spec in specs.items() if name.endswith("-k4")} == {4}
    assert specs["dense-k4"].sae.core == DenseCore(n, k_noncore(4, 64, n))
    assert specs["sparse-k4"].sae.core == SparseCore(n)
    assert specs["sparse-k4"].sae.k_selected == 4
    assert specs["dense-k4"].sae.prefixes == specs["sparse-k4"].sae.prefixes == (16 + n, 64)
    assert (specs["msae-k2"].sae.prefixes, specs["batchtopk-k2"].sae.prefixes) == ((16, 64), (64,))
    assert specs["msae-k2"].sae.core is specs["batchtopk-k2"].sae.core is None
    matched, unit = specs["random-norm_matched-dense-k2"].core_rows, specs["random-unit-dense-k2"].core_rows
    assert matched is not None
    assert unit is not None
    torch.testing.assert_close(matched.norm(dim=1), core.encoder_CD.norm(dim=1))
    torch.testing.assert_close(unit.norm(dim=1), torch.ones(n))


def test_a_dense_core_takes_its_share_of_k_from_the_others() -> None:
    """A wide core, so that the share differs from k: 4 · (64 − 24) / 64 = 2.5, and halves round up."""
    spec = sae_specs(replace(EVERYTHING, k=(4,)), core_of(torch.ones(24, 32), "any"))[0]
    assert spec.sae.core == DenseCore(24, k_noncore=3)
    assert (spec.sae.k, spec.sae.k_selected) == (4, 3)


@pytest.mark.parametrize("recipe", recipe_names())
@pytest.mark.parametrize("share", [1 / 512, 1 / 32])
def test_every_shipped_recipe_builds_its_saes(recipe: str, share: float) -> None:
    """No first core is larger than 1/32 of the width: prefix-0 holds no more than that."""
    config = read_sections(recipe).transfer
    core = core_of(torch.ones(int(share * config.width), 8), "any")
    specs = sae_specs(config, core)
    n_with_core = len(config.core_modes) * (1 + len(config.random_cores))
    assert len(specs) == len(config.k) * (n_with_core + len(config.baselines))
    for spec in specs:
        assert spec.sae.width == config.width
        assert spec.sae.n_core == (0 if spec.core_rows is None else len(core))
        assert spec.sae.n_core < spec.sae.prefixes[0]
    assert all(spec.core_rows is core.encoder_CD for spec in specs if spec.name.startswith(("dense", "sparse")))


def test_every_sae_is_trained_and_holds_the_core_to_the_bit(planted: Planted, core: Core, tmp_path: Path) -> None:
    results = transfer(EVERYTHING, core, planted.store, tmp_path / "run")
    assert {result.state for result in results} == {TrainState.FINISHED}
    for result in results:
        sae = SAE.load(result.directory)
        n_core, is_distilled = sae.config.n_core, result.name.startswith(("dense", "sparse"))
        assert n_core == (0 if result.name.startswith(("msae", "batchtopk")) else len(core))
        if is_distilled:
            assert torch.equal(sae.W_enc_core, core.encoder_CD)
        if n_core:
            is_dense = isinstance(sae.config.core, DenseCore)
            assert is_dense == ("dense" in result.name)
            assert (sae.threshold[:n_core] == 0).all() == is_dense
        assert (sae.threshold[n_core:] > 0).all()
        made_from = read_made_from(result.directory)
        assert (made_from["core"] == core.digest()) == is_distilled
        assert made_from["transferred"] == core.digest()
    assert all(stage.state is StageState.DONE for stage in stages(tmp_path / "run"))


def test_width_may_differ_from_that_of_the_distillation(planted: Planted, core: Core, tmp_path: Path) -> None:
    config = replace(EVERYTHING, k=(2,), width=128, nesting=(), core_modes=(CoreMode.DENSE,), random_cores=())
    results = transfer(replace(config, baselines=()), core, planted.store, tmp_path / "run")
    assert SAE.load(results[0].directory).config.width == 128


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (replace(MODEL, weights_sha256="another"), "the core is of planted .*weights_sha256 another"),
        (replace(MODEL, hook="another"), "the core is of planted at another "),
    ],
)
def test_a_core_of_another_model_or_hook_is_refused(
    planted: Planted, core: Core, tmp_path: Path, model: ModelIdentity, message: str
) -> None:
    other = replace(core, provenance=replace(core.provenance, model=model))
    with pytest.raises(ConfigError, match=message):
        transfer(EVERYTHING, other, planted.store, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_impossible_settings_name_the_field(planted: Planted, core: Core, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"k = \[2, 2\]"):
        TransferConfig(k=(2, 2))
    with pytest.raises(ConfigError, match="Nothing to train"):
        TransferConfig(core_modes=())
    with pytest.raises(ConfigError, match="core of 8 latents does not fit: width 16"):
        transfer(replace(EVERYTHING, width=16, nesting=(14, 16)), core, planted.store, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_empty_core_is_refused(planted: Planted, core: Core, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="core is empty"):
        transfer(EVERYTHING, core.take([]), planted.store, tmp_path / "run")
    assert not (tmp_path / "run").exists()
