"""Which contexts each split of a store is made from.

Documents are packed into contexts, held-out ones apart from the others, and each context goes to one split until every
split has as many rows as were asked for. The model is not run for this.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dmsae.activations.request import HarvestConfig
from dmsae.activations.splits import Split
from dmsae.errors import CorpusError
from dmsae.progress import SILENT, Progress
from dmsae.text.corpus import Corpus, Document
from dmsae.text.tokens import Context, KeepMask, Packer, has_target

_DOCUMENTS_AT_ONCE = 512
"""Documents per call of the tokenizer."""


class AssignedContext(NamedTuple):
    """A context, the split that it belongs to, and how many rows it gives."""

    split: Split
    context: Context
    n_rows: int


def assign_contexts(config: HarvestConfig, corpus: Corpus, tokenizer: Any) -> Iterator[AssignedContext]:
    """Yield contexts until every split is full or the text ends.

    Held-out documents fill the held-out split. The others fill the pairs first, then the training split.
    """
    left = {split: config.wanted(split) for split in Split}
    mask = KeepMask.of(tokenizer)
    packers = {heldout: Packer(tokenizer, config.tokens) for heldout in (True, False)}

    def assign(heldout: bool, contexts: Iterator[Context]) -> Iterator[AssignedContext]:
        for context in contexts:
            split = next((split for split in _splits_of(heldout) if left[split]), None)
            if split is None:
                return
            rows = int(countable(split, mask, torch.from_numpy(context.tokens_L)[None]).sum())
            count = min(rows, left[split])
            left[split] -= count
            yield AssignedContext(split, context, count)

    for documents in _lists(corpus.documents(config.seed), _DOCUMENTS_AT_ONCE):
        for heldout, packer in packers.items():
            if any(left[split] for split in _splits_of(heldout)):
                texts = [document.text for document in documents if document.heldout == heldout]
                yield from assign(heldout, packer.add(texts)) if texts else ()
        if not any(left.values()):
            return
    for heldout, packer in packers.items():
        yield from assign(heldout, packer.flush())


def collect_contexts(
    config: HarvestConfig, corpus: Corpus, tokenizer: Any, progress: Progress = SILENT
) -> dict[Split, list[Context]]:
    """Return the contexts of every split; too small a corpus is an error with counts."""
    contexts: dict[Split, list[Context]] = {split: [] for split in Split}
    n_rows = dict.fromkeys(Split, 0)
    with progress.bar("tokenise", sum(map(config.wanted, Split)), "tok") as bar:
        for assigned in assign_contexts(config, corpus, tokenizer):
            contexts[assigned.split].append(assigned.context)
            n_rows[assigned.split] += assigned.n_rows
            bar.advance(assigned.n_rows)
    if any(n_rows[split] < config.wanted(split) for split in Split):
        raise _too_small(config, corpus, n_rows)
    return contexts


def stack_contexts(contexts: list[Context], length: int) -> dict[str, Tensor]:
    """Return `tokens` [N, L] and document `starts` [N, L], as a store holds them."""
    tokens = np.stack([c.tokens_L for c in contexts]) if contexts else np.zeros((0, length), np.int32)
    starts = np.stack([c.starts_L for c in contexts]) if contexts else np.zeros((0, length), np.bool_)
    return {"tokens": torch.from_numpy(tokens), "starts": torch.from_numpy(starts)}


def countable(split: Split, mask: KeepMask, tokens_NL: Tensor) -> Tensor:
    """Return where a split takes rows from: the keep-mask, and for pairs also a next token to predict."""
    keep = mask(tokens_NL)
    return keep & has_target(tokens_NL) if split is Split.PAIRS else keep


def _splits_of(heldout: bool) -> tuple[Split, ...]:
    return (Split.HELDOUT,) if heldout else (Split.PAIRS, Split.TRAIN)


def _lists(documents: Iterable[Document], size: int) -> Iterator[list[Document]]:
    """Yield lists of at most `size` documents."""
    stream = iter(documents)
    while some := list(islice(stream, size)):
        yield some


def _too_small(config: HarvestConfig, corpus: Corpus, n_rows: dict[Split, int]) -> CorpusError:
    counts = ", ".join(f"{split}: {n_rows[split]:,} of {config.wanted(split):,}" for split in Split)
    sentences = (
        f"The corpus {corpus.source!r} is too small for this request ({counts}).",
        "Ask for fewer tokens, change text.heldout_fraction, or give more text.",
        corpus.hint_if_too_small().strip(),
        "The model has not been run.",
    )
    return CorpusError(" ".join(filter(None, sentences)))
