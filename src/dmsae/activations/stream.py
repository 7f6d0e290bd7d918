"""One stream of activation batches, from a store on disk or live from the model.

Rows are read in groups of a few shards and shuffled within the group, so memory is bounded by two groups whatever the
size of the corpus. In the first epoch both sources go through the same contexts in the same order: live and disk give
the same batches, up to the rounding of the stored dtype.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dmsae.activations.harvest import Harvest, ShardMaker
from dmsae.activations.store import Split, Store
from dmsae.errors import ConfigError, StoreError
from dmsae.progress import console
from dmsae.seeds import generator


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where the next batch begins: enough to go on exactly there."""

    epoch: int = 0
    group: int = 0
    row: int = 0


class GroupSource(Protocol):
    """Something that can give the activations of the g-th group of an epoch."""

    @property
    def d_model(self) -> int:
        """Width of the activations."""

    def group(self, epoch: int, index: int) -> Tensor | None:
        """Return a group's rows [n, D] in any float dtype, or None past the end of the epoch."""


class StoreGroups:
    """Groups of shards from disk; from the second epoch on, the order of shards changes too."""

    def __init__(self, store: Store, seed: int, mix_shards: int = 4) -> None:
        self._store, self._seed, self._mix = store, seed, mix_shards
        self._shards = store.shards(Split.TRAIN)
        if not self._shards:
            raise StoreError(f"The store {store.key} holds no training activations. Harvest with train_tokens > 0.")

    @property
    def d_model(self) -> int:
        """Width of the activations."""
        return self._store.d_model

    def group(self, epoch: int, index: int) -> Tensor | None:
        """Return the rows of a group, every byte of it verified."""
        order = list(range(len(self._shards)))
        if epoch:
            mixed = torch.randperm(len(order), generator=generator(self._seed, "shards", epoch))
            order = mixed.tolist()
        chosen = order[index * self._mix : (index + 1) * self._mix]
        return torch.cat([self._store.read(self._shards[i])["x"] for i in chosen]) if chosen else None


class LiveGroups:
    """Groups straight from the model, for corpora that do not fit on the disk; nothing is stored.

    An epoch is `train_tokens` rows, or the corpus if that is smaller. Going back to an earlier group, or resuming in
    the middle, tokenises the text up to there again but runs the model on no more than the group asked for.
    """

    def __init__(self, harvest: Harvest, mix_shards: int = 4) -> None:
        self._harvest, self._mix = harvest, mix_shards
        self._maker = ShardMaker(harvest.model, harvest.config)
        self._shards: Iterator[tuple[Tensor, int]] = iter(())
        self._next = (-1, 0)
        self._told = False

    @property
    def request(self) -> dict[str, Any]:
        """What the activations are made from."""
        return self._harvest.request

    @property
    def d_model(self) -> int:
        """Width of the activations."""
        return self._harvest.d_model

    def group(self, epoch: int, index: int) -> Tensor | None:
        """Return the rows of a group, computed now."""
        if self._next != (epoch, index):
            self._shards = islice(self._token_shards(), index * self._mix, None)
        self._next = (epoch, index + 1)
        rows = [
            self._maker.make(Split.TRAIN, tokens, quota, index * self._mix + i)[0]["x"]
            for i, (tokens, quota) in enumerate(islice(self._shards, self._mix))
        ]
        return torch.cat(rows) if rows else None

    def _token_shards(self) -> Iterator[tuple[Tensor, int]]:
        """Yield the tokens and row count of each shard of the training split."""
        config, n_rows = self._harvest.config, 0
        found = ((c.tokens_L, count) for split, c, count in self._harvest.stream() if split is Split.TRAIN)
        while block := list(islice(found, config.shard_contexts(Split.TRAIN))):
            count = sum(count for _, count in block)
            n_rows += count
            yield torch.from_numpy(np.stack([tokens for tokens, _ in block])), count
        if n_rows < config.train_tokens and not self._told:
            self._told = True
            console.print(
                f"Mind: the corpus {config.text.source!r} holds {n_rows:,} of the {config.train_tokens:,} training "
                "activations asked for; it is gone through again as often as the training needs.",
                style="yellow",
                markup=False,
                soft_wrap=True,
            )


def live_facts(live: LiveGroups | None) -> dict[str, Any]:
    """Return what live activations are made from, for the settings of a run that trains on them."""
    return {"live": live.request} if live else {}


class ActivationStream:
    """Endless float32 batches [B, D] on a device: deterministic in the seed, reshuffled each epoch, read ahead.

    The rows at the end of an epoch that do not fill a batch are left out of that epoch.
    """

    def __init__(self, source: GroupSource, batch_size: int, seed: int = 0, device: torch.device | str = "cpu") -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size = {batch_size} must be at least 1.")
        self.batch_size = batch_size
        self.d_model = source.d_model
        self._source, self._seed = source, seed
        self.device = torch.device(device)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="activations")
        self.seek(Cursor())

    @property
    def cursor(self) -> Cursor:
        """Where the next batch begins. Depends on the batches taken, not on what has been read ahead."""
        return self._cursor

    def seek(self, cursor: Cursor) -> None:
        """Go to where an earlier stream was."""
        self._cursor = cursor
        self._rows: Tensor | None = None
        self._order = torch.empty(0, dtype=torch.int64)
        self._ahead: tuple[tuple[int, int], Future[Tensor | None]] | None = None
        self._barren = not (cursor.group or cursor.row)

    def close(self) -> None:
        """Stop reading ahead."""
        self._background.shutdown(cancel_futures=True)

    def __iter__(self) -> "ActivationStream":
        return self

    def __next__(self) -> Tensor:
        parts: list[Tensor] = []
        missing = self.batch_size
        while missing:
            if self._rows is None and not self._load():
                self._next_epoch()
                parts, missing = [], self.batch_size
                continue
            assert self._rows is not None
            at = self._cursor
            chosen = self._order[at.row : at.row + missing]
            parts.append(self._rows[chosen].to(self.device, torch.float32))
            missing -= len(chosen)
            if at.row + len(chosen) < len(self._order):
                self._cursor = Cursor(at.epoch, at.group, at.row + len(chosen))
            else:
                self._cursor = Cursor(at.epoch, at.group + 1)
                self._rows = None
        self._barren = False
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _load(self) -> bool:
        """Make the cursor's group current, and begin to read the one after it; False at the end of the epoch."""
        epoch, group = self._cursor.epoch, self._cursor.group
        if self._ahead is not None and self._ahead[0] == (epoch, group):
            self._rows = self._ahead[1].result()
        else:
            self._rows = self._background.submit(self._source.group, epoch, group).result()
        self._ahead = None
        if self._rows is None:
            return False
        self._ahead = (epoch, group + 1), self._background.submit(self._source.group, epoch, group + 1)
        self._order = torch.randperm(len(self._rows), generator=generator(self._seed, "mix", epoch, group))
        return True

    def _next_epoch(self) -> None:
        if self._barren:
            raise StoreError(f"There are fewer activations than batch_size = {self.batch_size}. Harvest more tokens.")
        self._barren = True
        self._cursor = Cursor(self._cursor.epoch + 1)
