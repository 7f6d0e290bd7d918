"""The SAE: what it computes, what it refuses, and that it comes back from disk as it was."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsae.config import Json
from dmsae.disk.artifact import read_artifact, write_artifact
from dmsae.errors import CheckpointError, ConfigError
from dmsae.sae.config import DenseCore, SAEConfig, SparseCore, core_first, matryoshka_nesting
from dmsae.sae.objective import Objective, backward_
from dmsae.sae.optimiser import Adam, step_
from dmsae.sae.sae import SAE, read_made_from

DENSE, SPARSE = DenseCore(3, k_noncore=4), SparseCore(3)
SHAPE: dict[str, Any] = {"d_model": 8, "width": 32, "k": 4, "prefixes": (6, 14, 32)}


def make(core: DenseCore | SparseCore | None = DENSE) -> SAE:
    config = SAEConfig(**SHAPE, core=core)
    generator = torch.Generator().manual_seed(0)
    sae = SAE.init(config, generator, torch.randn(config.n_core, 8, generator=generator))
    with torch.no_grad():
        sae.b_enc.add_(0.1 * torch.randn(32, generator=generator))
        sae.b_dec.add_(0.1 * torch.randn(8, generator=generator))
    sae.set_threshold_(0.4)
    return sae


def test_published_prefixes() -> None:
    assert matryoshka_nesting(65536) == (2048, 6144, 14336, 30720, 65536)
    assert core_first(matryoshka_nesting(65536), 197) == (2245, 6341, 14533, 30917, 65536)


def test_a_core_takes_its_room_from_the_last_group() -> None:
    assert core_first((64, 192, 2048), 50) == (114, 242, 2048)
    assert core_first((64, 192, 2048), 1855) == (1919, 2047, 2048)
    with pytest.raises(ConfigError, match=r"core of 1856 latents does not fit: width 2048 .* leaves room for 1855"):
        core_first((64, 192, 2048), 1856)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 0}, "d_model = 0; it must be a whole number of at least 1"),
        ({"width": 2.5}, r"width = 2\.5; it must be a whole number"),
        ({"k": 0}, "k = 0; it must be a whole number of at least 1"),
        ({"k": True}, "k = True; it must be a whole number"),
        ({"k": 33, "core": None}, "^k = 33; it must be at most the 32 latents that compete"),
        ({"k": 33, "core": SparseCore(3)}, "^k = 33; it must be at most the 32 latents that compete"),
        ({"core": DenseCore(3, 30)}, r"^core\.k_noncore = 30; it must be at most the 29 latents that compete"),
        ({"core": SparseCore(32)}, r"core\.n = 32; it must be smaller than width \(32\)"),
        ({"core": SparseCore(6)}, r"prefixes = \(6, 14, 32\); it must .* above the core's size \(6\)"),
        ({"prefixes": ()}, r"prefixes = \(\); it must"),
        ({"prefixes": (8, 8, 32)}, r"prefixes = \(8, 8, 32\); it must .* rise"),
        ({"prefixes": (8, 16)}, r"prefixes = \(8, 16\); it must .* to width \(32\)"),
        ({"prefixes": (8.0, 32)}, r"prefixes = \(8\.0, 32\); it must be whole numbers"),
    ],
)
def test_config_errors_name_field_and_limits(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SAEConfig(**SHAPE | {"core": DENSE} | changes)


@pytest.mark.parametrize(
    ("make_core", "message"),
    [
        (lambda: DenseCore(0, 4), r"core\.n = 0; it must be a whole number of at least 1"),
        (lambda: DenseCore(3, 0), r"core\.k_noncore = 0; it must be a whole number of at least 1"),
        (lambda: SparseCore(-1), r"core\.n = -1; it must be a whole number of at least 1"),
    ],
)
def test_a_core_has_latents_and_leaves_some_to_choose(make_core: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_core()


def test_who_competes_for_how_many_places() -> None:
    """Without a dense core, all latents compete for k places; beside one, the others for `k_noncore`."""

    def counts(core: DenseCore | SparseCore | None) -> tuple[int, ...]:
        config = SAEConfig(8, 32, 20, (32,), core)
        return config.n_core, config.n_noncore, config.n_dense, config.n_competing, config.k_selected

    assert counts(None) == (0, 32, 0, 32, 20)
    assert counts(DenseCore(3, k_noncore=18)) == (3, 29, 3, 29, 18)
    assert counts(SparseCore(3)) == (3, 29, 0, 32, 20)


def test_all_that_compete_may_be_kept() -> None:
    assert SAEConfig(8, 32, 32, (32,), SparseCore(3)).k_selected == 32
    assert SAEConfig(8, 32, 32, (32,), DenseCore(3, 29)).k_selected == 29


def test_core_rows_must_fit() -> None:
    config = SAEConfig(8, 32, 4, (32,), DENSE)
    for rows in (None, torch.zeros(2, 8), torch.zeros(3, 7)):
        with pytest.raises(ConfigError, match=r"core_rows has shape .*; it must have shape \(3, 8\)"):
            SAE.init(config, torch.Generator(), rows)
    with pytest.raises(ConfigError, match=r"core_rows has shape \(3, 8\); it must have shape \(0, 8\)"):
        SAE.init(SAEConfig(8, 32, 4, (32,)), torch.Generator(), torch.zeros(3, 8))


def test_init() -> None:
    rows = torch.randn(3, 8)
    sae = SAE.init(SAEConfig(8, 32, 4, (32,), DENSE), torch.Generator().manual_seed(1), rows)
    torch.testing.assert_close(sae.W_dec.norm(dim=1), torch.ones(32))
    assert torch.equal(sae.W_enc[:3], rows)
    assert torch.equal(sae.W_enc[3:], sae.W_dec[3:])
    for zero in (sae.b_enc, sae.b_dec, sae.threshold):
        assert not zero.any()


@pytest.mark.parametrize("core", [DenseCore(16, k_noncore=4), SparseCore(16)], ids=["dense", "sparse"])
def test_a_core_brings_encoder_rows_and_no_decoder_rows(core: DenseCore | SparseCore) -> None:
    """Core decoders are drawn like all others: the same, whatever the core, and unrelated to the frozen rows."""
    rows = torch.randn(16, 256, generator=torch.Generator().manual_seed(5))
    config = SAEConfig(256, 32, 4, (20, 32), core)
    with_core = SAE.init(config, torch.Generator().manual_seed(1), rows)
    with_other = SAE.init(config, torch.Generator().manual_seed(1), rows.flip(0))
    without = SAE.init(SAEConfig(256, 32, 4, (20, 32)), torch.Generator().manual_seed(1))
    assert torch.equal(with_core.W_dec, without.W_dec)
    assert torch.equal(with_core.W_dec, with_other.W_dec)
    # Random directions in 256 dimensions have cosines of about ±1/16.
    cosines = torch.nn.functional.cosine_similarity(with_core.W_dec[:16, None].detach(), rows[None], dim=2)
    assert cosines.abs().max() < 0.35
    assert float(cosines.square().mean().sqrt()) == pytest.approx(1 / 16, rel=0.2)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(0, 2**16))
def test_encoding_does_not_depend_on_the_batch(n_tokens: int, seed: int) -> None:
    sae = make().double()
    x = torch.randn(n_tokens, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    together = sae.encode(x)
    alone = torch.stack([sae.encode(row) for row in x])
    torch.testing.assert_close(together, alone)
    torch.testing.assert_close(sae.encode(x.view(1, n_tokens, 8))[0], together)


def test_thresholds_gate_the_non_core_only_when_the_core_is_dense() -> None:
    x = torch.randn(500, 8)
    dense, sparse = make(DENSE).encode(x), make(SPARSE).encode(x)
    assert 0 < dense[:, :3][dense[:, :3] > 0].min() < 0.4
    assert dense[:, 3:][dense[:, 3:] > 0].min() > 0.4
    assert sparse[sparse > 0].min() > 0.4


def test_decoding_by_prefix() -> None:
    sae, f = make(), torch.rand(2, 5, 32)
    for prefix, size in enumerate(sae.config.prefixes):
        cut = f.clone()
        cut[..., size:] = 0
        torch.testing.assert_close(sae.decode(f, prefix), sae.decode(cut))
    torch.testing.assert_close(sae.decode(f, 2), sae.decode(f))
    x = torch.randn(4, 8)
    torch.testing.assert_close(sae(x), sae.decode(sae.encode(x)))


def test_autograd_sees_the_sae() -> None:
    sae = make().double()
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(sae, (x,))


@pytest.mark.parametrize("core", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_the_core_cannot_change(core: DenseCore | SparseCore) -> None:
    sae = make(core)
    rows, bias = sae.W_enc_core.clone(), sae.b_enc[:3].clone()
    optimiser = Adam(sae, lr=0.1)
    assert not any(p.data_ptr() == sae.W_enc_core.data_ptr() for p in optimiser.parameters)
    for _ in range(20):
        step_(sae, optimiser, backward_(sae, torch.randn(32, 8), Objective()).grad_norm, 1.0)
    assert torch.equal(sae.W_enc_core, rows)
    assert sae.W_enc_core.grad is None
    assert not torch.equal(sae.b_enc[:3], bias)


def test_folding_the_scale() -> None:
    sae, x, scale = make().double(), torch.randn(20, 8, dtype=torch.float64), 37.5
    rows = sae.W_enc.clone()
    f, reconstruction = sae.encode(x / scale), sae(x / scale)
    sae.fold_scale_(scale)
    torch.testing.assert_close(sae.encode(x), f * scale)
    torch.testing.assert_close(sae(x), reconstruction * scale)
    assert torch.equal(sae.W_enc, rows)


@pytest.mark.parametrize("core", [None, DENSE, SPARSE], ids=["none", "dense", "sparse"])
def test_saving_and_loading(core: DenseCore | SparseCore | None, tmp_path: Path) -> None:
    sae = make(core)
    sae.save(tmp_path / "sae", {"store": "0123"})
    for place in (tmp_path / "sae", tmp_path, str(tmp_path)):  # also from the run that holds it
        loaded = SAE.load(place)
        assert loaded.config == sae.config
        assert loaded.state_dict().keys() == sae.state_dict().keys()
        for name, tensor in sae.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor)
    assert read_made_from(tmp_path / "sae") == read_made_from(tmp_path) == {"store": "0123"}


def test_a_loaded_sae_is_frozen_until_asked(tmp_path: Path) -> None:
    sae = make()
    sae.save(tmp_path)
    loaded, x = SAE.load(tmp_path), torch.randn(16, 8)
    assert not loaded.encode(x).requires_grad
    loaded.requires_grad_()
    for one in (sae, loaded):
        step_(one, Adam(one, lr=0.1), backward_(one, x, Objective()).grad_norm, 1.0)
    for name, tensor in sae.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def edit_config(change: Callable[[Json], object]) -> Callable[[Path], None]:
    """Return what writes another config under a seal that fits, as another program could."""

    def damage(directory: Path) -> None:
        tensors, facts = read_artifact(directory, "sae")
        change(facts["config"])
        write_artifact(directory, "sae", tensors, facts)

    return damage


def edit_by_hand(directory: Path) -> None:
    path = directory / "sae.json"
    path.write_text(path.read_text().replace('"k": 4', '"k": 3'))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "sae.json").unlink(), "sae.json is missing"),
        (lambda d: (d / "sae.safetensors").unlink(), "sae.safetensors is missing"),
        (lambda d: (d / "sae.json").write_text("{"), "not the JSON"),
        (lambda d: (d / "sae.json").write_text("[]"), "not the JSON"),
        (lambda d: (d / "sae.safetensors").write_bytes(b"junk"), "not the file"),
        (edit_by_hand, "has changed"),
        (edit_config(lambda c: c.update(depth=1)), "Unknown setting depth"),
        (edit_config(lambda c: c.pop("k")), "needs k"),
        (edit_config(lambda c: c.update(k=0)), "k = 0; it must"),
        (edit_config(lambda c: c["core"].update(kind="soft")), "core = .*'soft'.* is not one of"),
        (edit_config(lambda c: c.update(core=["dense"])), r"core = \['dense'\] is not one of"),
        (edit_config(lambda c: c.update(d_model=9)), "its config asks for"),
    ],
)
def test_damage_is_noticed(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    make().save(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        SAE.load(tmp_path)
