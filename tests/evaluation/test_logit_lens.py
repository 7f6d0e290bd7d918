"""The tokens that decoder rows promote and suppress, against the model's own norm and unembedding."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from conftest import build_model, build_tokenizer
from dmsae.activations.base_model import BaseModel, resolve_hook
from dmsae.errors import ConfigError, ModelError
from dmsae.evaluation import logit_lens
from dmsae.evaluation.logit_lens import final_norm, promoted_tokens
from planted import MODEL

pytestmark = pytest.mark.usefixtures("one_thread")

D_MODEL, N_TOKENS, N_VOCABULARY = 16, 63, 80
"""The tokenizer has 63 tokens; the unembedding has rows beyond them, as is usual."""
COMMON: dict[str, Any] = {
    "vocab_size": N_VOCABULARY,
    "hidden_size": D_MODEL,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def llama(**changes: Any) -> Any:
    return build_model(vocab_size=N_VOCABULARY, **changes)


def gemma() -> Any:
    config = transformers.GemmaConfig(**COMMON, num_key_value_heads=2, head_dim=8, intermediate_size=32)
    return transformers.GemmaForCausalLM(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=N_VOCABULARY, n_positions=64, n_embd=D_MODEL, n_layer=1, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def neox() -> Any:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**COMMON, intermediate_size=32))


FAMILIES: dict[str, tuple[Callable[[], Any], str, bool]] = {
    "llama": (llama, "model.norm", False),
    "gemma": (gemma, "model.norm", False),
    "gpt2": (gpt2, "transformer.ln_f", True),
    "neox": (neox, "gpt_neox.final_layer_norm", True),
}
"""Each with the name of its final norm, and whether that is a LayerNorm."""


def base_model(model: Any) -> BaseModel:
    """Return a model, ready for use, whose norms and unembedding are not those of a fresh one."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name or "ln_f" in name:
            nn.init.normal_(parameter, 1.0, 0.5)
    nn.init.normal_(model.get_output_embeddings().weight)
    with torch.no_grad():
        model.get_output_embeddings().weight[N_TOKENS:] *= 100  # no token has these rows
    return BaseModel(model, build_tokenizer(), replace(MODEL, name="tiny", hook=resolve_hook(model, 0)))


LLAMA = base_model(llama())


def rows(n: int, seed: int = 1) -> Tensor:
    return nn.functional.normalize(torch.randn(n, D_MODEL, generator=torch.Generator().manual_seed(seed)), dim=1)


def dense_logits(model: BaseModel, norm_name: str, rows_CD: Tensor) -> Tensor:
    """The derivative of the logits along each row, through the model's own norm and unembedding.

    It is taken where the norm divides by 1 and where a step along the row does not change what it divides by: there
    it is `W_U · (gain ⊙ row)`.
    """
    norm, head = model.model.get_submodule(norm_name), model.model.get_output_embeddings()  # type: ignore[operator]
    derivatives = []
    for row_D in rows_CD:
        at_D = torch.randn(D_MODEL, generator=torch.Generator().manual_seed(5))
        away = torch.linalg.qr(torch.stack([torch.ones(D_MODEL), row_D], dim=1)).Q
        at_D -= away @ (away.T @ at_D)
        at_D /= at_D.square().mean().sqrt()
        jacobian_VD: Any = torch.autograd.functional.jacobian(lambda x: head(norm(x)), at_D)
        derivatives.append((jacobian_VD @ row_D)[:N_TOKENS])
    logits_CV = torch.stack(derivatives)
    return logits_CV - logits_CV.mean(1, keepdim=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_model_s_own_norm_and_unembedding(family: str) -> None:
    build, norm_name, centres = FAMILIES[family]
    model, rows_CD = base_model(build()), rows(7)
    expected_CV = dense_logits(model, norm_name, rows_CD)
    assert final_norm(model).centres is centres
    for effects, logits_V in zip(promoted_tokens(rows_CD, model, n=4), expected_CV, strict=True):
        for side, largest in ((effects.promoted, True), (effects.suppressed, False)):
            best = logits_V.topk(4, largest=largest)
            assert [effect.token_id for effect in side] == best.indices.tolist()
            assert [effect.logit for effect in side] == pytest.approx(best.values.tolist(), rel=1e-3)
            assert [effect.token for effect in side] == [model.tokenizer.decode([effect.token_id]) for effect in side]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gain_is_found_in_sixteen_bits(dtype: torch.dtype) -> None:
    for build, norm_name, centres in FAMILIES.values():
        model = base_model(build())
        exact = final_norm(model).gain_D
        weight: Any = model.model.get_submodule(norm_name).weight
        assert torch.allclose(exact, weight + (build is gemma), atol=1e-4)
        rounded = final_norm(BaseModel(model.model.to(dtype), model.tokenizer, model.identity))
        assert rounded.centres is centres
        assert torch.allclose(rounded.gain_D, exact, atol=0.03)


@torch.no_grad()
@pytest.mark.parametrize("d_model", [15, 16])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_norms_of_any_width_with_or_without_weights(d_model: int, norm: type[nn.Module]) -> None:
    for affine in (True, False):
        module = norm(d_model, elementwise_affine=affine)
        found = logit_lens._linearised(module, torch.zeros(1, d_model))
        assert found is not None
        assert found.centres is (norm is nn.LayerNorm)
        assert torch.allclose(found.gain_D, torch.ones(d_model), atol=1e-4)


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), n=st.integers(1, 70))
def test_what_a_row_suppresses_its_opposite_promotes(seed: int, n: int) -> None:
    (effects,), (opposite,) = (promoted_tokens(sign * rows(1, seed), LLAMA, n) for sign in (1, -1))
    assert [effect.token for effect in effects.suppressed] == [effect.token for effect in opposite.promoted]
    assert [-effect.logit for effect in effects.suppressed] == [effect.logit for effect in opposite.promoted]
    assert len(effects.promoted) == min(n, N_TOKENS)
    logits = [effect.logit for effect in effects.promoted]
    assert logits == sorted(logits, reverse=True)


def test_latents_are_taken_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = promoted_tokens(rows(5), LLAMA)
    for elements in (1, 2 * N_TOKENS):
        monkeypatch.setattr(logit_lens, "_ELEMENTS", elements)
        monkeypatch.setattr(logit_lens, "_TOKENS_AT_ONCE", 10)
        in_blocks = promoted_tokens(rows(5), LLAMA)
        for one, other in zip(at_once, in_blocks, strict=True):
            assert [e.token for e in one.promoted] == [e.token for e in other.promoted]
            assert [e.logit for e in one.suppressed] == pytest.approx([e.logit for e in other.suppressed], rel=1e-5)


def test_looking_leaves_no_hooks() -> None:
    final_norm(LLAMA)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in LLAMA.model.modules())


@pytest.mark.parametrize("last", [nn.Identity(), nn.Linear(D_MODEL, D_MODEL)])
def test_a_model_without_a_final_norm_is_an_error_that_names_what_is_there(last: nn.Module) -> None:
    model = llama()
    model.model.norm = last
    with pytest.raises(ModelError, match=rf"tiny cannot be found.* model\.norm \({type(last).__name__}\), is neither"):
        promoted_tokens(rows(1), base_model(model))


def test_a_model_that_does_more_after_its_norm_is_an_error() -> None:
    def scaled(_module: nn.Module, _inputs: Any, output: Any) -> None:
        output.last_hidden_state = output.last_hidden_state * 3

    model = base_model(llama())
    model.model.get_submodule("model").register_forward_hook(scaled)
    with pytest.raises(ModelError, match="not the output of any module"):
        promoted_tokens(rows(1), model)


def test_an_unembedding_that_is_no_linear_map_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = base_model(llama())
    monkeypatch.setattr(model.model, "get_output_embeddings", lambda: None)
    with pytest.raises(ModelError, match="unembedding of tiny is a NoneType"):
        promoted_tokens(rows(1), model)


def test_rows_of_another_width_and_no_tokens_are_refused() -> None:
    with pytest.raises(ModelError, match="width 5, but the unembedding of tiny takes 16"):
        promoted_tokens(torch.ones(1, 5), LLAMA)
    with pytest.raises(ConfigError, match="n = 0"):
        promoted_tokens(rows(1), LLAMA, n=0)
    assert promoted_tokens(torch.ones(0, D_MODEL), LLAMA) == []
