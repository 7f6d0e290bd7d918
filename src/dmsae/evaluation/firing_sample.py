"""Latents drawn at random, and where they fire on held-out text: what explanations are found and tested on.

The text is cut once in the middle. Explanations are found in the first half and tested on the second, so that no
document but the one at the cut is on both sides.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.evaluation.subject import Dictionary, Subject, require_heldout
from dmsae.seeds import generator

_BATCH = 2048
_CANDIDATES = 8
"""Latents looked at for each one wanted: some fire too rarely."""


class HeldoutText(NamedTuple):
    """Held-out activations in reading order, and the tokens that they come from."""

    x_RD: Tensor
    context_R: Tensor
    position_R: Tensor
    tokens_NL: Tensor
    is_test_R: Tensor
    """Whether a row is in the second half of the text."""

    def tokens(self, offset: int) -> Tensor:
        """Return the token at, or `offset` places before, each row; −1 before the beginning of its context."""
        position = self.position_R - offset
        return self.tokens_NL[self.context_R, position.clamp(min=0)].long().masked_fill(position < 0, -1)


def heldout_text(store: Store, subjects: list[Subject], n_tokens: int) -> HeldoutText:
    """Return the first held-out activations of a store, at most `n_tokens`, with their text."""
    store.require_text()
    require_heldout(store, subjects)
    rows: dict[str, list[Tensor]] = {"x": [], "context": [], "position": []}
    n = 0
    for batch in store.batches(Split.HELDOUT, _BATCH):
        for name, parts in rows.items():
            parts.append(batch[name][: n_tokens - n])
        n += len(batch["x"])
        if n >= n_tokens:
            break
    x_RD, context_R, position_R = (torch.cat(parts) for parts in rows.values())
    context_R = context_R.long()
    contexts = context_R.unique()
    middle = contexts[len(contexts) // 2]
    return HeldoutText(x_RD, context_R, position_R.long(), store.tokens(Split.HELDOUT)["tokens"], context_R >= middle)


@torch.no_grad()
def sample_latents(
    dictionary: Dictionary, text: HeldoutText, n: int, min_examples: int, seed: int
) -> tuple[list[int], Tensor]:
    """Return up to n latents and their activations [latents, rows].

    They are drawn at random from those that fire, and do not fire, on at least `min_examples` tokens of either half.
    Which are drawn depends on the seed and the width alone, but for those that fire too rarely.
    """
    order = torch.randperm(dictionary.config.width, generator=generator(seed, "latents"))[: n * _CANDIDATES]
    parts = [dictionary.encode(x.to(dictionary.W_dec))[:, order].float().cpu() for x in text.x_RD.split(_BATCH)]
    f_RC = torch.cat(parts)
    usable_C = torch.ones(len(order), dtype=torch.bool)
    for half in (text.is_test_R, ~text.is_test_R):
        fires_C = (f_RC[half] > 0).sum(0)
        usable_C &= (fires_C >= min_examples) & (int(half.sum()) - fires_C >= min_examples)
    chosen = usable_C.nonzero().squeeze(1)[:n]
    return order[chosen].tolist(), f_RC[:, chosen].T.contiguous()
