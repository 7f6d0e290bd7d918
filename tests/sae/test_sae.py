"""The SAE: what it computes, what it refuses, and that it comes back from disk as it was."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsae.disk.artifact import read_artifact, write_artifact
from dmsae.errors import CheckpointError, ConfigError
from dmsae.sae.objective import Objective, adam, backward_, step_
from dmsae.sae.sae import SAE, CoreMode, SAEConfig, core_first, load_sae, matryoshka_prefixes, save_sae


def make(n_core: int = 3, **overrides: object) -> SAE:
    settings = {"d_model": 8, "width": 32, "k": 4, "prefixes": (6, 14, 32), "n_core": n_core} | overrides
    generator = torch.Generator().manual_seed(0)
    sae = SAE.init(SAEConfig(**settings), generator, torch.randn(n_core, 8, generator=generator))  # type: ignore[arg-type]
    with torch.no_grad():
        sae.b_enc += 0.1 * torch.randn(32, generator=generator)
        sae.b_dec += 0.1 * torch.randn(8, generator=generator)
    sae.set_threshold_(0.4)
    return sae


def test_published_prefixes() -> None:
    assert matryoshka_prefixes(65536) == (2048, 6144, 14336, 30720, 65536)
    assert core_first(matryoshka_prefixes(65536), 197) == (2245, 6341, 14533, 30917, 65536)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"d_model": 0}, "d_model is 0; .* at least 1"),
        ({"width": 2.5}, r"width is 2\.5"),
        ({"k": 0}, "k is 0; .* at least 1"),
        ({"k": True}, "k is True"),
        ({"k": 30}, "k is 30; .* 29"),
        ({"n_core": -1}, "n_core is -1"),
        ({"n_core": 32}, r"n_core is 32; .* width \(32\)"),
        ({"n_core": 6}, r"prefixes is \(6, 14, 32\); .* above n_core \(6\)"),
        ({"core_mode": "soft"}, "core_mode is 'soft'; .*dense.*sparse"),
        ({"prefixes": ()}, r"prefixes is \(\)"),
        ({"prefixes": (8, 8, 32)}, "prefixes"),
        ({"prefixes": (8, 16)}, r"last one must be width \(32\)"),
        ({"prefixes": (8.0, 32)}, "prefixes"),
    ],
)
def test_config_errors_name_field_and_limits(overrides: dict[str, object], message: str) -> None:
    values = {"d_model": 8, "width": 32, "k": 4, "prefixes": (6, 14, 32), "n_core": 3} | overrides
    with pytest.raises(ConfigError, match=message):
        SAEConfig(**values)  # type: ignore[arg-type]


def test_k_may_reach_all_latents_when_the_core_competes() -> None:
    assert SAEConfig(8, 32, 32, (32,), n_core=3, core_mode=CoreMode.SPARSE).n_competing == 32


def test_core_rows_must_fit() -> None:
    config = SAEConfig(8, 32, 4, (32,), n_core=3)
    for rows in (None, torch.zeros(2, 8), torch.zeros(3, 7)):
        with pytest.raises(ConfigError, match="core_rows"):
            SAE.init(config, torch.Generator(), rows)


def test_init() -> None:
    core = torch.randn(3, 8)
    sae = SAE.init(SAEConfig(8, 32, 4, (32,), n_core=3), torch.Generator().manual_seed(1), core)
    torch.testing.assert_close(sae.W_dec.norm(dim=1), torch.ones(32))
    assert torch.equal(sae.W_enc[:3], core)
    assert torch.equal(sae.W_enc[3:], sae.W_dec[3:])
    assert not torch.allclose(sae.W_dec[:3], core / core.norm(dim=1, keepdim=True), atol=0.1)
    assert not sae.b_enc.any()
    assert not sae.b_dec.any()


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
    dense, sparse = make().encode(x), make(core_mode=CoreMode.SPARSE).encode(x)
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


@pytest.mark.parametrize("core_mode", CoreMode)
def test_the_core_cannot_change(core_mode: CoreMode) -> None:
    sae = make(core_mode=core_mode)
    core, bias = sae.W_enc_core.clone(), sae.b_enc[:3].clone()
    optimiser = adam(sae, lr=0.1)
    assert not any(p.data_ptr() == sae.W_enc_core.data_ptr() for g in optimiser.param_groups for p in g["params"])
    for _ in range(20):
        step_(sae, optimiser, backward_(sae, torch.randn(32, 8), Objective()).grad_norm, 1.0)
    assert torch.equal(sae.W_enc_core, core)
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


@pytest.mark.parametrize("n_core", [0, 3])
def test_saving_and_loading(n_core: int, tmp_path: Path) -> None:
    sae = make(n_core)
    save_sae(sae, tmp_path / "sae")
    loaded = load_sae(tmp_path / "sae")
    assert loaded.config == sae.config
    for name, tensor in sae.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def edit_config(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    """Write another config under a seal that fits, as a program with other ideas would."""

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
        (edit_config(lambda c: c.update(k=0)), "k is 0"),
        (edit_config(lambda c: c.update(core_mode="soft")), "core_mode"),
        (edit_config(lambda c: c.update(core_mode=["dense"])), "not the config"),
        (edit_config(lambda c: c.update(d_model=9)), "its config asks for"),
    ],
)
def test_damage_is_noticed(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    save_sae(make(), tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load_sae(tmp_path)
