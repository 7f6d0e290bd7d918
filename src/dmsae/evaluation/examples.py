"""When a latent fires on held-out text: how often, how strongly, and on what.

The strongest examples show what a latent responds to at its best. Those drawn at random from all places where it fires
show what it responds to as a rule, which may be something else.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.errors import ConfigError, StoreError
from dmsae.evaluation.subject import Dictionary
from dmsae.progress import SILENT, Progress
from dmsae.seeds import generator
from dmsae.text.token_text import token_texts
from dmsae.text.tokens import PAD

_ELEMENTS = 2**26
"""Activations held at once. More latents are taken in several passes."""
_BATCH = 4096


class Example(NamedTuple):
    """One place where a latent fires: the text before, the token itself, the text after, and all of it by tokens."""

    activation: float
    before: str
    token: str
    after: str
    tokens: tuple[str, ...]
    """The same stretch of text, token by token, special tokens included."""
    activations: tuple[float | None, ...]
    """The latent's activation on each of these tokens; None for those that the store leaves out, such as outliers."""
    centre: int
    """Which of these tokens is the one that the example is of."""


class Firing(NamedTuple):
    """When a latent fires on held-out activations, at inference thresholds."""

    rate: float
    """Share of the activations on which it fires."""
    mean: float
    """Its mean activation there; 0 if it never fires."""
    top: list[Example]
    """Where it fires most, the strongest first."""
    random: list[Example]
    """Places drawn from all those where it fires and that are not among the top."""


@torch.no_grad()
def heldout_firing(
    dictionary: Dictionary,
    latents: Sequence[int],
    store: Store,
    tokenizer: Any = None,
    n_top: int = 3,
    n_random: int = 3,
    n_around: int = 8,
    seed: int = 0,
    progress: Progress = SILENT,
) -> list[Firing]:
    """Return when each latent fires, with examples if the store's tokenizer is given.

    At most one example of each kind comes from one context. What is drawn for a latent depends on the seed and on the
    latent, not on which others are asked for.
    """
    require_heldout(dictionary, store)
    n_rows = store.n_rows(Split.HELDOUT)
    text = _Text(store, tokenizer, n_around) if tokenizer is not None and (n_top or n_random) else None
    n_at_once = max(1, _ELEMENTS // n_rows)
    found = []
    with progress.bar("examples", n_rows * -(-len(latents) // n_at_once), "tok") as bar:
        for start in range(0, len(latents), n_at_once):
            some = list(latents[start : start + n_at_once])
            f_CR = torch.empty(len(some), n_rows)
            at = 0
            for batch in store.batches(Split.HELDOUT, _BATCH):
                f_BC = dictionary.encode(batch["x"].to(dictionary.W_dec))[:, some]
                f_CR[:, at : at + len(f_BC)] = f_BC.T.float().cpu()
                at += len(f_BC)
                bar.advance(len(f_BC))
            for latent, f_R in zip(some, f_CR, strict=True):
                n_firing = int((f_R > 0).sum())
                mean = float(f_R.double().sum()) / n_firing if n_firing else 0.0
                top, drawn = text.examples(f_R, latent, n_top, n_random, seed) if text else ([], [])
                found.append(Firing(n_firing / n_rows, mean, top, drawn))
    return found


class _Text:
    """The held-out text, and where in it each activation of the store stands."""

    def __init__(self, store: Store, tokenizer: Any, n_around: int) -> None:
        self._tokenizer, self._n_around = tokenizer, n_around
        self._tokens_NL = store.tokens(Split.HELDOUT)["tokens"]
        places = [(batch["context"], batch["position"]) for batch in store.batches(Split.HELDOUT, _BATCH)]
        self._context_R, self._position_R = (torch.cat(column).long() for column in zip(*places, strict=True))
        self._row_NL = torch.full(self._tokens_NL.shape, -1)
        self._row_NL[self._context_R, self._position_R] = torch.arange(len(self._context_R))

    def examples(
        self, f_R: Tensor, latent: int, n_top: int, n_random: int, seed: int
    ) -> tuple[list[Example], list[Example]]:
        """Return a latent's top examples, and random ones from the other places where it fires."""
        rows = (f_R > 0).nonzero().squeeze(1)
        strongest = rows[f_R[rows].sort(descending=True, stable=True).indices]
        top = self._one_per_context(strongest, n_top)
        shuffled = rows[torch.randperm(len(rows), generator=generator(seed, "random examples", latent))]
        others = shuffled[~torch.isin(shuffled, torch.tensor(top, dtype=torch.int64))]
        drawn = self._one_per_context(others, n_random)
        return [self._example(f_R, row) for row in top], [self._example(f_R, row) for row in drawn]

    def _one_per_context(self, rows: Tensor, n: int) -> list[int]:
        """Return the first n rows that are all from different contexts; there may be fewer."""
        chosen: dict[int, int] = {}
        for row, context in zip(rows.tolist(), self._context_R[rows].tolist(), strict=True):
            if len(chosen) == n:
                break
            chosen.setdefault(context, row)
        return list(chosen.values())

    def _example(self, f_R: Tensor, row: int) -> Example:
        context, position = int(self._context_R[row]), int(self._position_R[row])
        start, stop = max(0, position - self._n_around), position + 1 + self._n_around
        tokens = [token for token in self._tokens_NL[context, start:stop].tolist() if token != PAD]
        rows = self._row_NL[context, start : start + len(tokens)].tolist()
        centre = position - start
        parts = (tokens[:centre], tokens[centre : centre + 1], tokens[centre + 1 :])
        before, token, after = (self._tokenizer.decode(part, skip_special_tokens=True) for part in parts)
        return Example(
            activation=float(f_R[row]),
            before=before,
            token=token,
            after=after,
            tokens=tuple(token_texts(self._tokenizer, tokens)),
            activations=tuple(float(f_R[one]) if one >= 0 else None for one in rows),
            centre=centre,
        )


def require_heldout(dictionary: Dictionary, store: Store) -> None:
    """Raise unless a store has held-out activations of a dictionary's width."""
    if store.d_model != dictionary.config.d_model:
        raise ConfigError(
            f"The SAE takes activations of width {dictionary.config.d_model}; those of the store {store.key} have "
            f"width {store.d_model}."
        )
    if not store.n_rows(Split.HELDOUT):
        raise StoreError(f"The store {store.key} holds no held-out activations. Harvest with heldout_tokens > 0.")
