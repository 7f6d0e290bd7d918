"""A text that a user gives becomes one context: its tokens, and the positions at which an SAE is applied."""

import sys
from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.activations.base_model import BaseModel
from dmsae.errors import ConfigError
from dmsae.evaluation.prompts import tokenise
from dmsae.text.token_text import token_texts


class Prompt(NamedTuple):
    """A text as a model takes it."""

    tokens_NL: Tensor
    """Tokens [1, L]."""
    kept_L: Tensor
    """Where the SAE is applied: not at the first position, nor at special tokens."""
    texts: tuple[str, ...]
    """Each token as text."""


def prompt_of(model: BaseModel, text: str, prepend_bos: bool | None = None, n_more: int = 0) -> Prompt:
    """Return a text's tokens as a harvest would have them; they and `n_more` have to fit into the model."""
    try:
        text.encode("utf8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"The text is not valid Unicode: {error.reason} at character {error.start}.") from error
    (ids,) = tokenise(model.tokenizer, [text], sys.maxsize, prepend_bos)
    limit = model.position_limit
    if limit is not None and len(ids) + n_more > limit:
        more = f" and {n_more:,} are to follow" if n_more else ""
        raise ConfigError(f"The text has {len(ids):,} tokens{more}; the model has {limit:,} positions. Shorten it.")
    tokens_NL = torch.tensor([ids], dtype=torch.int64)
    kept_L = model.keep_mask(tokens_NL)[0] if ids else torch.zeros(0, dtype=torch.bool)
    if not kept_L.any():
        raise ConfigError(
            f"The text {text[:40]!r} has {len(ids)} token{'' if len(ids) == 1 else 's'}, and none that an SAE is "
            "applied to: the first position and special tokens are left out. Give a longer text."
        )
    return Prompt(tokens_NL, kept_L, tuple(token_texts(model.tokenizer, ids)))
