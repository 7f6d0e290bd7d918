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

from dmsae.activations.base_model import BaseModel, identify, load_tokenizer, position_limit
from dmsae.activations.catalog import is_complete, store_lock
from dmsae.activations.contexts import (
    AssignedContext,
    Contexts,
    assign_contexts,
    collect_contexts,
    countable,
    warn_of_few_documents,
)
from dmsae.activations.identity import ModelIdentity
from dmsae.activations.journal import FileRecord, rows_by_split
from dmsae.activations.probe import Probe, report
from dmsae.activations.request import HarvestConfig, HarvestRequest
from dmsae.activations.shards import ShardMaker, row_bytes, to_stored_dtypes
from dmsae.activations.splits import Split
from dmsae.activations.store import Store, StoreWriter, read_verified
from dmsae.config import require
from dmsae.devices import model_device
from dmsae.disk.files import require_space
from dmsae.disk.layout import shard_file, stores_directory, token_file
from dmsae.errors import DmsaeError
from dmsae.progress import SILENT, Progress, human_seconds
from dmsae.text.corpus import open_corpus


class Estimate(NamedTuple):
    """What a harvest will cost."""

    d_model: int
    documents: dict[Split, int]
    rows: dict[Split, int]
    size_bytes: dict[Split, int]
    seconds: dict[Split, float]
    probe: Probe


class Harvest:
    """One request for a store: its address, and how to make it."""

    def __init__(self, config: HarvestConfig, root: Path | None = None, progress: Progress = SILENT) -> None:
        self.config = config
        self._progress = progress
        self.identity: ModelIdentity = identify(config.model, progress)
        limit, length = position_limit(config.model, progress), config.tokens.context_length
        fits = limit is None or length <= limit
        require(fits, "tokens.context_length", length, f"be at most {limit}, the positions that this model has")
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
            contexts = self._stored_contexts(writer)
            estimate = self.estimate(contexts)
            self._announce(writer, estimate)
            for split in Split:
                self._fill(writer, split, contexts[split])
            return writer.finish(estimate.d_model, estimate.probe._asdict())

    def estimate(self, contexts: dict[Split, Contexts]) -> Estimate:
        """Return documents, rows, bytes and seconds, from one measured batch of each kind of pass.

        What the user should know before a long harvest is reported: how contexts start, the model's loss on them, and
        splits that come from few documents.
        """
        some = next(one for one in contexts.values() if len(one))
        documents = {split: one.n_documents for split, one in contexts.items()}
        warn_of_few_documents(self.config, documents, self._progress)
        self._progress.note("Measuring a few contexts to estimate the time …")
        measured = report(self.model, some, self.config.tokens, self._progress)
        batch = some.take(slice(self.config.batch_contexts))
        maker, n_positions = ShardMaker(self.model, self.config), batch.tokens_NL.numel()
        d_model = self.d_model
        rows, size, seconds = {}, {}, {}
        for split in Split:
            start = time.perf_counter()
            if len(contexts[split]):
                maker.make(split, batch, quota=n_positions)
            seconds_each = (time.perf_counter() - start) / n_positions
            n_tokens = contexts[split].tokens_NL.numel()
            rows[split] = self.config.wanted(split)
            size[split] = rows[split] * row_bytes(self.config, split, d_model) + n_tokens * 5
            seconds[split] = n_tokens * seconds_each
        return Estimate(d_model, documents, rows, size, seconds, measured)

    def dry_run(self) -> Estimate:
        """Return what the harvest would cost, and raise what would stop it; nothing is written."""
        model_device(self.config.model.device)
        estimate = self.estimate(self.contexts())
        require_space(self.path, sum(estimate.size_bytes.values()), f"The store {self.path.name}")
        return estimate

    def contexts(self) -> dict[Split, Contexts]:
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

    def _stored_contexts(self, writer: StoreWriter) -> dict[Split, Contexts]:
        """Return each split's contexts, from the store if an earlier run has put them there."""
        try:
            if any(token_file(split) not in writer.records for split in Split):
                for split, contexts in self.contexts().items():
                    if token_file(split) not in writer.records:
                        writer.add(token_file(split), contexts.to_store(), {})
        except DmsaeError:
            if not writer.records:  # the request cannot be met: leave nothing that looks like a store
                shutil.rmtree(self.path)
            raise
        files = {split: read_verified(self.path, writer.records[token_file(split)]) for split in Split}
        return {split: Contexts.stored(tensors) for split, tensors in files.items()}

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

    def _fill(self, writer: StoreWriter, split: Split, contexts: Contexts) -> None:
        """Make the shards of a split that are missing; a second thread writes while the model runs."""
        if not len(contexts):
            return
        maker = ShardMaker(self.model, self.config)
        left = self.config.wanted(split)
        pending: Future[FileRecord] | None = None
        with self._progress.bar(f"harvest {split}", left, "tok") as bar, ThreadPoolExecutor(1) as background:
            for index, some in enumerate(contexts.split(self.config.shard_contexts(split))):
                quota = min(left, int(countable(self.config, split, self.model.keep_mask, some).sum()))
                left -= quota
                if shard_file(split, index) in writer.records:
                    bar.skip(quota)
                    continue
                shard, dropped = maker.make(split, some, quota, index, bar.advance)
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
