"""One stream of activation batches, wherever the activations come from.

Rows are read in blocks and shuffled within the block, so memory is bounded by two blocks whatever the size of the
corpus.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from dmsae.activations.sources import ActivationSource, SampledSource
from dmsae.activations.token_sample import TokenSample
from dmsae.config import require, require_whole
from dmsae.errors import StoreError
from dmsae.seeds import generator


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where the next batch begins: enough to resume exactly there."""

    epoch: int = 0
    block: int = 0
    row: int = 0


class ActivationStream:
    """Endless float32 batches [B, D] on a device: deterministic in the seed, reshuffled each epoch, read ahead.

    The rows at the end of an epoch that do not fill a batch are left out of that epoch. With `share` = (i, n) only the
    i-th of n equal parts of every batch is given: together, n such streams give what one without it gives.
    """

    def __init__(
        self,
        source: ActivationSource,
        batch_size: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
        share: tuple[int, int] = (0, 1),
    ) -> None:
        require_whole("batch_size", batch_size, 1)
        part, n_parts = share
        must = f"be a multiple of the {n_parts} parts of a batch"
        require(batch_size % n_parts == 0, "batch_size", batch_size, must)
        self.batch_size = batch_size
        self._share = range(part * batch_size // n_parts, (part + 1) * batch_size // n_parts)
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
        missing = self.batch_size
        while missing:
            if self._rows is None and not self._load():
                self._next_epoch()
                parts, missing = [], self.batch_size
                continue
            assert self._rows is not None
            at = self._cursor
            chosen = self._order[at.row : at.row + missing]
            given = self.batch_size - missing
            mine = chosen[max(0, self._share.start - given) : max(0, self._share.stop - given)]
            parts.append(self._rows[mine].to(self.device, torch.float32))
            missing -= len(chosen)
            if at.row + len(chosen) < len(self._order):
                self._cursor = Cursor(at.epoch, at.block, at.row + len(chosen))
            else:
                self._cursor = Cursor(at.epoch, at.block + 1)
                self._rows = None
        self._epoch_gave_a_batch = True
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _load(self) -> bool:
        """Make the cursor's block current, and begin to read the one after it; False at the end of the epoch."""
        epoch, block = self._cursor.epoch, self._cursor.block
        if self._ahead is not None and self._ahead[0] == (epoch, block):
            self._rows = self._ahead[1].result()
        else:
            self._rows = self._read(epoch, block).result()
        self._ahead = None
        if self._rows is None:
            return False
        self._ahead = (epoch, block + 1), self._read(epoch, block + 1)
        self._order = torch.randperm(len(self._rows), generator=generator(self._seed, "mix", epoch, block))
        return True

    def _read(self, epoch: int, block: int) -> Future[Tensor | None]:
        return self._background.submit(self._source.block, epoch, block, self._seed)

    def _next_epoch(self) -> None:
        if not self._epoch_gave_a_batch:
            raise StoreError(
                f"There are fewer activations than batch_size = {self.batch_size}. Harvest more tokens, or lower "
                "batch_size."
            )
        self._epoch_gave_a_batch = False
        self._cursor = Cursor(self._cursor.epoch + 1)
