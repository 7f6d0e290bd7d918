"""Text through the model, once: fills a store with training x, held-out x and attribution pairs (x, g).

A harvest that is killed at any moment and started again ends with the same bytes as one that never was: every shard
is a function of its contexts, the model and the seed alone. So several processes can share the shards among them: each
writes its own, and the first, which holds the lock, notes in the journal what all of them have written.
"""

import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import islice
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
from dmsae.activations.store import Store, StoreWriter, read_verified, write_file
from dmsae.config import require
from dmsae.devices import model_device
from dmsae.disk.files import require_space
from dmsae.disk.layout import shard_file, stores_directory, token_file
from dmsae.errors import DmsaeError
from dmsae.progress import SILENT, Bar, Progress, human_seconds
from dmsae.ranks import ONE, Axis, settled
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

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to another process as what it takes to harvest there."""
        return Harvest, (self.config, self.path.parent.resolve())

    def run(self, everyone: Axis = ONE) -> Store:
        """Return the store, harvesting what is missing of it, together with all ranks of an axis."""
        if everyone.of_first(is_complete(self.path)):
            return self._opened(everyone)
        begun: _Begun | None = None
        with ExitStack() as held:
            with settled(everyone):
                model_device(self.config.model.device)  # before any text is tokenised for it
            with settled(everyone, patiently=True):
                if everyone.rank == 0:
                    held.enter_context(store_lock(self.path))
                    begun = self._begin(everyone.size)
            finished = everyone.of_first(dict(begun.writer.records) if begun else None)
            if finished is not None:
                with settled(everyone):
                    contexts = {split: self._contexts_of(finished, split) for split in Split}
                    maker = ShardMaker(self.model, self.config)
                for split in Split:
                    self._fill(begun.writer if begun else None, finished, maker, split, contexts[split], everyone)
                with settled(everyone):
                    if begun:
                        begun.writer.finish(begun.estimate.d_model, begun.estimate.probe._asdict())
            return self._opened(everyone)

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

    def _opened(self, everyone: Axis) -> Store:
        with settled(everyone):
            return Store.open(self.path)

    def _begin(self, n_ranks: int) -> "_Begun | None":
        """Do what comes before the shards, and is done once; None when another process has just finished the store."""
        if is_complete(self.path):
            return None
        writer = StoreWriter(self.path, self.request, self._progress)
        estimate = self.estimate(self._stored_contexts(writer))
        self._announce(writer, estimate, n_ranks)
        return _Begun(writer, estimate)

    def _contexts_of(self, records: Mapping[str, FileRecord], split: Split) -> Contexts:
        return Contexts.stored(read_verified(self.path, records[token_file(split)]))

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
        return {split: self._contexts_of(writer.records, split) for split in Split}

    def _announce(self, writer: StoreWriter, estimate: Estimate, n_ranks: int) -> None:
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
            f"Store {self.path.name}: {resumed}{human_bytes(size_bytes)} to write, about "
            f"{human_seconds(seconds / n_ranks)}."
        )

    def _fill(
        self,
        writer: StoreWriter | None,
        finished: Mapping[str, FileRecord],
        maker: ShardMaker,
        split: Split,
        contexts: Contexts,
        everyone: Axis,
    ) -> None:
        """Make the shards of a split that are missing, each rank one at a time; only the first rank has a writer."""
        if not len(contexts):
            return
        add = writer.add if writer else partial(write_file, self.path)
        pending: Future[FileRecord] | None = None
        bar_of_split = self._progress.bar(f"harvest {split}", self.config.wanted(split), "tok")
        with bar_of_split as bar, ThreadPoolExecutor(1) as background:  # which writes while the model runs
            missing = self._missing(finished, split, contexts, bar)
            while turn := list(islice(missing, everyone.size)):
                record: FileRecord | None = None
                with settled(everyone):
                    if everyone.rank < len(turn):
                        mine = turn[everyone.rank]
                        shard, dropped = maker.make(split, mine.contexts, mine.quota, mine.number, bar.advance)
                        if pending is not None:
                            pending.result()
                        stored = to_stored_dtypes(shard, self.config)
                        pending = background.submit(add, shard_file(split, mine.number), stored, dropped)
                        if everyone.size > 1:  # before the first rank can note it, it must be there
                            record = pending.result()
                records = everyone.of_each(record)
                with settled(everyone):
                    for other, theirs in zip(turn[1:], records[1:], strict=False):
                        if writer and theirs:
                            writer.note(theirs)
                            bar.advance(other.quota)
            if pending is not None:
                pending.result()

    def _missing(
        self, finished: Mapping[str, FileRecord], split: Split, contexts: Contexts, bar: Bar
    ) -> "Iterator[_Missing]":
        """Yield the shards of a split that have not been finished earlier."""
        left = self.config.wanted(split)
        for index, some in enumerate(contexts.split(self.config.shard_contexts(split))):
            quota = min(left, int(countable(self.config, split, self.model.keep_mask, some).sum()))
            left -= quota
            if shard_file(split, index) in finished:
                bar.skip(quota)
            else:
                yield _Missing(index, some, quota)


class _Begun(NamedTuple):
    """What the first rank has done before any shard is made."""

    writer: StoreWriter
    estimate: Estimate


class _Missing(NamedTuple):
    """A shard that is to be made."""

    number: int
    contexts: Contexts
    quota: int


def harvest(config: HarvestConfig, root: Path | str | None = None, progress: Progress = SILENT) -> Store:
    """Return the store that `config` describes, harvesting what is missing of it.

    >>> store = dmsae.harvest(tiny_harvest)
    >>> dmsae.harvest(tiny_harvest).key == store.key  # the same request is never harvested twice
    True
    """
    return Harvest(config, None if root is None else Path(root), progress).run()
