"""Which contexts each split of a store is made from.

Each document belongs to one split. The documents of a split are packed into contexts until the split has as many rows
as were asked for. Of a long document, pairs and held-out text take only a window, so that they come from many
documents. The model is not run for this.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dmsae.activations.request import HarvestConfig, HarvestRequest
from dmsae.activations.splits import Split
from dmsae.errors import CorpusError
from dmsae.progress import SILENT, Progress
from dmsae.text.corpus import Corpus, Document, TextConfig
from dmsae.text.tokens import Context, KeepMask, Packer, Window, has_target

_DOCUMENTS_AT_ONCE = 512
_CHARS_AT_ONCE = 16_000_000
"""Documents per call of the tokenizer."""
_FEW_DOCUMENTS = 20
"""Fewer than this describe themselves more than the model."""


class AssignedContext(NamedTuple):
    """A context, the split that it belongs to, and how many rows it gives."""

    split: Split
    context: Context
    n_rows: int


@dataclass(frozen=True, slots=True)
class Contexts:
    """Several contexts as tensors: their tokens, and where documents start in them."""

    tokens_NL: Tensor
    starts_NL: Tensor

    @classmethod
    def of(cls, contexts: Sequence[Context], length: int) -> "Contexts":
        """Stack contexts of one length; there may be none."""
        tokens = np.stack([c.tokens_L for c in contexts]) if contexts else np.zeros((0, length), np.int32)
        starts = np.stack([c.starts_L for c in contexts]) if contexts else np.zeros((0, length), np.bool_)
        return cls(torch.from_numpy(tokens), torch.from_numpy(starts))

    @classmethod
    def stored(cls, tensors: dict[str, Tensor]) -> "Contexts":
        """Return what a store's file of tokens holds."""
        return cls(tensors["tokens"], tensors["starts"])

    def to_store(self) -> dict[str, Tensor]:
        """Return the tensors as a store's file of tokens holds them."""
        return {"tokens": self.tokens_NL, "starts": self.starts_NL}

    def __len__(self) -> int:
        return len(self.tokens_NL)

    def take(self, which: slice | Tensor) -> "Contexts":
        """Return some of the contexts."""
        return Contexts(self.tokens_NL[which], self.starts_NL[which])

    def split(self, size: int) -> Iterator["Contexts"]:
        """Yield the contexts in parts of `size`; only the last may be smaller."""
        for start in range(0, len(self), size):
            yield self.take(slice(start, start + size))

    @property
    def n_documents(self) -> int:
        """How many documents start in these contexts."""
        return int(self.starts_NL.sum())


def split_of(document: Document, config: TextConfig) -> Split:
    """Return the split that a document belongs to, which depends on its text alone."""
    if document.place < config.heldout_fraction:
        return Split.HELDOUT
    return Split.PAIRS if document.place < config.heldout_fraction + config.pairs_fraction else Split.TRAIN


def assign_contexts(config: HarvestConfig, corpus: Corpus, tokenizer: Any) -> Iterator[AssignedContext]:
    """Yield contexts until every split is full or the text ends."""
    left = {split: config.wanted(split) for split in Split}
    mask = KeepMask.of(tokenizer)
    window = Window(config.max_contexts_per_document * config.tokens.context_length, config.seed)
    packers = {split: Packer(tokenizer, config.tokens, None if split is Split.TRAIN else window) for split in Split}

    def assign(split: Split, contexts: Iterator[Context]) -> Iterator[AssignedContext]:
        for context in contexts:
            if not left[split]:
                return
            rows = int(countable(config, split, mask, Contexts.of([context], len(context.tokens_L))).sum())
            count = min(rows, left[split])
            left[split] -= count
            yield AssignedContext(split, context, count)

    for documents in _lists(corpus.documents(config.seed), _DOCUMENTS_AT_ONCE):
        for split, packer in packers.items():
            texts = [document.text for document in documents if split_of(document, config.text) is split]
            if left[split] and texts:
                yield from assign(split, packer.add(texts))
        if not any(left.values()):
            return
    for split, packer in packers.items():
        yield from assign(split, packer.flush())


def collect_contexts(
    config: HarvestConfig, corpus: Corpus, tokenizer: Any, progress: Progress = SILENT
) -> dict[Split, Contexts]:
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
    return {split: Contexts.of(some, config.tokens.context_length) for split, some in contexts.items()}


def counted_losses(skip_boundary_targets: bool, mask: KeepMask, contexts: Contexts) -> Tensor:
    """Return a boolean [N, L]: at which positions the next-token loss is part of the sum that makes g."""
    if skip_boundary_targets:
        return mask.targets(contexts.tokens_NL, contexts.starts_NL)
    return has_target(contexts.tokens_NL)


def countable(config: HarvestConfig, split: Split, mask: KeepMask, contexts: Contexts) -> Tensor:
    """Return where a split takes rows from: the keep-mask, and for pairs also a loss at that position or later."""
    keep_NL = mask(contexts.tokens_NL)
    if split is not Split.PAIRS:
        return keep_NL
    counted_NL = counted_losses(config.skip_boundary_targets, mask, contexts)
    return keep_NL & (counted_NL.flip(-1).cumsum(-1).flip(-1) > 0)


def warn_of_few_documents(
    config: HarvestConfig | HarvestRequest, n_documents: dict[Split, int], progress: Progress
) -> None:
    """Warn when pairs or held-out text come from so few documents that all results would describe these."""
    names = {
        Split.PAIRS: ("The pairs come", "pair_tokens"),
        Split.HELDOUT: ("The held-out text comes", "heldout_tokens"),
    }
    for split, (subject, setting) in names.items():
        count, wanted, cap = n_documents[split], config.wanted(split), config.max_contexts_per_document
        fewer_each = f"lower max_contexts_per_document ({cap}), " if cap > 1 else ""
        if wanted and count < _FEW_DOCUMENTS:
            progress.warn(
                f"{subject} from {count} document{'' if count == 1 else 's'}, so what is measured there describes "
                f"these few texts. To take {_FEW_DOCUMENTS} or more, raise {setting} ({wanted:,}), "
                f"{fewer_each}or give text in shorter documents."
            )


def _lists(documents: Iterable[Document], size: int) -> Iterator[list[Document]]:
    """Yield lists of at most `size` documents, and fewer when they are so long that their tokens would fill memory."""
    some: list[Document] = []
    n_chars = 0
    for document in documents:
        some.append(document)
        n_chars += len(document.text)
        if len(some) == size or n_chars >= _CHARS_AT_ONCE:
            yield some
            some, n_chars = [], 0
    if some:
        yield some


def _too_small(config: HarvestConfig, corpus: Corpus, n_rows: dict[Split, int]) -> CorpusError:
    counts = ", ".join(f"{split}: {n_rows[split]:,} of {config.wanted(split):,}" for split in Split)
    sentences = (
        f"The corpus {corpus.source!r} is too small for this request ({counts}).",
        "Ask for fewer tokens, give more text, change text.heldout_fraction or text.pairs_fraction, or (for pairs and "
        "held-out text from long documents) raise max_contexts_per_document.",
        corpus.hint_if_too_small().strip(),
        "The model has not been run.",
    )
    return CorpusError(" ".join(filter(None, sentences)))
