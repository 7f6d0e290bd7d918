"""Short texts become activations at the hook: of their last token, or of all tokens that count.

Each text is a context of its own. It begins with the BOS token if the model's tokenizer would add one. Of a long text
the last tokens are kept, as sae-probes does.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmsae.activations.base_model import BaseModel
from dmsae.activations.shards import norm_limit
from dmsae.config import Json
from dmsae.disk.files import canonical_hash
from dmsae.errors import ModelError
from dmsae.evaluation.cached import Tensors, cached
from dmsae.progress import SILENT, Progress
from dmsae.text.tokens import PAD, TokenConfig, prepends_bos

_BATCH_TOKENS = 4096
"""Tokens per forward pass, with padding."""


class TokenActivations(NamedTuple):
    """Activations of every token that counts, of several texts."""

    x_BD: Tensor
    text_B: Tensor
    """Which text each row comes from."""


def last_token_activations(
    model: BaseModel, texts: Sequence[str], max_tokens: int, cache: Path | None = None, progress: Progress = SILENT
) -> Tensor:
    """Return x [N, D] at the last token of each text. A text of one token is an error: its activation is a sink."""

    def make() -> Tensors:
        ids = tokenise(model.tokenizer, texts, max_tokens, model.prepend_bos)
        if short := [text for text, tokens in zip(texts, ids, strict=True) if len(tokens) < 2]:
            raise ModelError(
                f"{len(short)} of {len(texts)} texts have fewer than two tokens, among them {short[0]!r}. The first "
                "position of a context is not used; give longer texts."
            )
        rows: dict[int, Tensor] = {}
        for index, _, x_NLD in _forward(model, ids, progress):
            for i, x_LD in zip(index, x_NLD, strict=True):
                rows[i] = x_LD[len(ids[i]) - 1]
        return {"x": torch.stack([rows[i] for i in range(len(texts))])}

    return cached(cache, "last-token", _made_of(model, texts, max_tokens), make)["x"]


def token_activations(
    model: BaseModel, texts: Sequence[str], max_tokens: int, cache: Path | None = None, progress: Progress = SILENT
) -> TokenActivations:
    """Return x of all tokens but the first position of each text, special tokens, padding and norm outliers; text by
    text."""

    def make() -> Tensors:
        parts: dict[int, Tensor] = {}
        ids = tokenise(model.tokenizer, texts, max_tokens, model.prepend_bos)
        for index, tokens_NL, x_NLD in _forward(model, ids, progress):
            for i, keep_L, x_LD in zip(index, model.keep_mask(tokens_NL), x_NLD, strict=True):
                parts[i] = x_LD[keep_L]
        counts = torch.tensor([len(parts[i]) for i in range(len(texts))])
        return {
            "x": torch.cat([parts[i] for i in range(len(texts))]),
            "text": torch.arange(len(texts)).repeat_interleave(counts),
        }

    found = cached(cache, "all-tokens", _made_of(model, texts, max_tokens), make)
    norms = found["x"].norm(dim=1)
    usual = norms <= norm_limit(norms, model.max_norm_ratio)
    return TokenActivations(found["x"][usual], found["text"][usual])


def tokenise(tokenizer: Any, texts: Sequence[str], max_tokens: int, prepend_bos: bool | None = None) -> list[list[int]]:
    """Return the last `max_tokens` tokens of each text, after the BOS token if asked or if the tokenizer adds one."""
    prefix = [tokenizer.bos_token_id] if prepends_bos(tokenizer, TokenConfig(prepend_bos=prepend_bos)) else []
    all_ids = tokenizer(list(texts), add_special_tokens=False, verbose=False).input_ids
    return [[*prefix, *ids[-(max_tokens - len(prefix)) :]] for ids in all_ids]


def _forward(
    model: BaseModel, ids: Sequence[Sequence[int]], progress: Progress
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Yield (which texts, their padded tokens [N, L], x [N, L, D]); texts of like length go together."""
    with progress.bar("texts", len(ids), "text") as bar:
        for index in _batches([len(tokens) for tokens in ids]):
            length = max(len(ids[i]) for i in index)
            rows = [[*ids[i], *[PAD] * (length - len(ids[i]))] for i in index]
            tokens_NL = torch.tensor(rows, dtype=torch.int32)
            yield index, tokens_NL, model.activations(tokens_NL).float().cpu()
            bar.advance(len(index))


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield the texts, the shortest first, in groups whose padded size stays within the limit."""
    group: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if group and (len(group) + 1) * lengths[i] > _BATCH_TOKENS:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _made_of(model: BaseModel, texts: Sequence[str], max_tokens: int) -> Json:
    texts_key = canonical_hash(list(texts))
    made_of: Json = {"version": 1, "model": model_key(model), "texts": texts_key, "max_tokens": max_tokens}
    return made_of if model.prepend_bos is None else made_of | {"prepend_bos": model.prepend_bos}


def model_key(model: BaseModel) -> Json:
    """Return what activations depend on: weights, tokenizer, hook and arithmetic, not the model's name."""
    identity = dataclasses.asdict(model.identity)
    return {name: identity[name] for name in ("weights_sha256", "tokenizer_sha256", "hook", "dtype")}
