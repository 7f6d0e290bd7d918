"""Documents are packed into contexts of equal length, and one mask says which positions count.

Everywhere in dmsae a position is dropped if it is the first of its context (an attention sink, whose activation dwarfs
all others), a special token, or padding.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dmsae.config import require, require_whole
from dmsae.seeds import derive_seed

if TYPE_CHECKING:  # torch is slow to import, and commands that only read a `TokenConfig` do not need it
    from torch import Tensor

PAD = -1
"""Marks positions of a stored context that hold no token. Only the last context of a corpus has any."""


@dataclass(frozen=True, slots=True)
class TokenConfig:
    """How documents are packed."""

    context_length: int = 128
    """Tokens per context, including the first one, which is dropped."""
    prepend_bos: bool | None = None
    """Start each context with the BOS token. None: do what the model's tokenizer does by default."""

    def __post_init__(self) -> None:
        require_whole("tokens.context_length", self.context_length, 2)


class Context(NamedTuple):
    """One row of model input: its tokens, and where documents start in it."""

    tokens_L: npt.NDArray[np.int32]
    starts_L: npt.NDArray[np.bool_]


class Window(NamedTuple):
    """How much is taken of one document: a stretch that starts where the seed and the document's text say."""

    n_tokens: int
    seed: int

    def of(self, text: str, ids: list[int]) -> list[int]:
        """Return the stretch of a document's tokens, or all of them if there are no more."""
        if len(ids) <= self.n_tokens:
            return ids
        start = random.Random(derive_seed(self.seed, "window", text)).randint(0, len(ids) - self.n_tokens)
        return ids[start : start + self.n_tokens]


def prepends_bos(tokenizer: Any, config: TokenConfig) -> bool:
    """Return whether contexts start with the BOS token; a BOS that is asked for and does not exist is an error."""
    bos, wanted = tokenizer.bos_token_id, config.prepend_bos
    remedy = "This model's tokenizer has no BOS token."
    require(bos is not None or not wanted, "tokens.prepend_bos", wanted, "be off", remedy)
    by_default = bos is not None and tokenizer("a").input_ids[:1] == [bos]
    return by_default if wanted is None else wanted


class Packer:
    """Packs documents, or a window of each, with the tokenizer's end-of-text token between them."""

    def __init__(self, tokenizer: Any, config: TokenConfig, window: Window | None = None) -> None:
        self._tokenizer = tokenizer
        self._length = config.context_length
        self._window = window
        bos = tokenizer.bos_token_id
        self._prefix = [bos] if prepends_bos(tokenizer, config) else []
        end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else bos
        self._suffix = [] if end is None else [end]
        self._start_context()

    def add(self, texts: list[str]) -> Iterator[Context]:
        """Yield the contexts that these documents complete."""
        all_ids = self._tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
        for text, ids in zip(texts, all_ids, strict=True):
            taken_ids = self._window.of(text, ids) if self._window else ids
            document, at = self._document(taken_ids), 0
            while at < len(document):
                taken = document[at : at + self._length - len(self._tokens)]
                self._starts += [at == 0] + [False] * (len(taken) - 1)
                self._tokens += taken
                at += len(taken)
                if len(self._tokens) == self._length:
                    yield self._finish_context()

    def _document(self, ids: list[int]) -> list[int]:
        return [*ids, *self._suffix]

    def flush(self) -> Iterator[Context]:
        """Yield the last, padded context, if any token is left."""
        if len(self._tokens) > len(self._prefix):
            yield self._finish_context()

    def _start_context(self) -> None:
        self._tokens = list(self._prefix)
        self._starts = [False] * len(self._prefix)

    def _finish_context(self) -> Context:
        missing = self._length - len(self._tokens)
        context = Context(
            np.array(self._tokens + [PAD] * missing, np.int32), np.array(self._starts + [False] * missing)
        )
        self._start_context()
        return context


class KeepMask:
    """Which positions count: all but the first of a context, special tokens and padding."""

    def __init__(self, special_ids: Iterable[int]) -> None:
        import torch

        self.special_ids = tuple(sorted(set(special_ids)))
        self._special = torch.tensor(self.special_ids, dtype=torch.int32)

    @classmethod
    def of(cls, tokenizer: Any) -> "KeepMask":
        """Return the mask for a tokenizer's special tokens."""
        added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        return cls(added | set(tokenizer.all_special_ids))

    def __call__(self, tokens_NL: "Tensor") -> "Tensor":
        """Return a boolean [N, L] that is true where a position counts."""
        first, special, padding = self._reasons(tokens_NL)
        return ~(first | special | padding)

    def targets(self, tokens_NL: "Tensor", starts_NL: "Tensor") -> "Tensor":
        """Return a boolean [N, L] that is true where the next token is no special one and begins no document."""
        _, special, _ = self._reasons(tokens_NL)
        noise = special | starts_NL
        counts = has_target(tokens_NL)
        counts[..., :-1] &= ~noise[..., 1:]
        return counts

    def drop_counts(self, tokens_NL: "Tensor") -> dict[str, int]:
        """Return how many positions are dropped, each counted under its first reason."""
        first, special, padding = self._reasons(tokens_NL)
        return {
            "padding": int(padding.sum()),
            "first_position": int((first & ~padding).sum()),
            "special_token": int((special & ~first & ~padding).sum()),
        }

    def _reasons(self, tokens_NL: "Tensor") -> "tuple[Tensor, Tensor, Tensor]":
        import torch

        first = torch.zeros_like(tokens_NL, dtype=torch.bool)
        first[..., 0] = True
        return first, torch.isin(tokens_NL, self._special.to(tokens_NL)), tokens_NL == PAD


def has_target(tokens_NL: "Tensor") -> "Tensor":
    """Return a boolean [N, L] that is true where a next token exists in the same context."""
    import torch

    follows = torch.zeros_like(tokens_NL, dtype=torch.bool)
    follows[..., :-1] = tokens_NL[..., 1:] != PAD
    return follows
