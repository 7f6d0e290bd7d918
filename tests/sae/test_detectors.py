"""Frozen detectors: the same activations to the bit in every SAE that carries them, whatever else is in it."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dmsae.cores.selection import detectors_of
from dmsae.errors import ConfigError
from dmsae.sae.config import DenseCore, DetectorCore, SAEConfig
from dmsae.sae.detectors import Detectors, detect
from dmsae.sae.objective import Objective, backward_
from dmsae.sae.optimiser import Adam, step_
from dmsae.sae.sae import SAE

D, C = 24, 5


def frozen(n: int = C, seed: int = 0, d_model: int = D) -> tuple[Tensor, Detectors]:
    made = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, d_model, generator=made)
    return rows, Detectors(torch.randn(n, generator=made), torch.rand(n, generator=made))


def carrier(width: int, k_noncore: int, seed: int) -> SAE:
    """Return an SAE that carries the detectors among other latents, with a b_dec and biases of its own."""
    config = SAEConfig(D, width, 8, (C + 4, width), DetectorCore(C, k_noncore))
    made = torch.Generator().manual_seed(seed)
    sae = SAE.init(config, made, *frozen())
    with torch.no_grad():
        sae.b_dec.normal_(generator=made)
        sae.b_enc.normal_(generator=made)
    sae.set_threshold_(0.1)
    return sae


def test_a_detector_fires_above_its_threshold_with_the_value_of_row_and_offset() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    detectors = Detectors(torch.tensor([0.5, -1.0]), torch.tensor([1.0, 0.25]))
    x = torch.tensor([[1.0, 0.5], [0.5, 0.75], [-2.0, 3.0]])
    assert detect(x, rows, detectors).tolist() == [[1.5, 0.0], [0.0, 0.5], [0.0, 5.0]]


@settings(max_examples=25)
@given(st.integers(1, 700), st.integers(1, 150), st.integers(2, 70), st.integers(0, 9))
def test_neither_other_tokens_nor_other_detectors_change_a_bit(n_tokens: int, n: int, d_model: int, seed: int) -> None:
    rows, detectors = frozen(n, seed, d_model)
    made = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(n_tokens, d_model, generator=made)
    whole = detect(x, rows, detectors)
    some = torch.randperm(n_tokens, generator=made)[: max(1, n_tokens // 3)]
    few = torch.randperm(n, generator=made)[: max(1, n // 2)]
    part = detect(x[some], rows[few], Detectors(*(values[few] for values in detectors)))
    assert torch.equal(part, whole[some][:, few])
    assert torch.equal(detect(x[:1], rows, detectors), whole[:1])


def test_every_sae_that_carries_them_gives_the_same_activations_to_the_bit(tmp_path: Path) -> None:
    x = torch.randn(300, D)
    one, other = carrier(64, 3, seed=1), carrier(200, 30, seed=2)
    assert torch.equal(one.encode(x)[:, :C], other.encode(x)[:, :C])
    assert torch.equal(one.encode(x[:7])[:, :C], other.encode(x)[:7, :C])
    assert torch.equal(one.encode(x)[:, :C], detect(x, *frozen()))
    one.save(tmp_path)
    assert torch.equal(SAE.load(tmp_path).encode(x), one.encode(x))


def test_training_changes_their_decoders_and_nothing_else_of_them() -> None:
    sae = carrier(64, 3, seed=1)
    before = {name: tensor.clone() for name, tensor in sae.state_dict().items()}
    optimiser = Adam(sae, lr=1e-2)
    for _ in range(5):
        step_(sae, optimiser, backward_(sae, torch.randn(128, D), Objective()).grad_norm, 1.0)
    assert torch.equal(sae.W_enc_core, before["W_enc_core"])
    assert torch.equal(sae.offset, before["offset"])
    assert torch.equal(sae.threshold[:C], before["threshold"][:C])
    assert (sae.W_dec[:C] - before["W_dec"][:C]).abs().amax(1).min() > 1e-4
    assert {len(parameter) for parameter in sae.parameters()} == {64, 64 - C, D}  # no bias of theirs is learned


def test_a_bias_that_amounts_to_the_offset_is_saved_for_readers_who_know_no_detectors() -> None:
    sae = carrier(64, 3, seed=1)
    x = torch.randn(50, D)
    rows, detectors = frozen()
    expected = x @ rows.T + detectors.offsets_C
    torch.testing.assert_close(sae.pre_activations(x)[:, :C], expected, rtol=1e-4, atol=1e-4)


def test_detectors_taken_from_an_sae_fire_as_its_latents_do() -> None:
    made = torch.Generator().manual_seed(0)
    sae = SAE.init(SAEConfig(D, 64, 8, (12, 64), DenseCore(C, 4)), made, torch.randn(C, D, generator=made))
    with torch.no_grad():
        sae.b_dec.normal_(generator=made)
        sae.b_enc.normal_(generator=made)
    sae.set_threshold_(0.3)
    x, latents = torch.randn(400, D, generator=made), torch.tensor([9, 2, 30])
    f = detect(x, sae.W_enc[latents].detach(), detectors_of(sae, latents))
    torch.testing.assert_close(f, sae.encode(x)[:, latents].detach(), rtol=1e-4, atol=1e-4)


def test_detectors_that_stay_detectors_keep_every_bit() -> None:
    sae = carrier(64, 3, seed=1)
    kept = detectors_of(sae, torch.tensor([3, 0]))
    assert torch.equal(kept.offsets_C, frozen()[1].offsets_C[[3, 0]])
    assert torch.equal(kept.thresholds_C, frozen()[1].thresholds_C[[3, 0]])


def test_rows_alone_do_not_make_detectors() -> None:
    config = SAEConfig(D, 64, 8, (12, 64), DetectorCore(C, 4))
    with pytest.raises(ConfigError, match="needs offsets and thresholds, and this one has none"):
        SAE.init(config, torch.Generator(), frozen()[0])
    rows, detectors = frozen()
    with pytest.raises(ConfigError, match="offsets_C must be 5 finite numbers"):
        SAE.init(config, torch.Generator(), rows, detectors._replace(offsets_C=torch.full((C,), torch.nan)))
