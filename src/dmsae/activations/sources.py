"""Where activations come from: a store on disk, the model itself, or arrays in memory.

A source gives its rows in blocks. In the first epoch a store and a live source go through the same contexts in the
same order, so both give the same batches, up to the rounding of the stored dtype.
"""

import mmap
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from dmsae.activations.arrays import Array, ArrayRows
from dmsae.activations.contexts import Contexts
from dmsae.activations.dtypes import to_stored
from dmsae.activations.harvest import Harvest
from dmsae.activations.request import HarvestConfig
from dmsae.activations.shards import ShardMaker
from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.activations.token_sample import TokenSample, sample_of_harvest, sample_of_store
from dmsae.config import Json, require_whole, to_dict
from dmsae.errors import StoreError
from dmsae.progress import SILENT, Progress
from dmsae.seeds import generator

MIX_SHARDS = 4
"""Shards of a block, whose rows are shuffled together."""

Share = tuple[int, int]
"""(i, n): the shards at the places i, i + n, i + 2n, … of an epoch."""
WHOLE: Share = (0, 1)
Shards = dict[int, Tensor]
"""Rows [n, D] of some shards of a block, by their places in it."""


class ActivationSource(Protocol):
    """Something that gives activations in blocks, epoch after epoch."""

    @property
    def d_model(self) -> int:
        """Width of the activations."""

    @property
    def facts(self) -> Json:
        """What the activations are made from; recorded in everything that is trained on them."""

    def block(self, epoch: int, index: int, seed: int) -> Tensor | None:
        """Return a block's rows [n, D] in any float dtype, or None past the end of the epoch."""


@runtime_checkable
class SampledSource(Protocol):
    """A source that knows the text of its activations, and so can give a sample of both."""

    def token_sample(self) -> TokenSample | None:
        """Return a few contexts with some of their activations, if there are any."""


@runtime_checkable
class ShardedSource(Protocol):
    """A source whose blocks are made of shards, of which each of several ranks can read its own."""

    def shards(self, epoch: int, index: int, seed: int, share: Share = WHOLE) -> Shards | None:
        """Return the shards of a block that belong to a share, or None past the end of the epoch."""


def joined_(shards: Shards, d_model: int) -> Tensor:
    """Return the rows of shards [n, D] in the order of their places, letting go of each shard when it is copied.

    They lie in pages of their own, which go back to the system with them. From the heap, which the thread that reads
    ahead shares with others, a block may not fit where the last one was, and then two of them stay.
    """
    places, n_rows = sorted(shards), sum(map(len, shards.values()))
    if not n_rows:
        return torch.zeros(0, d_model)
    dtype = shards[places[0]].dtype
    pages = mmap.mmap(-1, n_rows * d_model * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    rows = torch.frombuffer(pages, dtype=dtype).view(n_rows, d_model)
    start = 0
    for place in places:
        shard = shards.pop(place)
        rows[start : start + len(shard)] = shard
        start += len(shard)
    return rows


def as_source(data: "ActivationSource | Store | Array") -> "ActivationSource":
    """Return the source that a store, an array or a tensor stands for; a source is returned as it is."""
    if isinstance(data, Store):
        return StoreSource(data)
    return ArraySource(data) if isinstance(data, np.ndarray | Tensor) else data


class StoreSource:
    """A block is a few shards from disk. From the second epoch on, the order of shards changes with the seed."""

    def __init__(self, store: Store, mix_shards: int = MIX_SHARDS) -> None:
        require_whole("mix_shards", mix_shards, 1)
        self._store, self._mix = store, mix_shards
        self._shards = store.shards(Split.TRAIN)
        if not self._shards:
            raise StoreError(f"The store {store.key} holds no training activations. Harvest with train_tokens > 0.")

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to another process as what it takes to open the store there."""
        return _reopened, (self._store.path.resolve(), self._mix)

    @property
    def d_model(self) -> int:
        """Width of the activations."""
        return self._store.d_model

    @property
    def facts(self) -> Json:
        """The store's key and its model."""
        return {"store": self._store.key, "model": to_dict(self._store.model)}

    def token_sample(self) -> TokenSample | None:
        """Return a sample of the store's text; None for imported activations, which come without."""
        return sample_of_store(self._store)

    @property
    def n_shards(self) -> int:
        """How many shards an epoch has."""
        return len(self._shards)

    def block(self, epoch: int, index: int, seed: int) -> Tensor | None:
        """Return the rows of a few shards, every byte of them verified."""
        shards = self.shards(epoch, index, seed)
        return None if shards is None else joined_(shards, self.d_model)

    def shards(self, epoch: int, index: int, seed: int, share: Share = WHOLE) -> Shards | None:
        """Return some shards of a block, every byte of them verified; the others are not opened."""
        order = list(range(len(self._shards)))
        if epoch:
            mixed = torch.randperm(len(order), generator=generator(seed, "shards", epoch))
            order = mixed.tolist()
        first = index * self._mix
        chosen = order[first : first + self._mix]
        mine = (at for at in range(len(chosen)) if _belongs(first + at, share))
        return {at: self._store.read(self._shards[chosen[at]])["x"] for at in mine} if chosen else None


class LiveSource:
    """A block comes straight from the model, for corpora that do not fit on the disk; nothing is stored.

    An epoch is `train_tokens` rows, or the corpus if that is smaller; its order depends on the seed of the harvest.
    Going back to an earlier block, or resuming in the middle, tokenises the text up to there again but runs the model
    only on the block that was asked for.
    """

    def __init__(self, harvest: Harvest, mix_shards: int = MIX_SHARDS, progress: Progress = SILENT) -> None:
        require_whole("mix_shards", mix_shards, 1)
        self._harvest, self._mix, self._progress = harvest, mix_shards, progress
        self._maker = ShardMaker(harvest.model, harvest.config)
        self._shards: Iterator[tuple[Contexts, int]] = iter(())
        self._next = (-1, 0)
        self._has_warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to another process as what it takes to run the model there."""
        return _live_again, (self._harvest.config, self._harvest.path.parent, self._mix)

    @property
    def d_model(self) -> int:
        """Width of the activations."""
        return self._harvest.d_model

    @property
    def facts(self) -> Json:
        """The request of the harvest, and its model."""
        return {"live": to_dict(self._harvest.request), "model": to_dict(self._harvest.identity)}

    def token_sample(self) -> TokenSample | None:
        """Return a sample of the first contexts, run through the model."""
        return sample_of_harvest(self._harvest)

    def block(self, epoch: int, index: int, seed: int) -> Tensor | None:
        """Return the rows of a few shards, computed now."""
        shards = self.shards(epoch, index, seed)
        return None if shards is None else joined_(shards, self.d_model)

    def shards(self, epoch: int, index: int, seed: int, share: Share = WHOLE) -> Shards | None:
        """Return some shards of a block, computed now; the model does not see the contexts of the others."""
        if self._next != (epoch, index):
            self._shards = islice(self._context_shards(), index * self._mix, None)
        self._next = (epoch, index + 1)
        first = index * self._mix
        block = list(islice(self._shards, self._mix))
        mine = (at for at in range(len(block)) if _belongs(first + at, share))
        return {at: self._maker.make(Split.TRAIN, *block[at], first + at)[0]["x"] for at in mine} if block else None

    def _context_shards(self) -> Iterator[tuple[Contexts, int]]:
        """Yield the contexts and row count of each shard of the training split."""
        config, n_rows = self._harvest.config, 0
        train = (one for one in self._harvest.assigned_contexts() if one.split is Split.TRAIN)
        while shard := list(islice(train, config.shard_contexts(Split.TRAIN))):
            count = sum(one.n_rows for one in shard)
            n_rows += count
            yield Contexts.of([one.context for one in shard], config.tokens.context_length), count
        if n_rows < config.train_tokens and not self._has_warned:
            self._has_warned = True
            self._progress.warn(
                f"The corpus {config.text.source!r} holds {n_rows:,} of the {config.train_tokens:,} training "
                "activations asked for; it will be repeated as needed."
            )


def _belongs(place: int, share: Share) -> bool:
    """Return whether the shard at a place of an epoch belongs to a share."""
    part, n_parts = share
    return place % n_parts == part


def _reopened(path: Path, mix_shards: int) -> StoreSource:
    return StoreSource(Store.open(path), mix_shards)


def _live_again(config: HarvestConfig, root: Path, mix_shards: int) -> LiveSource:
    return LiveSource(Harvest(config, root), mix_shards)


class ArraySource:
    """A block is some rows of an array or tensor [n, D] in memory, which are shuffled anew in each epoch."""

    def __init__(self, x: Array, block_rows: int = 65_536) -> None:
        require_whole("block_rows", block_rows, 1)
        self._rows, self._block_rows = ArrayRows("x", x), block_rows
        for chunk in self._rows.chunks(block_rows):  # checks every row, before any of them is trained on
            to_stored(chunk, "float32", "x", "Scale it down.")
        self._order: tuple[tuple[int, int], Tensor] | None = None

    @property
    def d_model(self) -> int:
        """Width of the activations."""
        return self._rows.width

    @cached_property
    def facts(self) -> Json:
        """A hash of the values, and how many rows there are."""
        return {"arrays": {"sha256": self._rows.sha256(), "rows": len(self._rows)}}

    def block(self, epoch: int, index: int, seed: int) -> Tensor | None:
        """Return the rows at a stretch of the epoch's random order."""
        if self._order is None or self._order[0] != (epoch, seed):
            shuffled = torch.randperm(len(self._rows), generator=generator(seed, "array", epoch))
            self._order = (epoch, seed), shuffled
        chosen = self._order[1][index * self._block_rows : (index + 1) * self._block_rows]
        return self._rows.take(chosen) if len(chosen) else None
