"""A few contexts go through the model before a harvest: what its loss is, and whether it misses a BOS token.

A model that was trained to see a BOS token first predicts far worse without it, and its activations are then not those
that anybody wants to study. Not every tokenizer adds the token by itself, and nothing else would show it.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dmsae.activations.base_model import BaseModel
from dmsae.activations.contexts import Contexts
from dmsae.progress import Progress
from dmsae.text.tokens import TokenConfig, prepends_bos

_CONTEXTS = 8
_MARKED_NATS = 0.3
"""An improvement of the mean loss that chance does not give."""


class Probe(NamedTuple):
    """Mean next-token losses on the same targets, in nats."""

    n_contexts: int
    loss: float
    """With contexts as they are."""
    loss_with_bos: float | None
    """With the BOS token before each context; None if it is there already, or does not exist."""
    bos: str
    """The text of the BOS token; empty if there is none."""


def probe(model: BaseModel, contexts: Contexts, config: TokenConfig) -> Probe:
    """Return the model's mean loss on a few contexts, spread over those given, as they are and with a BOS token."""
    chosen = contexts.take(torch.linspace(0, len(contexts) - 1, min(_CONTEXTS, len(contexts))).long())
    tokens_NL = chosen.tokens_NL
    counted_NL = model.keep_mask.targets(tokens_NL, chosen.starts_NL)
    bos, text = model.tokenizer.bos_token_id, model.tokenizer.bos_token or ""
    if bos is None or prepends_bos(model.tokenizer, config) or tokens_NL.shape[1] < 3:
        return Probe(len(chosen), _mean_loss(model, tokens_NL, counted_NL), None, text)
    # The BOS token takes the place of the last one: contexts keep their length, which may be the model's limit. Both
    # losses are of the same targets.
    counted_NL[:, -2:] = False
    moved_NL = F.pad(tokens_NL[:, :-1], (1, 0), value=bos)
    with_bos = _mean_loss(model, moved_NL, F.pad(counted_NL[:, :-1], (1, 0)))
    return Probe(len(chosen), _mean_loss(model, tokens_NL, counted_NL), with_bos, text)


def report(model: BaseModel, contexts: Contexts, config: TokenConfig, progress: Progress) -> Probe:
    """Say how contexts start and what the model's loss is; warn when a BOS token would lower it markedly."""
    measured = probe(model, contexts, config)
    progress.note(
        f"{_decision(model, config)} Mean next-token loss on {measured.n_contexts} contexts: {measured.loss:.2f} nats."
    )
    warn_of_missing_bos(measured, progress)
    return measured


def warn_of_missing_bos(measured: Probe, progress: Progress) -> None:
    """Warn when a BOS token would lower the loss markedly."""
    if measured.loss_with_bos is not None and measured.loss - measured.loss_with_bos > _MARKED_NATS:
        progress.warn(
            f"With the BOS token {measured.bos!r} before each context, the mean next-token loss would be "
            f"{measured.loss_with_bos:.2f} instead of {measured.loss:.2f} nats: this model expects it. Set "
            "tokens.prepend_bos (--tokens.prepend-bos True)."
        )


def _decision(model: BaseModel, config: TokenConfig) -> str:
    why = "as the model's tokenizer does by default" if config.prepend_bos is None else "as tokens.prepend_bos says"
    if prepends_bos(model.tokenizer, config):
        return f"Each context starts with the BOS token {model.tokenizer.bos_token!r}, {why}."
    if model.tokenizer.bos_token_id is None:
        return "Contexts start without a BOS token: the model's tokenizer has none."
    return f"Contexts start without a BOS token, {why}."


def _mean_loss(model: BaseModel, tokens_NL: Tensor, counted_NL: Tensor) -> float:
    # One context at a time: the logits of several, over a large vocabulary, may not fit into memory.
    total = sum(
        float(model.losses(tokens, counted_NL=counted).double().sum())
        for tokens, counted in zip(tokens_NL.split(1), counted_NL.split(1), strict=True)
    )
    return total / max(1, int(counted_NL.sum()))
