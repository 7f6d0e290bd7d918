"""A model with an SAE in it, compared with the same run written out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conftest import build_model, build_tokenizer
from dictionaries import constant, identity, random_sae
from dmsae.activations.base_model import BaseModel, ModelConfig
from dmsae.errors import ConfigError, ModelError
from dmsae.interventions.hooks import splice_into
from dmsae.interventions.intervention import Intervention
from dmsae.sae.config import SAEConfig

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS = torch.tensor([[5, 6, 7, 1, 9, 10, 11, 12], [20, 21, 22, 23, 2, 25, 26, 27]])
"""Two contexts, each with a special token inside."""


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> BaseModel:
    return BaseModel.load(ModelConfig(name=str(tiny_model), hook=0, device="cpu"))


def some_sae(**changes: Any) -> Any:
    return random_sae(SAEConfig(16, 32, 4, (8, 32)), threshold=0.3, **changes)


def at_hook(model: BaseModel, tokens: Tensor) -> Tensor:
    """Return what the block after the hook is given."""
    seen: list[Tensor] = []
    block = model.model.get_submodule("model.layers.1")
    handle = block.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    model.logits(tokens)
    handle.remove()
    return seen[0]


def test_a_perfect_reconstruction_leaves_the_model_and_zeros_ablate_it(model: BaseModel) -> None:
    clean, keep = model.logits(TOKENS), model.keep_mask(TOKENS)[..., None]
    zeros = model.logits(TOKENS, lambda x: x.where(~keep, 0.0))
    with splice_into(model, identity(16)):
        assert torch.allclose(model.logits(TOKENS), clean, atol=1e-6)
    with splice_into(model, constant(torch.zeros(16))):
        assert torch.equal(model.logits(TOKENS), zeros)
    assert not torch.allclose(zeros, clean, atol=0.1)
    assert torch.equal(model.logits(TOKENS), clean), "the model is not as it was before"


def test_only_positions_that_count_are_reconstructed(model: BaseModel) -> None:
    sae, x, keep = some_sae(), at_hook(model, TOKENS), model.keep_mask(TOKENS)
    with splice_into(model, sae):
        spliced = at_hook(model, TOKENS)
    assert torch.equal(spliced[~keep], x[~keep])
    assert torch.allclose(spliced[keep], sae(x[keep]), atol=1e-6)
    assert int((~keep).sum()) == 4, "two first positions and two special tokens"


@given(value=st.floats(-50, 50, width=32), latent=st.integers(0, 31), keep_error=st.booleans())
@settings(max_examples=20)
def test_clamping_moves_x_by_the_difference_along_the_decoder_row(
    model: BaseModel, value: float, latent: int, keep_error: bool
) -> None:
    sae, x, keep = some_sae(), at_hook(model, TOKENS), model.keep_mask(TOKENS)
    with splice_into(model, sae, [Intervention(latent, "clamp", value)], keep_error):
        moved = at_hook(model, TOKENS)
    start = x if keep_error else sae(x)
    expected = start + (value - sae.encode(x)[..., latent, None]) * sae.W_dec[latent]
    assert torch.allclose(moved[keep], expected[keep], atol=1e-4)
    assert torch.equal(moved[~keep], x[~keep])


def test_several_latents_are_changed_at_once(model: BaseModel) -> None:
    sae, x, keep = some_sae(), at_hook(model, TOKENS), model.keep_mask(TOKENS)
    f = sae.encode(x)
    changed = f.clone()
    changed[..., 3], changed[..., 9], changed[..., 4] = 0, 7, -2 * f[..., 4]
    changes = [Intervention(3, "ablate"), Intervention(9, "clamp", 7), Intervention(4, "scale", -2)]
    assert (f[keep][:, [3, 4]] > 0).any(0).all(), "both fire somewhere"
    for keep_error, expected in ((False, sae.decode(changed)), (True, x + sae.decode(changed) - sae.decode(f))):
        with splice_into(model, sae, changes, keep_error):
            assert torch.allclose(at_hook(model, TOKENS)[keep], expected[keep], atol=1e-5)


def test_what_changes_nothing_changes_no_bit(model: BaseModel) -> None:
    sae, clean, silent = some_sae(), model.logits(TOKENS), 5
    sae.threshold[silent] = torch.inf
    nothing = ([Intervention(4, "scale", 1.0)], [Intervention(silent, "ablate")], [Intervention(silent, "scale", 9.0)])
    for interventions in (*nothing, []):
        with splice_into(model, sae, interventions, keep_error=True):
            assert torch.equal(model.logits(TOKENS), clean)
    with splice_into(model, sae, [Intervention(silent, "clamp", 9.0)], keep_error=True):
        assert not torch.equal(model.logits(TOKENS), clean)


def test_norm_outliers_stay_as_they_are(model: BaseModel) -> None:
    sae, x, keep = some_sae(), at_hook(model, TOKENS), model.keep_mask(TOKENS)
    norms = x.norm(dim=-1)
    ratio = float((norms[keep].sort().values[-2:].mean()) / norms[keep].median())
    with splice_into(model, sae, max_norm_ratio=ratio):
        spliced = at_hook(model, TOKENS)
    outliers = keep & (norms > ratio * norms[keep].median())
    assert int(outliers.sum()) == 1
    assert torch.equal(spliced[outliers], x[outliers])
    assert torch.allclose(spliced[keep & ~outliers], sae(x)[keep & ~outliers], atol=1e-6)


def test_a_plain_hugging_face_model_generates_with_a_cache_as_without() -> None:
    plain: Any = build_model()
    sae, change = some_sae(), [Intervention(2, "clamp", 6.0)]

    def generate(use_cache: bool) -> list[int]:
        how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 1, "eos_token_id": 1}
        made = plain.generate(TOKENS[:1], attention_mask=torch.ones_like(TOKENS[:1]), use_cache=use_cache, **how)
        tokens: list[int] = made[0, 8:].tolist()
        return tokens

    clean = generate(True)
    with splice_into(plain, sae, change, True, hook=0, tokenizer=build_tokenizer()):
        steered = generate(True)
        assert steered == generate(False)
        assert steered != clean
    with splice_into(plain, sae, change, True, hook=0, max_norm_ratio=0.0):
        assert generate(True) == clean, "an outlier of a cached step was changed"


def test_padding_on_the_left_changes_nothing() -> None:
    plain, sae = build_model(), some_sae()
    tokens, padded = torch.tensor([[5, 6, 7, 9]]), torch.tensor([[1, 1, 5, 6, 7, 9]])
    attended = torch.tensor([[0, 0, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 0, 0, 1, 2, 3]])
    with splice_into(plain, sae, hook="model.layers.0"), torch.no_grad():
        alone = plain(tokens).logits
        beside = plain(padded, attention_mask=attended, position_ids=positions).logits
        clean_mask = plain(tokens, attention_mask=torch.ones_like(tokens)).logits
    assert torch.allclose(beside[:, 2:], alone, atol=1e-5)
    assert torch.equal(clean_mask, alone)


def test_gradients_flow_through_a_splice() -> None:
    plain, sae = build_model(), some_sae()
    with splice_into(plain, sae, [Intervention(1, "scale", 2.0)], hook=0):
        plain(TOKENS).logits.sum().backward()
    weight = plain.get_parameter("model.embed_tokens.weight")
    assert isinstance(weight.grad, Tensor)
    assert torch.isfinite(weight.grad).all()


def test_what_does_not_fit_is_refused_and_leaves_no_hook(model: BaseModel) -> None:
    clean, wide = model.logits(TOKENS), random_sae(SAEConfig(24, 32, 4, (32,)))
    with (
        pytest.raises(ConfigError, match=r"at model\.layers\.0 have width 16; the SAE takes 24"),
        splice_into(model, wide),
    ):
        model.logits(TOKENS)
    for interventions, message in (
        ([Intervention(32, "ablate")], r"latents = \[32\]; the SAE has latents 0 to 31"),
        (
            [Intervention(3, "ablate"), Intervention(3, "scale", 2.0)],
            r"latents = \[3\]; each can be changed in one way",
        ),
    ):
        with pytest.raises(ConfigError, match=message), splice_into(model, some_sae(), interventions):
            pytest.fail("entered")
    with pytest.raises(ModelError, match="from 0 to 1"), splice_into(model, some_sae(), hook=2):
        pytest.fail("entered")
    with pytest.raises(ConfigError, match="needs a layer number"), splice_into(model.model, some_sae()):
        pytest.fail("entered")
    with pytest.raises(ModelError, match="Call it with input_ids"), splice_into(model, some_sae()):
        model.model(inputs_embeds=torch.zeros(1, 3, 16))
    with pytest.raises(ModelError, match="ran without its model"), splice_into(model, some_sae()):
        model.model.get_submodule("model")(input_ids=TOKENS)
    assert torch.equal(model.logits(TOKENS), clean)


@pytest.mark.parametrize(
    ("latent", "kind", "value", "message"),
    [
        (-1, "ablate", None, "latent = -1"),
        (0, "zero", None, "kind = 'zero'; it must be one of ablate, clamp, scale"),
        (0, "ablate", 1.0, "value = 1.0; it must be left out"),
        (0, "clamp", None, "value = None; it must be a finite number"),
        (0, "scale", float("nan"), "value = nan; it must be a finite number"),
        (0, "clamp", float("inf"), "value = inf"),
        (0, "clamp", True, "value = True"),
    ],
)
def test_an_intervention_is_whole(latent: int, kind: Any, value: float | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Intervention(latent, kind, value)
