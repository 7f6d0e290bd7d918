"""What a plan has to know of a language model: its width, its parameters, its vocabulary."""

from typing import Any, NamedTuple

from dmsae.activations.base_model import ModelConfig, locate, skeleton
from dmsae.activations.dtypes import torch_dtype
from dmsae.activations.head import BLOCK_BYTES, WHOLE_BYTES
from dmsae.errors import DmsaeError
from dmsae.progress import SILENT, Progress
from dmsae.text import assets


class ModelFacts(NamedTuple):
    """Sizes of a model."""

    d_model: int
    n_layers: int
    n_parameters: int
    vocabulary: int
    source: str
    """Where they come from, in words."""


PUBLISHED = {
    "google/gemma-2-2b": ModelFacts(2304, 26, 2_614_341_888, 256_000, "as published; the model itself is not here"),
}
"""Sizes of models that a shipped recipe names and that need a licence to be downloaded."""


def model_facts(config: ModelConfig, progress: Progress = SILENT) -> ModelFacts:
    """Return the sizes of a model that is here, or can be fetched, or is well known."""
    known = PUBLISHED.get(config.name)
    try:
        path, _ = locate(config, progress)
        model: Any = skeleton(path)
    except DmsaeError:
        if known is None:
            raise
        return known
    text = model.config.get_text_config()
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    source = "bundled" if config.name in assets.ASSETS else str(path)
    return ModelFacts(text.hidden_size, text.num_hidden_layers, n_parameters, text.vocab_size, source)


def model_bytes(facts: ModelFacts, config: ModelConfig, n_contexts: int, context_length: int) -> int:
    """Return what a forward and backward pass over a batch of contexts takes, roughly: weights, logits, activations.

    Gradients stop at the hook and there are none of the weights. Of each block about 16 numbers per position and
    dimension are kept for the backward pass.
    """
    element = torch_dtype(config.dtype).itemsize
    n_positions = n_contexts * context_length
    logits = 4 * n_positions * facts.vocabulary
    held = 3 * (BLOCK_BYTES if logits > WHOLE_BYTES else logits)
    return facts.n_parameters * element + held + 16 * element * n_positions * facts.d_model * facts.n_layers
