"""Documents become packed contexts of equal length, and one mask says which positions count.

Shapes: N contexts, L positions in a context. A position is dropped, everywhere in dmsae, when it is the first of its
context (an attention sink whose activation dwarfs all others), a special token, or padding.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dmsae.errors import ConfigError

PAD = -1
"""Stands in stored contexts where there is no token; only the last context of a corpus has any."""


@dataclass(frozen=True, slots=True)
class TokenConfig:
    """How documents are packed."""

    context_length: int = 128
    """Tokens per context, the dropped first one included."""
    prepend_bos: bool | None = None
    """Begin each context with the BOS token. None: do what the model's tokenizer does by itself."""

    def __post_init__(self) -> None:
        if self.context_length < 2:
            raise ConfigError(
                f"tokens.context_length = {self.context_length} must be at least 2: the first position is dropped."
            )


class Context(NamedTuple):
    """One row of model input: its tokens and where documents begin in it."""

    tokens_L: npt.NDArray[np.int32]
    starts_L: npt.NDArray[np.bool_]


class Packer:
    """Packs documents one after another, with the tokenizer's end-of-text token between them."""

    def __init__(self, tokenizer: Any, config: TokenConfig) -> None:
        self._tokenizer = tokenizer
        self._length = config.context_length
        bos = tokenizer.bos_token_id
        if config.prepend_bos and bos is None:
            raise ConfigError("tokens.prepend_bos is set, but this model's tokenizer has no BOS token.")
        by_itself = bos is not None and tokenizer("a").input_ids[:1] == [bos]
        self._prefix = [bos] if (by_itself if config.prepend_bos is None else config.prepend_bos) else []
        end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else bos
        self._suffix = [] if end is None else [end]
        self._begin()

    def add(self, texts: list[str]) -> Iterator[Context]:
        """Yield the contexts that these documents complete."""
        for ids in self._tokenizer(texts, add_special_tokens=False, verbose=False).input_ids:
            document, begins = [*ids, *self._suffix], True
            while document:
                room = self._length - len(self._tokens)
                taken, document = document[:room], document[room:]
                self._starts += [begins] + [False] * (len(taken) - 1)
                self._tokens += taken
                begins = False
                if len(self._tokens) == self._length:
                    yield self._take()

    def flush(self) -> Iterator[Context]:
        """Yield what is left as a padded context, if anything is."""
        if len(self._tokens) > len(self._prefix):
            yield self._take()

    def _begin(self) -> None:
        self._tokens = list(self._prefix)
        self._starts = [False] * len(self._prefix)

    def _take(self) -> Context:
        missing = self._length - len(self._tokens)
        context = Context(
            np.array(self._tokens + [PAD] * missing, np.int32), np.array(self._starts + [False] * missing)
        )
        self._begin()
        return context


class KeepMask:
    """Which positions count: not the first of a context, not a special token, not padding."""

    def __init__(self, special_ids: Iterable[int]) -> None:
        self.special_ids = tuple(sorted(set(special_ids)))
        self._special = torch.tensor(self.special_ids, dtype=torch.int32)

    @classmethod
    def of(cls, tokenizer: Any) -> "KeepMask":
        """Return the mask for a tokenizer's special tokens."""
        added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        return cls(added | set(tokenizer.all_special_ids))

    def __call__(self, tokens_NL: Tensor) -> Tensor:
        """Return a boolean [N, L] that is true where a position counts."""
        first, special, padding = self._reasons(tokens_NL)
        return ~(first | special | padding)

    def drop_counts(self, tokens_NL: Tensor) -> dict[str, int]:
        """Return how many positions are dropped, each counted under its first reason."""
        first, special, padding = self._reasons(tokens_NL)
        return {
            "padding": int(padding.sum()),
            "first_position": int((first & ~padding).sum()),
            "special_token": int((special & ~first & ~padding).sum()),
        }

    def _reasons(self, tokens_NL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = torch.zeros_like(tokens_NL, dtype=torch.bool)
        first[..., 0] = True
        return first, torch.isin(tokens_NL, self._special.to(tokens_NL)), tokens_NL == PAD


def has_target(tokens_NL: Tensor) -> Tensor:
    """Return a boolean [N, L] that is true where a next token exists in the same context."""
    follows = torch.zeros_like(tokens_NL, dtype=torch.bool)
    follows[..., :-1] = tokens_NL[..., 1:] != PAD
    return follows
