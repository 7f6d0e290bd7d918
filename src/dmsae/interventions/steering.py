"""What a model predicts after a text when latents are changed, beside what it predicts without.

The change is made at every position that counts, those of the continuation included.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, softmax

from dmsae.activations.base_model import BaseModel
from dmsae.config import require, require_whole
from dmsae.errors import ConfigError, ModelError
from dmsae.evaluation.subject import Dictionary
from dmsae.interventions.hooks import splice_into
from dmsae.interventions.intervention import Intervention, require_fitting
from dmsae.interventions.prompt import Prompt, prompt_of
from dmsae.interventions.reading import Reading, read
from dmsae.seeds import generator
from dmsae.text.token_text import token_texts


class NextToken(NamedTuple):
    """A token that may come next, and its probability without and with the interventions."""

    token: int
    text: str
    before: float
    after: float


class Steered(NamedTuple):
    """A model's predictions after a text, without and with interventions."""

    top: tuple[NextToken, ...]
    """The most probable tokens of either distribution, by the larger of both probabilities."""
    kl: float
    """From the distribution before to the one after, in nats."""
    before_V: Tensor
    """Probability of each token of the vocabulary to come next, on the clean model."""
    after_V: Tensor
    """The same with the interventions."""
    continued_before: str
    """How the clean model continues the text; empty if no tokens were asked for."""
    continued_after: str
    """How it continues with the interventions."""
    reading: Reading
    """The activations of these latents on the text, on the clean model."""


@torch.no_grad()
def steer(
    sae: Dictionary,
    model: BaseModel,
    text: str,
    interventions: Sequence[Intervention],
    n_tokens: int = 0,
    *,
    keep_error: bool = True,
    temperature: float = 0.0,
    seed: int = 0,
    n_top: int = 10,
    prepend_bos: bool | None = None,
    max_norm_ratio: float | None = None,
) -> Steered:
    """Return what a model predicts after a text, and how it continues for `n_tokens`, without and with interventions.

    By default only the change is added to x, so that what the SAE does not explain stays; otherwise x becomes the
    changed reconstruction. A temperature of 0 takes the most probable token each time; above it, tokens are drawn with
    the seed. A continuation ends before an end-of-text token. `prepend_bos` and `max_norm_ratio` are as for `read`.

    >>> model = dmsae.BaseModel.load(dmsae.ModelConfig(name=str(tiny_model), hook=0))
    >>> sae = dmsae.SAE.load(run / "cycle-1")
    >>> steered = dmsae.steer(sae, model, "w7 w23 w9", [dmsae.Intervention(5, "clamp", 20.0)], n_tokens=4)
    >>> steered.kl > 0, len(steered.continued_after.split())
    (True, 4)
    >>> dmsae.steer(sae, model, "w7 w23 w9", [dmsae.Intervention(5, "scale", 1.0)]).kl
    0.0
    """
    require_whole("n_tokens", n_tokens, 0)
    require_whole("n_top", n_top, 1)
    require(0 <= temperature < math.inf, "temperature", temperature, "be 0 or a positive number")
    if not interventions:
        raise ConfigError("No intervention was given. Name at least one latent, and what to do with it.")
    require_fitting(interventions, sae.config)
    prompt = prompt_of(model, text, prepend_bos, n_tokens)
    latents = [one.latent for one in interventions]
    reading = read(sae, model, text, latents, prepend_bos=prepend_bos, max_norm_ratio=max_norm_ratio)
    spliced = splice_into(model, sae, interventions, keep_error, max_norm_ratio=max_norm_ratio)
    log_p, continued = [], []
    for context in (nullcontext(), spliced):
        with context:
            log_p.append(_log_p(model.logits(prompt.tokens_NL)))
            continued.append(_continued(model, prompt, n_tokens, temperature, seed) if n_tokens else "")
    kl = float(kl_div(log_p[1], log_p[0], log_target=True, reduction="sum"))
    before_V, after_V = (one.exp().float() for one in log_p)
    top = _top(model, before_V, after_V, n_top)
    return Steered(top, kl, before_V, after_V, continued[0], continued[1], reading)


def _log_p(logits_NLV: Tensor) -> Tensor:
    """Return the log-probabilities [V] of the token after the last position."""
    logits_V = logits_NLV[0, -1].double().cpu()
    if not logits_V.isfinite().all():
        raise ModelError("The model's predictions are not finite with these interventions. Use smaller values.")
    return log_softmax(logits_V, -1)


def _continued(model: BaseModel, prompt: Prompt, n_tokens: int, temperature: float, seed: int) -> str:
    """Return the text that the model writes after a prompt."""
    draws, end = generator(seed, "steer"), model.tokenizer.eos_token_id
    tokens_NL = given_NL = prompt.tokens_NL.to(model.device)
    cached: dict[str, Any] = {}
    for _ in range(n_tokens):
        output = model.model(input_ids=given_NL, use_cache=True, **cached)
        log_p_V = _log_p(output.logits)
        drawn = torch.multinomial(softmax(log_p_V / temperature, -1), 1, generator=draws) if temperature else None
        token = int(log_p_V.argmax() if drawn is None else drawn)
        if token == end:
            break
        next_NL = torch.full_like(tokens_NL[:, :1], token)
        tokens_NL = torch.cat([tokens_NL, next_NL], dim=1)
        cache = getattr(output, "past_key_values", None)
        given_NL, cached = (tokens_NL, {}) if cache is None else (next_NL, {"past_key_values": cache})
    text: str = model.tokenizer.decode(tokens_NL[0, prompt.tokens_NL.shape[1] :].tolist())
    return text


def _top(model: BaseModel, before_V: Tensor, after_V: Tensor, n: int) -> tuple[NextToken, ...]:
    n = min(n, len(before_V))
    either = torch.cat([before_V.topk(n).indices, after_V.topk(n).indices]).unique()
    larger = torch.maximum(before_V, after_V)[either]
    tokens = either[larger.sort(descending=True, stable=True).indices].tolist()
    texts = token_texts(model.tokenizer, tokens)
    return tuple(
        NextToken(token, text, float(before_V[token]), float(after_V[token]))
        for token, text in zip(tokens, texts, strict=True)
    )
