"""Losses and gradients in blocks of logits are those of all logits at once, and no block is larger than asked for."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from conftest import build_model, build_tokenizer
from dmsae.activations import head
from dmsae.activations.base_model import BaseModel
from dmsae.activations.head import Head
from dmsae.activations.identity import ModelIdentity

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def llama() -> nn.Module:
    return build_model()


def gemma_2() -> nn.Module:
    """Caps its logits after the unembedding."""
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SHAPE, num_key_value_heads=1, head_dim=8, final_logit_softcapping=2.0)
    )


def gpt_neox() -> nn.Module:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SHAPE))


def gpt_2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3)
    )


HOOKS = {
    llama: "model.layers.0",
    gemma_2: "model.layers.0",
    gpt_neox: "gpt_neox.layers.0",
    gpt_2: "transformer.h.0",
}


def base_model(build: Any) -> BaseModel:
    torch.manual_seed(0)
    return BaseModel(build(), build_tokenizer(), ModelIdentity("tiny", "", "", "", HOOKS[build], "float32"))


def blocks_of(monkeypatch: pytest.MonkeyPatch, rows: int, vocabulary: int) -> None:
    monkeypatch.setattr(head, "WHOLE_BYTES", 0)
    monkeypatch.setattr(head, "BLOCK_BYTES", 4 * vocabulary * rows)


@pytest.mark.parametrize("build", HOOKS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_gradients_and_losses_in_blocks_are_those_at_once(
    build: Any, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = base_model(build)
    tokens = torch.randint(4, 60, (3, 11), generator=torch.Generator().manual_seed(1))
    counted = torch.rand(3, 11, generator=torch.Generator().manual_seed(2)) < 0.7
    whole = model.gradients(tokens, counted)
    edited = model.losses(tokens, lambda x: 0.5 * x)

    model, sizes = base_model(build), []
    loaded: Any = model.model
    blocks_of(monkeypatch, rows, loaded.config.vocab_size)
    loaded.get_output_embeddings().register_forward_hook(lambda _m, _i, out: sizes.append(out[..., 0].numel()))
    in_blocks = model.gradients(tokens, counted)
    trial = 8
    assert max(size for size in sizes if size != trial) <= rows
    assert torch.equal(in_blocks.x_NLD, whole.x_NLD)
    torch.testing.assert_close(in_blocks.loss_NL, whole.loss_NL)
    torch.testing.assert_close(in_blocks.g_NLD, whole.g_NLD, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(model.losses(tokens, lambda x: 0.5 * x), edited)


def test_small_logits_are_computed_at_once() -> None:
    rows = Head(build_model(vocab_size=1 << 16)).block_rows
    assert rows(4096) is None
    assert rows(4097) == 1024


def test_a_head_that_looks_at_more_than_hidden_states_is_not_run_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class Peeking(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            out = super().forward(input_ids=input_ids, **kwargs)
            out.logits = out.logits + input_ids[..., None]
            return out

    torch.manual_seed(0)
    model = Peeking(transformers.LlamaConfig(**SHAPE))  # type: ignore[no-untyped-call]
    tokens = torch.randint(4, 60, (2, 9))
    identity = ModelIdentity("tiny", "", "", "", "model.layers.0", "float32")
    whole = BaseModel(model, build_tokenizer(), identity).gradients(tokens)
    blocks_of(monkeypatch, 2, 64)
    again = BaseModel(model, build_tokenizer(), identity).gradients(tokens)
    assert torch.equal(again.g_NLD, whole.g_NLD)
