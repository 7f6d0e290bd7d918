"""What a latent responds to: the held-out text on which it fires most."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.errors import StoreError
from dmsae.sae.sae import SAE
from dmsae.text.tokens import PAD


class Example(NamedTuple):
    """One place where a latent fires: the text before, the token itself, the text after."""

    activation: float
    before: str
    token: str
    after: str


@torch.no_grad()
def top_examples(
    sae: SAE, latents: list[int], store: Store, tokenizer: Any, n_examples: int = 3, n_around: int = 8
) -> list[list[Example]]:
    """Return, for each latent, the held-out places where it fires most, at most one from each context."""
    if not store.n_rows(Split.HELDOUT):
        raise StoreError(f"The store {store.key} holds no held-out text. Harvest with heldout_tokens > 0.")
    tokens_NL = store.tokens(Split.HELDOUT)["tokens"]
    best = torch.zeros(len(latents), len(tokens_NL))
    where = torch.zeros(len(latents), len(tokens_NL), dtype=torch.int64)
    for batch in store.batches(Split.HELDOUT, 4096):
        f_CB = sae.encode(batch["x"].to(sae.W_dec))[:, latents].T.cpu()
        _raise_to_maximum_(best, where, f_CB, batch["context"].long(), batch["position"].long())
    examples = []
    for row, positions in zip(best, where, strict=True):
        values, contexts = row.topk(min(n_examples, len(row)))
        examples.append(
            [
                _example(value, tokens_NL[context], int(positions[context]), tokenizer, n_around)
                for value, context in zip(values.tolist(), contexts.tolist(), strict=True)
                if value > 0
            ]
        )
    return examples


def _raise_to_maximum_(best: Tensor, where: Tensor, f_CB: Tensor, context_B: Tensor, position_B: Tensor) -> None:
    """Update, in place, each latent's largest activation in every context and where it stands."""
    for context in context_B.unique().tolist():
        inside = (context_B == context).nonzero().squeeze(1)
        values, at = f_CB[:, inside].max(dim=1)
        higher = values > best[:, context]
        best[higher, context] = values[higher]
        where[higher, context] = position_B[inside][at[higher]]


def _example(activation: float, tokens_L: Tensor, position: int, tokenizer: Any, n_around: int) -> Example:
    def text(start: int, stop: int) -> str:
        ids = [token for token in tokens_L[max(0, start) : stop].tolist() if token != PAD]
        decoded: str = tokenizer.decode(ids, skip_special_tokens=True)
        return decoded

    return Example(
        activation,
        text(position - n_around, position),
        text(position, position + 1),
        text(position + 1, position + 1 + n_around),
    )
