"""A language model's head: hidden states become next-token losses, a block of positions at a time.

Logits are the largest tensor of a forward pass: 8 contexts of 1,024 tokens over a vocabulary of 256,000 are 8.4 GB in
float32, and their gradient as much again. In blocks only one block of them exists at a time; the backward pass computes
it anew. That costs one more product with the unembedding, so it is done only where the logits would be large.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dmsae.text.tokens import PAD

WHOLE_BYTES = 1 << 30
"""Logits up to this size, in float32, are computed at once."""
BLOCK_BYTES = 1 << 28
"""Size of a block of logits."""
_TOLERANCE = 1e-3
"""How far logits of the head by itself may be from the model's, as a share of the largest: they are nearly equal."""


class Head:
    """What a causal language model does after its last block, as far as that can be run by itself."""

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        self._base: Any = getattr(model, "base_model", model)
        self._output: Any = None
        """What the blocks returned for a few tokens: the form in which the head is given hidden states."""
        self._is_apart: bool | None = None

    def block_rows(self, n_positions: int) -> int | None:
        """Return how many positions a block of logits has; None when the logits of all may be computed at once."""
        row = 4 * int(self._model.config.get_text_config().vocab_size)
        return None if n_positions * row <= WHOLE_BYTES else max(1, BLOCK_BYTES // row)

    def prepare(self, tokens_NL: Tensor) -> None:
        """Find out, before any hook is set, whether the head gives the model's logits when it is run by itself."""
        if self._is_apart is None and self.block_rows(tokens_NL.numel()) is not None:
            self._is_apart = self._base is not self._model and self._agrees(tokens_NL[:1, :8])

    @torch.no_grad()
    def _agrees(self, tokens_NL: Tensor) -> bool:
        whole_BV = self._model(input_ids=tokens_NL, use_cache=False).logits[0]
        self._output = self._base(input_ids=tokens_NL, use_cache=False)
        apart_BV = self._logits(self._output[0][0])
        return bool((apart_BV - whole_BV).abs().max() <= _TOLERANCE * whole_BV.abs().max())

    def losses(self, tokens_NL: Tensor, targets_NL: Tensor) -> Tensor:
        """Return the cross-entropy [N, L] of each target, 0 where it is padding, after `prepare`."""
        rows = self.block_rows(tokens_NL.numel())
        if rows is None or not self._is_apart:
            logits_NLV = self._model(input_ids=tokens_NL, use_cache=False).logits
            return _cross_entropy(logits_NLV.flatten(0, 1), targets_NL.flatten()).view(targets_NL.shape)
        h_BD = self._base(input_ids=tokens_NL, use_cache=False)[0].flatten(0, 1)
        blocks = zip(h_BD.split(rows), targets_NL.flatten().split(rows), strict=True)
        losses: Any = [
            checkpoint(self._block, h, targets, use_reentrant=False, preserve_rng_state=False) for h, targets in blocks
        ]
        return torch.cat(losses).view(targets_NL.shape)

    def _block(self, h_BD: Tensor, targets_B: Tensor) -> Tensor:
        return _cross_entropy(self._logits(h_BD), targets_B)

    def _logits(self, h_BD: Tensor) -> Tensor:
        """Return the logits [B, V] of hidden states: the model runs, and its blocks return what they are given."""
        with _returning(self._base, type(self._output)({**self._output, "last_hidden_state": h_BD[None]})):
            logits_NLV: Tensor = self._model(input_ids=h_BD.new_zeros(1, len(h_BD), dtype=torch.int64)).logits
        return logits_NLV[0]


def _cross_entropy(logits_BV: Tensor, targets_B: Tensor) -> Tensor:
    return F.cross_entropy(logits_BV.float(), targets_B, ignore_index=PAD, reduction="none")


@contextmanager
def _returning(base: Any, output: Any) -> Iterator[None]:
    """Let the blocks of a model return what is given, as long as this lasts."""
    base.forward = lambda *_args, **_kwargs: output
    try:
        yield
    finally:
        del base.forward
