"""The activation store: what a model did on a text, on disk, made once and read by everything after.

Layout of `<root>/<key>/`, where the key is a hash of all that the content depends on:

    request.json                what the store is made from
    tokens/<split>.safetensors  tokens [N, L] and document starts [N, L]
    <split>/00000.safetensors   one shard: x [rows, D]; for held-out and pairs also where each row came from
                                (context, position); for pairs also g [rows, D]
    shards.jsonl                one line per finished file: rows, SHA-256, what was dropped, documents, and a checksum
                                of the line
    store.json                  written last: the store is complete; checksums of the two above and of itself

Every file is verified against its checksum each time it is read. A store of imported activations holds no contexts,
and does not say where a row came from.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from dmsae.activations.catalog import find_store, store_bytes
from dmsae.activations.contexts import Contexts, counted_losses
from dmsae.activations.identity import ModelIdentity
from dmsae.activations.journal import (
    FileRecord,
    in_order,
    journal_bytes,
    journal_line,
    read_journal,
    read_seal,
    recover_journal,
    remedy,
    unchanged,
    write_seal,
)
from dmsae.activations.request import HarvestRequest, StoreRequest, read_request
from dmsae.activations.splits import Split
from dmsae.config import Json, to_dict
from dmsae.disk import layout
from dmsae.disk.files import append_text, write_bytes, write_json, write_tensors
from dmsae.errors import StoreCorruptError, StoreError
from dmsae.progress import SILENT, Progress
from dmsae.text.tokens import KeepMask

Shard = dict[str, Tensor]
"""Tensors with one row per activation: `x`, and for some splits `g`, `context` and `position`."""


class StoreWriter:
    """A store in the making: remembers which files are finished, and adds the others."""

    def __init__(self, path: Path, request: StoreRequest, progress: Progress = SILENT) -> None:
        self.path = path
        self.records = {record.file: record for record in unchanged(path, recover_journal(path, progress), progress)}
        write_json(path / layout.STORE_REQUEST, to_dict(request))
        write_bytes(path / layout.STORE_JOURNAL, journal_bytes(self.records.values()))

    def add(self, file: str, tensors: Shard, dropped: dict[str, int]) -> FileRecord:
        """Write one file, then note it in the journal; a crash in between loses only this file."""
        assert file not in self.records, f"{file} exists already"
        record = write_file(self.path, file, tensors, dropped)
        self.note(record)
        return record

    def note(self, record: FileRecord) -> None:
        """Note a file that has been written in the journal."""
        append_text(self.path / layout.STORE_JOURNAL, journal_line(record), sync=True)
        self.records[record.file] = record

    def move(self, path: Path, request: StoreRequest) -> None:
        """Move the store to another place, as made from another request."""
        write_json(self.path / layout.STORE_REQUEST, to_dict(request))
        self.path.rename(path)
        self.path = path

    def finish(self, d_model: int, probe: Json | None = None) -> "Store":
        """Declare the store complete; its journal lists files in the same order, whatever the order of making."""
        write_bytes(self.path / layout.STORE_JOURNAL, journal_bytes(in_order(self.records.values())))
        write_seal(self.path, d_model, probe)
        return Store.open(self.path)


def write_file(store: Path, file: str, tensors: Shard, dropped: dict[str, int]) -> FileRecord:
    """Write one file of a store, and return what its journal should say of it."""
    rows = next(iter(tensors.values())).shape[0]
    documents = int(tensors["starts"].sum()) if "starts" in tensors else 0
    return FileRecord(file, rows, write_tensors(store / file, tensors), dropped, documents)


class Store:
    """A complete store, opened for reading.

    >>> from dmsae.activations.splits import Split
    >>> store.n_rows(Split.TRAIN)
    4096
    >>> next(store.batches(Split.HELDOUT, 64))["x"].shape
    torch.Size([64, 16])
    """

    def __init__(
        self, path: Path, request: StoreRequest, d_model: int, records: list[FileRecord], probe: Json | None = None
    ) -> None:
        self.path = path
        self.request = request
        self.d_model = d_model
        self.records = records
        self.probe = probe

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to another process as what it takes to open the store there."""
        return Store.open, (self.path.absolute(),)

    @classmethod
    def open(cls, path: Path) -> "Store":
        """Open a store; one that is missing, incomplete or of another format is an error that says what to do."""
        seal = read_seal(path)
        return cls(path, read_request(path), seal.d_model, read_journal(path), seal.probe)

    @property
    def key(self) -> str:
        """The store's name: a hash of what made it."""
        return self.path.name

    @property
    def root(self) -> Path:
        """The directory of stores that holds this one."""
        return self.path.parent

    @property
    def model(self) -> ModelIdentity:
        """The model and hook that the activations come from."""
        return self.request.model

    @property
    def has_text(self) -> bool:
        """Whether the store holds the text of its activations. Imported activations come without."""
        return any(record.rows for record in self.records if record.file.startswith(f"{layout.TOKENS}/"))

    def require_text(self) -> None:
        """Raise unless the store holds the text of its activations."""
        if not self.has_text:
            raise StoreError(
                f"The store {self.key} holds activations without their text, because they were imported. What reads "
                "text or runs the model on it needs a store made by 'dmsae harvest'."
            )

    def shards(self, split: Split) -> list[FileRecord]:
        """Return the records of a split's shards, in order."""
        return [record for record in self.records if record.file.startswith(f"{split}/")]

    def n_rows(self, split: Split) -> int:
        """Return how many activations a split holds."""
        return sum(record.rows for record in self.shards(split))

    def n_documents(self, split: Split) -> int:
        """Return from how many documents a split's contexts come; 0 when the activations were imported."""
        return sum(record.documents for record in self.records if record.file == layout.token_file(split))

    def dropped(self, split: Split) -> dict[str, int]:
        """Return how many positions were left out of a split, by reason."""
        total: dict[str, int] = {}
        for record in self.shards(split):
            for reason, count in record.dropped.items():
                total[reason] = total.get(reason, 0) + count
        return total

    def size_bytes(self) -> int:
        """Return the size of all files on disk."""
        return store_bytes(self.path)

    def read(self, record: FileRecord) -> Shard:
        """Return the tensors of one file, having checked every byte."""
        return read_verified(self.path, record)

    def tokens(self, split: Split) -> dict[str, Tensor]:
        """Return `tokens` [N, L] and document `starts` [N, L] of a split's contexts."""
        self.require_text()
        return self.read(next(record for record in self.records if record.file == layout.token_file(split)))

    def counted_losses(self, split: Split, mask: KeepMask) -> Tensor:
        """Return a boolean [N, L] for a split's contexts: which next-token losses are in the sum that makes g."""
        skips = isinstance(self.request, HarvestRequest) and self.request.skip_boundary_targets
        return counted_losses(skips, mask, Contexts.stored(self.tokens(split)))

    def first_token(self) -> int | None:
        """Return the token that every context starts with, such as a BOS token; None when they differ."""
        first = torch.cat([self.tokens(split)["tokens"][:, 0] for split in Split]).unique()
        return int(first) if len(first) == 1 else None

    def heldout(self) -> Tensor:
        """Return all held-out activations [n, D] at once, in float32."""
        parts = [batch["x"] for batch in self.batches(Split.HELDOUT, 65_536)]
        return torch.cat(parts) if parts else torch.zeros(0, self.d_model)

    def batches(self, split: Split, batch_size: int) -> Iterator[Shard]:
        """Yield a split's rows once, in stored order, floats as float32; only the last batch may be smaller."""
        held: Shard = {}
        n_held = 0
        shards = self.shards(split)
        for record in shards:
            tensors = self.read(record)
            held = {name: torch.cat([held[name], tensor]) for name, tensor in tensors.items()} if n_held else tensors
            n_held += record.rows
            n_ready = n_held if record is shards[-1] else n_held - n_held % batch_size
            for start in range(0, n_ready, batch_size):
                rows = {name: tensor[start : min(start + batch_size, n_ready)] for name, tensor in held.items()}
                yield {name: row.float() if row.is_floating_point() else row for name, row in rows.items()}
            held = {name: tensor[n_ready:] for name, tensor in held.items()}
            n_held -= n_ready

    def verify(self) -> Iterator[tuple[FileRecord, str | None]]:
        """Check every file; yield each with what is wrong with it, or None."""
        for record in self.records:
            try:
                self.read(record)
                yield record, None
            except StoreCorruptError as error:
                yield record, str(error)


def open_store(key: str | Path, root: Path | str | None = None) -> Store:
    """Open a store by its path, or by its key or the first letters of it under a root.

    >>> dmsae.open_store(store.path).key == store.key
    True
    """
    path = Path(key)
    return Store.open(path if path.is_dir() else find_store(str(key), root))


def read_verified(store: Path, record: FileRecord) -> Shard:
    """Return the tensors of a store's file, or raise an error that names it when any byte has changed."""
    path = store / record.file
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreCorruptError(f"{path} cannot be read: {error.strerror}. {remedy(store)}") from error
    if hashlib.sha256(data).hexdigest() != record.sha256:
        raise StoreCorruptError(f"{path} is damaged: its checksum is not the one written. {remedy(store)}")
    return safetensors.torch.load(data)
