"""One stream of activation batches, wherever the activations come from.

Rows are read in blocks and shuffled within the block, so memory is bounded by two blocks whatever the size of the
corpus.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.activations.sources import ActivationSource, SampledSource, ShardedSource, joined_
from dmsae.activations.token_sample import TokenSample
from dmsae.config import require, require_whole
from dmsae.errors import StoreError
from dmsae.ranks import ONE, Axis, settled
from dmsae.seeds import generator


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where the next batch begins: enough to resume exactly there."""

    epoch: int = 0
    block: int = 0
    row: int = 0


class _Read(NamedTuple):
    """What a rank has read of a block."""

    rows: Tensor
    """[n, D], in the block's order."""
    shards_S2: Tensor
    """For each shard of them its place in the block, and how many rows it has."""


class _Owners(NamedTuple):
    """Which rank has which of a block's N rows."""

    rank_N: Tensor
    place_N: Tensor
    """Where each row is among those of this rank; means nothing for the rows of others."""

    @classmethod
    def of(cls, shards: list[Tensor], rank: int) -> "_Owners":
        """Return the owners of a block's rows, given for each rank the places and sizes of its shards."""
        counts, owners = torch.zeros(2, sum(map(len, shards)), dtype=torch.int64)
        for owner, (places, sizes) in enumerate(one.T for one in shards):
            owners[places], counts[places] = owner, sizes
        rank_N = owners.repeat_interleave(counts)
        return cls(rank_N, (rank_N == rank).cumsum(0) - 1)


class ActivationStream:
    """Endless float32 batches [B, D] on a device: deterministic in the seed, reshuffled each epoch, read ahead.

    The rows at the end of an epoch that do not fill a batch are left out of that epoch. On a mesh each data rank gets
    its own of as many equal parts of every batch: together they get what one process gets. Of a block that is made of
    shards each reads some, and they exchange the rows of every batch; `everyone` hears of a shard that one of them
    cannot read.
    """

    def __init__(
        self,
        source: ActivationSource,
        batch_size: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
        data: Axis = ONE,
        everyone: Axis = ONE,
    ) -> None:
        require_whole("batch_size", batch_size, 1)
        must = f"be a multiple of the {data.size} parts of a batch"
        require(batch_size % data.size == 0, "batch_size", batch_size, must)
        self.batch_size = batch_size
        self._share = slice(data.rank * batch_size // data.size, (data.rank + 1) * batch_size // data.size)
        self.d_model = source.d_model
        self._source, self._seed, self._data, self._everyone = source, seed, data, everyone
        self._sharded = source if isinstance(source, ShardedSource) and data.size > 1 else None
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
        self._owners: _Owners | None = None
        self._order = torch.empty(0, dtype=torch.int64)
        self._ahead: tuple[tuple[int, int], Future[_Read | None]] | None = None
        self._epoch_gave_a_batch = bool(cursor.block or cursor.row)

    def token_sample(self) -> TokenSample | None:
        """Return a sample of the text and its activations, if the source knows the text."""
        return self._source.token_sample() if isinstance(self._source, SampledSource) else None

    def close(self) -> None:
        """Stop reading ahead."""
        self._background.shutdown(cancel_futures=True)

    def __iter__(self) -> "ActivationStream":
        return self

    def __next__(self) -> Tensor:
        parts: list[Tensor] = []
        ranks: list[Tensor] = []
        missing = self.batch_size
        while missing:
            if self._rows is None and not self._load():
                self._next_epoch()
                parts, ranks, missing = [], [], self.batch_size
                continue
            assert self._rows is not None
            at = self._cursor
            chosen = self._order[at.row : at.row + missing]
            given = self.batch_size - missing
            mine = chosen[max(0, self._share.start - given) : max(0, self._share.stop - given)]
            if self._owners is not None:
                ranks.append(self._owners.rank_N[chosen])
                mine = self._owners.place_N[chosen[ranks[-1] == self._data.rank]]
            parts.append(self._rows[mine].to(self.device, torch.float32))
            missing -= len(chosen)
            if at.row + len(chosen) < len(self._order):
                self._cursor = Cursor(at.epoch, at.block, at.row + len(chosen))
            else:
                self._cursor = Cursor(at.epoch, at.block + 1)
                self._rows = None
        self._epoch_gave_a_batch = True
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._exchanged(rows, torch.cat(ranks)) if ranks else rows

    def _exchanged(self, mine: Tensor, rank_B: Tensor) -> Tensor:
        """Return this rank's part of a batch, given the rows of it that the rank has and which rank has each."""
        part_BD = mine.new_empty(len(rank_B[self._share]), self.d_model)
        for rank, theirs in enumerate(self._data.gather(mine)):
            wanted_B = rank_B[self._share] == rank
            first = int((rank_B[: self._share.start] == rank).sum())
            part_BD[wanted_B.to(self.device)] = theirs[first : first + int(wanted_B.sum())]
        return part_BD

    def _load(self) -> bool:
        """Make the cursor's block current, and begin to read the one after it; False at the end of the epoch."""
        epoch, block = self._cursor.epoch, self._cursor.block
        with settled(self._everyone):
            ahead, self._ahead = self._ahead, None
            read = (ahead[1] if ahead and ahead[0] == (epoch, block) else self._read(epoch, block)).result()
        if read is None:
            return False
        self._ahead = (epoch, block + 1), self._read(epoch, block + 1)
        self._rows, shards_S2 = read
        n_rows = len(self._rows)
        if self._sharded is not None:
            self._owners = _Owners.of(self._data.gather(shards_S2), self._data.rank)
            n_rows = len(self._owners.rank_N)
        self._order = torch.randperm(n_rows, generator=generator(self._seed, "mix", epoch, block))
        return True

    def _read(self, epoch: int, block: int) -> Future[_Read | None]:
        return self._background.submit(self._read_now, epoch, block)

    def _read_now(self, epoch: int, block: int) -> _Read | None:
        """Return the rank's own shards of a block, or all of a block that is not shared."""
        if self._sharded is None:
            whole = self._source.block(epoch, block, self._seed)
            return None if whole is None else _Read(whole, torch.tensor([[0, len(whole)]]))
        shards = self._sharded.shards(epoch, block, self._seed, (self._data.rank, self._data.size))
        if shards is None:
            return None
        sizes = [(place, len(shard)) for place, shard in sorted(shards.items())]
        return _Read(joined_(shards, self.d_model), torch.tensor(sizes, dtype=torch.int64).view(-1, 2))

    def _next_epoch(self) -> None:
        if not self._epoch_gave_a_batch:
            raise StoreError(
                f"There are fewer activations than batch_size = {self.batch_size}. Harvest more tokens, or lower "
                "batch_size."
            )
        self._epoch_gave_a_batch = False
        self._cursor = Cursor(self._cursor.epoch + 1)
