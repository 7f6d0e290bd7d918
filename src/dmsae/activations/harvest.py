"""Text through the model, once: fills a store with training x, held-out x and attribution pairs (x, g).

Each shard is a function of its contexts, the model and the seed alone. So a harvest that was killed at any moment and
started again ends with the same bytes as one that never was.
"""

import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dmsae.activations import store as stores
from dmsae.activations.base_model import (
    DTYPES,
    BaseModel,
    DtypeName,
    ModelConfig,
    ModelIdentity,
    choose_device,
    identify,
    load_tokenizer,
)
from dmsae.activations.store import FileRecord, Split, Store, StoreWriter, shard_file, token_file
from dmsae.config import to_dict
from dmsae.disk.files import canonical_hash, human_bytes, require_space
from dmsae.errors import ConfigError, CorpusError, DmsaeError, ModelError, StoreError
from dmsae.progress import console, human_seconds, progress
from dmsae.seeds import generator
from dmsae.text.corpus import Corpus, Document, TextConfig
from dmsae.text.tokens import Context, KeepMask, Packer, TokenConfig, has_target

Shard = dict[str, Tensor]
_PAIRS_SHARE = 8
"""How many times smaller the shards of pairs are."""


@dataclass(frozen=True, slots=True)
class HarvestConfig:
    """What a store is made from, and how."""

    model: ModelConfig = field(default_factory=ModelConfig)
    text: TextConfig = field(default_factory=TextConfig)
    tokens: TokenConfig = field(default_factory=TokenConfig)
    train_tokens: int = 1_000_000
    """Activations to train on. Masked positions do not count; norm outliers do, and are then left out."""
    heldout_tokens: int = 50_000
    """Activations of held-out documents."""
    pair_tokens: int = 20_000
    """(x, g) pairs for attribution. Each costs a forward and a backward pass through the whole model."""
    dtype: DtypeName = "float16"
    """How x is stored. Values that do not fit are an error, never infinity."""
    gradient_dtype: DtypeName = "float32"
    """How g is stored. Gradients are small: 16 bits may lose them."""
    shard_tokens: int = 65_536
    """Positions per file, before dropping; an interrupted harvest loses the file it was at. Pairs, which cost far more
    each, get an eighth of it."""
    max_norm_ratio: float | None = 10.0
    """Drop activations whose norm exceeds this multiple of the median norm in their shard. None: keep all."""
    batch_contexts: int = 8
    """Contexts per forward pass. Does not change what is stored, beyond rounding."""
    seed: int = 0
    """Decides the order of documents and of activations."""

    def __post_init__(self) -> None:
        for name in ("train_tokens", "heldout_tokens", "pair_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)} must not be negative.")
        if not self.train_tokens + self.heldout_tokens + self.pair_tokens:
            raise ConfigError("Nothing to harvest: train_tokens, heldout_tokens and pair_tokens are all 0.")
        if self.batch_contexts < 1:
            raise ConfigError(f"batch_contexts = {self.batch_contexts} must be at least 1.")
        if self.shard_tokens < self.tokens.context_length:
            raise ConfigError(f"shard_tokens = {self.shard_tokens} is less than one context.")
        if self.max_norm_ratio is not None and self.max_norm_ratio <= 1:
            raise ConfigError(f"max_norm_ratio = {self.max_norm_ratio} must be above 1, or None.")

    def wanted(self, split: Split) -> int:
        """Return how many activations of a split are asked for."""
        return {
            Split.PAIRS: self.pair_tokens,
            Split.HELDOUT: self.heldout_tokens,
            Split.TRAIN: self.train_tokens,
        }[split]

    def shard_contexts(self, split: Split) -> int:
        """Return how many contexts a shard of a split is made from."""
        share = _PAIRS_SHARE if split is Split.PAIRS else 1
        return max(1, self.shard_tokens // self.tokens.context_length // share)


class Estimate(NamedTuple):
    """What a harvest will cost."""

    d_model: int
    rows: dict[Split, int]
    size_bytes: dict[Split, int]
    seconds: dict[Split, float]


class Harvest:
    """One request for a store: its address, and how to make it."""

    def __init__(self, config: HarvestConfig, root: Path | None = None) -> None:
        self.config = config
        self.identity: ModelIdentity = identify(config.model)
        self.corpus = Corpus(config.text)
        self.request = self._request()
        made_from = {**self.request, "model": {**self.request["model"], "name": "", "revision": ""}, "source": ""}
        self.path = (root or stores.default_root()) / canonical_hash(made_from)[:16]
        self._tokenizer: Any = None
        self._model: BaseModel | None = None

    def run(self) -> Store:
        """Return the store, harvesting what is missing of it."""
        if stores.is_complete(self.path):
            return Store.open(self.path)
        choose_device(self.config.model.device)  # before any text is tokenised for it
        with stores.lock(self.path):
            if stores.is_complete(self.path):  # another process finished it just before we had the lock
                return Store.open(self.path)
            writer = StoreWriter(self.path, self.request)
            try:
                tokens = self._tokens(writer)
            except DmsaeError:
                if not writer.records:  # the request cannot be met: leave nothing that looks like a store
                    shutil.rmtree(self.path)
                raise
            estimate = self.estimate(tokens)
            missing_bytes, missing_seconds = self._missing(writer, estimate)
            require_space(self.path, missing_bytes, f"The store {self.path.name}")
            n_shards = len(writer.records) - len(Split)
            resumed = f"{n_shards} finished shards are there already, " if n_shards else ""
            console.print(
                f"Store {self.path.name}: {resumed}{human_bytes(missing_bytes)} to write, about "
                f"{human_seconds(missing_seconds)}.",
                soft_wrap=True,
            )
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
            size[split] = rows[split] * _row_bytes(self.config, split, d_model) + tokens[split].numel() * 5
            seconds[split] = tokens[split].numel() * seconds_each
        return Estimate(d_model, rows, size, seconds)

    def dry_run(self) -> Estimate:
        """Return what the harvest would cost, and raise what would stop it; nothing is written."""
        choose_device(self.config.model.device)
        length = self.config.tokens.context_length
        estimate = self.estimate({split: _stack(found, length)["tokens"] for split, found in self.contexts().items()})
        require_space(self.path, sum(estimate.size_bytes.values()), f"The store {self.path.name}")
        return estimate

    def contexts(self) -> dict[Split, list[Context]]:
        """Return the contexts of every split; too small a corpus is an error with counts, before any model runs."""
        taken: dict[Split, list[Context]] = {split: [] for split in Split}
        kept = dict.fromkeys(Split, 0)
        with progress("tokenise", sum(map(self.config.wanted, Split)), "tok") as bar:
            for split, context, count in self.stream():
                taken[split].append(context)
                kept[split] += count
                bar.advance(count)
        if any(kept[split] < self.config.wanted(split) for split in Split):
            raise CorpusError(self._too_small(kept))
        return taken

    def stream(self) -> Iterator[tuple[Split, Context, int]]:
        """Yield contexts with their split and how many rows they give, until every split is full or the text ends.

        Held-out documents fill the held-out split. The others fill the pairs first, then the training split.
        """
        left = {split: self.config.wanted(split) for split in Split}
        mask = KeepMask.of(self.tokenizer)
        packers = {heldout: Packer(self.tokenizer, self.config.tokens) for heldout in (True, False)}

        def assign(heldout: bool, contexts: Iterator[Context]) -> Iterator[tuple[Split, Context, int]]:
            for context in contexts:
                split = next((split for split in _splits_of(heldout) if left[split]), None)
                if split is None:
                    return
                rows = int(countable(split, mask, torch.from_numpy(context.tokens_L)[None]).sum())
                count = min(rows, left[split])
                left[split] -= count
                yield split, context, count

        for documents in _lists(self.corpus.documents(self.config.seed), 512):
            for heldout, packer in packers.items():
                if any(left[split] for split in _splits_of(heldout)):
                    texts = [document.text for document in documents if document.heldout == heldout]
                    yield from assign(heldout, packer.add(texts)) if texts else ()
            if not any(left.values()):
                return
        for heldout, packer in packers.items():
            yield from assign(heldout, packer.flush())

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded when first needed."""
        self._tokenizer = self._tokenizer or load_tokenizer(self.config.model)
        return self._tokenizer

    @property
    def model(self) -> BaseModel:
        """The model, loaded when first needed."""
        self._model = self._model or BaseModel.load(self.config.model, self.identity)
        return self._model

    @property
    def d_model(self) -> int:
        """Width at the hook, found by running the model on one token."""
        return self.model.activations(torch.zeros(1, 2, dtype=torch.int64)).shape[-1]

    def _request(self) -> dict[str, Any]:
        text, own = to_dict(self.config.text), to_dict(self.config)
        shape = ("train_tokens", "heldout_tokens", "pair_tokens", "shard_tokens")
        names = (*shape, "dtype", "gradient_dtype", "max_norm_ratio", "seed")
        return {
            "format": stores.FORMAT,
            "source": self.config.text.source,
            "model": to_dict(self.identity),
            "text": self.corpus.identity
            | {name: text[name] for name in ("txt_documents", "heldout_fraction", "shuffle_chars")},
            "tokens": own["tokens"],
            **{name: own[name] for name in names},
        }

    def _tokens(self, writer: StoreWriter) -> dict[Split, Tensor]:
        """Return each split's tokens, from the store if an earlier run has put them there."""
        if any(token_file(split) not in writer.records for split in Split):
            for split, contexts in self.contexts().items():
                if token_file(split) not in writer.records:
                    writer.add(token_file(split), _stack(contexts, self.config.tokens.context_length), {})
        return {split: stores.read_verified(self.path, writer.records[token_file(split)])["tokens"] for split in Split}

    def _fill(self, writer: StoreWriter, split: Split, tokens_NL: Tensor) -> None:
        """Make the shards of a split that are not there yet; a second thread writes while the model runs."""
        if not len(tokens_NL):
            return
        maker = ShardMaker(self.model, self.config)
        left = self.config.wanted(split)
        pending: Future[FileRecord] | None = None
        with progress(f"harvest {split}", left, "tok") as bar, ThreadPoolExecutor(1) as background:
            for index, block_NL in enumerate(tokens_NL.split(self.config.shard_contexts(split))):
                quota = min(left, int(countable(split, self.model.keep_mask, block_NL).sum()))
                left -= quota
                if shard_file(split, index) in writer.records:
                    bar.skip(quota)
                    continue
                shard, dropped = maker.make(split, block_NL, quota, index, bar.advance)
                if pending is not None:
                    pending.result()
                stored = cast(shard, self.config)
                pending = background.submit(writer.add, shard_file(split, index), stored, dropped)
            if pending is not None:
                pending.result()

    def _missing(self, writer: StoreWriter, estimate: Estimate) -> tuple[int, float]:
        """Return the bytes and seconds of what is not there yet."""
        size_bytes, seconds = 0, 0.0
        for split, rows in estimate.rows.items():
            done = sum(record.rows for record in writer.records.values() if record.file.startswith(f"{split}/"))
            size_bytes += estimate.size_bytes[split] - done * _row_bytes(self.config, split, estimate.d_model)
            seconds += estimate.seconds[split] * (1 - done / rows) if rows else 0
        return size_bytes, seconds

    def _too_small(self, kept: dict[Split, int]) -> str:
        counts = ", ".join(f"{split}: {kept[split]:,} of {self.config.wanted(split):,}" for split in Split)
        return (
            f"The corpus {self.config.text.source!r} is too small for what is asked ({counts}). Ask for fewer tokens, "
            f"move text.heldout_fraction, or give more text. {self._documents_hint()}The model has not been run."
        )

    def _documents_hint(self) -> str:
        if self.config.text.txt_documents == "paragraph" and any(".txt" in path.name for path in self.corpus.files):
            return "In a .txt file blank lines part documents; for one per line set text.txt_documents to 'line'. "
        return ""


class ShardMaker:
    """Runs contexts through the model and keeps the rows that count."""

    def __init__(self, model: BaseModel, config: HarvestConfig) -> None:
        self._model = model
        self._config = config

    def make(
        self, split: Split, tokens_NL: Tensor, quota: int, index: int = 0, advance: Callable[[int], None] | None = None
    ) -> tuple[Shard, dict[str, int]]:
        """Return the first `quota` rows that count, and what was dropped; all but held-out rows are shuffled."""
        mask = self._model.keep_mask
        keep_NL = countable(split, mask, tokens_NL)
        dropped = mask.drop_counts(tokens_NL)
        dropped["no_next_token"] = int((mask(tokens_NL) & ~keep_NL).sum())
        dropped["over_quota"] = int(keep_NL.sum()) - quota
        keep_NL &= keep_NL.flatten().cumsum(0).view_as(keep_NL) <= quota
        parts: list[Shard] = []
        for tokens, keep in zip(
            tokens_NL.split(self._config.batch_contexts), keep_NL.split(self._config.batch_contexts), strict=True
        ):
            parts.append(self._run(split, tokens, keep))
            if advance is not None:
                advance(int(keep.sum()))
        shard = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        context, position = keep_NL.nonzero(as_tuple=True)
        if split is not Split.TRAIN:
            first = index * self._config.shard_contexts(split)
            shard |= {"context": (context + first).to(torch.int32), "position": position.to(torch.int32)}
        return self._select(split, shard, index, dropped), dropped

    def _run(self, split: Split, tokens_NL: Tensor, keep_NL: Tensor) -> Shard:
        keep = keep_NL.to(self._model.device)
        if split is Split.PAIRS:
            found = self._model.gradients(tokens_NL)
            return {"x": found.x_NLD[keep].float().cpu(), "g": found.g_NLD[keep].float().cpu()}
        return {"x": self._model.activations(tokens_NL)[keep].float().cpu()}

    def _select(self, split: Split, shard: Shard, index: int, dropped: dict[str, int]) -> Shard:
        """Leave out norm outliers and, except for held-out rows, shuffle."""
        norms = shard["x"].norm(dim=1)
        if not torch.isfinite(norms).all():
            raise ModelError(
                f"The activations at {self._model.identity.hook!r} are not finite with model.dtype = "
                f"{self._model.identity.dtype}. Use float32 or bfloat16."
            )
        chosen = torch.arange(len(norms))
        if self._config.max_norm_ratio is not None and len(norms):
            chosen = chosen[norms <= self._config.max_norm_ratio * norms.median()]
        dropped["norm_outlier"] = len(norms) - len(chosen)
        if split is not Split.HELDOUT:
            order = torch.randperm(len(chosen), generator=generator(self._config.seed, "rows", split, index))
            chosen = chosen[order]
        return {name: tensor[chosen] for name, tensor in shard.items()}


def countable(split: Split, mask: KeepMask, tokens_NL: Tensor) -> Tensor:
    """Return where a split takes rows from: the keep-mask, and for pairs also a next token to predict."""
    keep = mask(tokens_NL)
    return keep & has_target(tokens_NL) if split is Split.PAIRS else keep


def cast(shard: Shard, config: HarvestConfig) -> Shard:
    """Return a shard in its stored dtypes; a value that does not fit is an error."""
    names: dict[str, DtypeName] = {"x": config.dtype, "g": config.gradient_dtype}
    stored = {name: tensor.to(DTYPES[names[name]]) if name in names else tensor for name, tensor in shard.items()}
    for name, field_name in (("x", "dtype"), ("g", "gradient_dtype")):
        if name in stored and not torch.isfinite(stored[name]).all():
            largest = float(shard[name].abs().max())
            raise StoreError(
                f"{name} does not fit into {names[name]}: its largest value is {largest:.3g}. Set {field_name} to "
                "bfloat16 or float32, or lower max_norm_ratio. What was harvested so far is kept, under its own key."
            )
    return stored


def _row_bytes(config: HarvestConfig, split: Split, d_model: int) -> int:
    size = DTYPES[config.dtype].itemsize * d_model
    if split is Split.PAIRS:
        size += DTYPES[config.gradient_dtype].itemsize * d_model
    return size if split is Split.TRAIN else size + 8


def _stack(contexts: list[Context], length: int) -> Shard:
    tokens = np.stack([c.tokens_L for c in contexts]) if contexts else np.zeros((0, length), np.int32)
    starts = np.stack([c.starts_L for c in contexts]) if contexts else np.zeros((0, length), np.bool_)
    return {"tokens": torch.from_numpy(tokens), "starts": torch.from_numpy(starts)}


def _splits_of(heldout: bool) -> tuple[Split, ...]:
    return (Split.HELDOUT,) if heldout else (Split.PAIRS, Split.TRAIN)


def _lists(documents: Iterable[Document], size: int) -> Iterator[list[Document]]:
    """Yield lists of at most `size` documents."""
    stream = iter(documents)
    while some := list(islice(stream, size)):
        yield some


def harvest(config: HarvestConfig, root: Path | None = None) -> Store:
    """Return the store that `config` describes, harvesting what is missing of it."""
    return Harvest(config, root).run()
