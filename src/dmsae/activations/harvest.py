"""Text through the model, once: fills a store with training x, held-out x and attribution pairs (x, g).

A harvest that is killed at any moment and started again ends with the same bytes as one that never was: every shard
is a function of its contexts, the model and the seed alone.
"""

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.filesize import decimal as human_bytes
from torch import Tensor

from dmsae.activations.base_model import BaseModel, identify, load_tokenizer
from dmsae.activations.catalog import is_complete, store_lock
from dmsae.activations.contexts import AssignedContext, assign_contexts, collect_contexts, countable, stack_contexts
from dmsae.activations.identity import ModelIdentity
from dmsae.activations.journal import FileRecord, rows_by_split
from dmsae.activations.request import HarvestConfig, HarvestRequest
from dmsae.activations.shards import ShardMaker, row_bytes, to_stored_dtypes
from dmsae.activations.splits import Split
from dmsae.activations.store import Store, StoreWriter, read_verified
from dmsae.devices import model_device
from dmsae.disk.files import require_space
from dmsae.disk.layout import shard_file, stores_directory, token_file
from dmsae.errors import DmsaeError
from dmsae.progress import SILENT, Progress, human_seconds
from dmsae.text.corpus import open_corpus
from dmsae.text.tokens import Context


class Estimate(NamedTuple):
    """What a harvest will cost."""

    d_model: int
    rows: dict[Split, int]
    size_bytes: dict[Split, int]
    seconds: dict[Split, float]


class Harvest:
    """One request for a store: its address, and how to make it."""

    def __init__(self, config: HarvestConfig, root: Path | None = None, progress: Progress = SILENT) -> None:
        self.config = config
        self._progress = progress
        self.identity: ModelIdentity = identify(config.model, progress)
        self.corpus = open_corpus(config.text, progress)
        self.request = HarvestRequest.of(config, self.identity, self.corpus.identity)
        self.path = (root or stores_directory()) / self.request.key
        self._tokenizer: Any = None
        self._model: BaseModel | None = None

    def run(self) -> Store:
        """Return the store, harvesting what is missing of it."""
        if is_complete(self.path):
            return Store.open(self.path)
        model_device(self.config.model.device)  # before any text is tokenised for it
        with store_lock(self.path):
            if is_complete(self.path):  # another process finished it just before we had the lock
                return Store.open(self.path)
            writer = StoreWriter(self.path, self.request, self._progress)
            tokens = self._tokens(writer)
            estimate = self.estimate(tokens)
            self._announce(writer, estimate)
            for split in Split:
                self._fill(writer, split, tokens[split])
            return writer.finish(estimate.d_model)

    def estimate(self, tokens: dict[Split, Tensor]) -> Estimate:
        """Return rows, bytes and seconds, from one measured batch of each kind of pass."""
        probe_NL = next(t for t in tokens.values() if len(t))[: self.config.batch_contexts]
        maker = ShardMaker(self.model, self.config)
        d_model = self.d_model
        rows, size, seconds = {}, {}, {}
        for split in Split:
            start = time.perf_counter()
            if len(tokens[split]):
                maker.make(split, probe_NL, quota=probe_NL.numel())
            seconds_each = (time.perf_counter() - start) / probe_NL.numel()
            rows[split] = self.config.wanted(split)
            size[split] = rows[split] * row_bytes(self.config, split, d_model) + tokens[split].numel() * 5
            seconds[split] = tokens[split].numel() * seconds_each
        return Estimate(d_model, rows, size, seconds)

    def dry_run(self) -> Estimate:
        """Return what the harvest would cost, and raise what would stop it; nothing is written."""
        model_device(self.config.model.device)
        length = self.config.tokens.context_length
        stacked = {split: stack_contexts(contexts, length) for split, contexts in self.contexts().items()}
        estimate = self.estimate({split: tensors["tokens"] for split, tensors in stacked.items()})
        require_space(self.path, sum(estimate.size_bytes.values()), f"The store {self.path.name}")
        return estimate

    def contexts(self) -> dict[Split, list[Context]]:
        """Return the contexts of every split; too small a corpus is an error with counts, before any model runs."""
        return collect_contexts(self.config, self.corpus, self.tokenizer, self._progress)

    def assigned_contexts(self) -> Iterator[AssignedContext]:
        """Yield contexts with their splits, as the text is read."""
        return assign_contexts(self.config, self.corpus, self.tokenizer)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded when first needed."""
        self._tokenizer = self._tokenizer or load_tokenizer(self.config.model, self._progress)
        return self._tokenizer

    @property
    def model(self) -> BaseModel:
        """The model, loaded when first needed."""
        self._model = self._model or BaseModel.load(self.config.model, self.identity, self._progress)
        return self._model

    @property
    def d_model(self) -> int:
        """Width at the hook, found by running the model on one context of two tokens."""
        return self.model.activations(torch.zeros(1, 2, dtype=torch.int64)).shape[-1]

    def _tokens(self, writer: StoreWriter) -> dict[Split, Tensor]:
        """Return each split's tokens, from the store if an earlier run has put them there."""
        try:
            if any(token_file(split) not in writer.records for split in Split):
                for split, contexts in self.contexts().items():
                    if token_file(split) not in writer.records:
                        stacked = stack_contexts(contexts, self.config.tokens.context_length)
                        writer.add(token_file(split), stacked, {})
        except DmsaeError:
            if not writer.records:  # the request cannot be met: leave nothing that looks like a store
                shutil.rmtree(self.path)
            raise
        return {split: read_verified(self.path, writer.records[token_file(split)])["tokens"] for split in Split}

    def _announce(self, writer: StoreWriter, estimate: Estimate) -> None:
        """Report what is left to do, and raise when it does not fit on the disk."""
        size_bytes, seconds = 0, 0.0
        done = rows_by_split(writer.records.values())
        for split, rows in estimate.rows.items():
            each_bytes = row_bytes(self.config, split, estimate.d_model)
            size_bytes += estimate.size_bytes[split] - done[split] * each_bytes
            seconds += estimate.seconds[split] * (1 - done[split] / rows) if rows else 0
        require_space(self.path, size_bytes, f"The store {self.path.name}")
        n_shards = len(writer.records) - len(Split)
        resumed = f"{n_shards} shards were finished earlier, " if n_shards else ""
        self._progress.note(
            f"Store {self.path.name}: {resumed}{human_bytes(size_bytes)} to write, about {human_seconds(seconds)}."
        )

    def _fill(self, writer: StoreWriter, split: Split, tokens_NL: Tensor) -> None:
        """Make the shards of a split that are missing; a second thread writes while the model runs."""
        if not len(tokens_NL):
            return
        maker = ShardMaker(self.model, self.config)
        left = self.config.wanted(split)
        pending: Future[FileRecord] | None = None
        with self._progress.bar(f"harvest {split}", left, "tok") as bar, ThreadPoolExecutor(1) as background:
            for index, shard_NL in enumerate(tokens_NL.split(self.config.shard_contexts(split))):
                quota = min(left, int(countable(split, self.model.keep_mask, shard_NL).sum()))
                left -= quota
                if shard_file(split, index) in writer.records:
                    bar.skip(quota)
                    continue
                shard, dropped = maker.make(split, shard_NL, quota, index, bar.advance)
                if pending is not None:
                    pending.result()
                stored = to_stored_dtypes(shard, self.config)
                pending = background.submit(writer.add, shard_file(split, index), stored, dropped)
            if pending is not None:
                pending.result()


def harvest(config: HarvestConfig, root: Path | None = None, progress: Progress = SILENT) -> Store:
    """Return the store that `config` describes, harvesting what is missing of it.

    >>> store = dmsae.harvest(tiny_harvest)
    >>> dmsae.harvest(tiny_harvest).key == store.key  # the same request is never harvested twice
    True
    """
    return Harvest(config, root, progress).run()
