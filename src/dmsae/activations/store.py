"""The activation store: what a model did on a text, on disk, made once and read by everything after.

Layout of `<root>/<key>/`, where the key is a hash of all that the content depends on:

    request.json                what the store is made from
    tokens/<split>.safetensors  tokens [N, L] and document starts [N, L]
    <split>/00000.safetensors   one shard: x [rows, D]; for held-out and pairs also where each row came from
                                (context, position); for pairs also g [rows, D]
    shards.jsonl                one line per finished file: rows, checksum, what was dropped
    store.json                  written last: the store is complete; checksums of the two above and of itself

Every file is verified against its checksum each time it is read.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from dmsae.config import to_dict
from dmsae.disk.files import canonical_hash, exclusive_lock, sha256_of, write_bytes, write_json
from dmsae.errors import StoreCorruptError, StoreError, nearest
from dmsae.progress import progress
from dmsae.text import assets

FORMAT = 2
_REQUEST, _JOURNAL, _COMPLETE, _LOCK = "request.json", "shards.jsonl", "store.json", ".lock"


class Split(StrEnum):
    """The parts of a store, in the order in which they are harvested."""

    PAIRS = "pairs"
    """(x, g) at positions that have a next token: for attribution."""
    HELDOUT = "heldout"
    """x of documents that training never sees, in reading order: for evaluation."""
    TRAIN = "train"
    """x in random order: for training."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One finished file of a store."""

    file: str
    rows: int
    sha256: str
    dropped: dict[str, int]


class Summary(NamedTuple):
    """One store as a line in a list."""

    key: str
    state: Literal["complete", "unfinished", "damaged"]
    model: str
    hook: str
    source: str
    rows: dict[Split, int]
    size_bytes: int


def default_root() -> Path:
    """Return where stores live unless told otherwise."""
    return assets.cache_directory() / "stores"


class StoreWriter:
    """A store in the making: remembers what is finished, and finishes the rest in order."""

    def __init__(self, path: Path, request: dict[str, Any]) -> None:
        self.path = path
        self.request = request
        self.records = {record.file: record for record in _whole(path, _read_journal(path))}
        write_json(path / _REQUEST, request)
        write_bytes(path / _JOURNAL, self._journal())

    def add(self, file: str, tensors: dict[str, Tensor], dropped: dict[str, int]) -> FileRecord:
        """Write one file, then note it in the journal; a crash in between only costs the file."""
        assert file not in self.records, f"{file} is already there"
        rows = next(iter(tensors.values())).shape[0]
        data = safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})
        write_bytes(self.path / file, data)
        record = FileRecord(file, rows, hashlib.sha256(data).hexdigest(), dropped)
        with (self.path / _JOURNAL).open("a", encoding="utf8") as journal:
            journal.write(_line(record))
            journal.flush()
            os.fsync(journal.fileno())
        self.records[file] = record
        return record

    def finish(self, d_model: int) -> "Store":
        """Declare the store complete, its files noted in the order of the splits whatever the order of making."""
        self.records = dict(sorted(self.records.items(), key=lambda item: _place(item[0])))
        write_bytes(self.path / _JOURNAL, self._journal())
        facts = {
            "format": FORMAT,
            "d_model": d_model,
            "journal_sha256": hashlib.sha256(self._journal()).hexdigest(),
            "request_sha256": sha256_of(self.path / _REQUEST),
        }
        write_json(self.path / _COMPLETE, facts | {"facts_sha256": canonical_hash(facts)})
        return Store.open(self.path)

    def _journal(self) -> bytes:
        return "".join(_line(record) for record in self.records.values()).encode()


class Store:
    """A complete store, opened for reading."""

    def __init__(self, path: Path, request: dict[str, Any], facts: dict[str, Any], records: list[FileRecord]) -> None:
        self.path = path
        self.request = request
        self.d_model: int = facts["d_model"]
        self.records = records

    @classmethod
    def open(cls, path: Path) -> "Store":
        """Open a store; one that is missing, incomplete or of another format is an error that says what to do."""
        if not (path / _REQUEST).is_file():
            raise StoreError(f"There is no store at {path}. 'dmsae store list' shows those that exist.")
        if not (path / _COMPLETE).is_file():
            raise StoreError(f"The store {path} is not complete. Run the same 'dmsae harvest' again to finish it.")
        facts = _read_json(path / _COMPLETE)
        if facts.pop("facts_sha256", None) != canonical_hash(facts):
            raise StoreCorruptError(f"{path / _COMPLETE} has changed since it was written. {_remedy(path)}")
        if facts["format"] != FORMAT:
            raise StoreError(f"The store {path} has format {facts['format']}; this version reads {FORMAT}.")
        for name, expected in ((_JOURNAL, facts["journal_sha256"]), (_REQUEST, facts["request_sha256"])):
            if not (path / name).is_file() or sha256_of(path / name) != expected:
                raise StoreCorruptError(f"{path / name} has changed since it was written. {_remedy(path)}")
        return cls(path, _read_json(path / _REQUEST), facts, _read_journal(path))

    @property
    def key(self) -> str:
        """The store's name: a hash of what made it."""
        return self.path.name

    @property
    def model(self) -> dict[str, Any]:
        """The identity of the model whose activations these are."""
        identity: dict[str, Any] = self.request["model"]
        return identity

    def shards(self, split: Split) -> list[FileRecord]:
        """Return the records of a split's shards, in order."""
        return [record for record in self.records if record.file.startswith(f"{split}/")]

    def n_rows(self, split: Split) -> int:
        """Return how many activations a split holds."""
        return sum(record.rows for record in self.shards(split))

    def dropped(self, split: Split) -> dict[str, int]:
        """Return how many positions were left out of a split, by reason."""
        total: dict[str, int] = {}
        for record in self.shards(split):
            for reason, count in record.dropped.items():
                total[reason] = total.get(reason, 0) + count
        return total

    def size_bytes(self) -> int:
        """Return the size of all files on disk."""
        return _directory_bytes(self.path)

    def read(self, record: FileRecord) -> dict[str, Tensor]:
        """Return the tensors of one file, having checked every byte."""
        return read_verified(self.path, record)

    def tokens(self, split: Split) -> dict[str, Tensor]:
        """Return `tokens` [N, L] and document `starts` [N, L] of a split's contexts."""
        return self.read(next(record for record in self.records if record.file == token_file(split)))

    def batches(self, split: Split, batch_size: int) -> Iterator[dict[str, Tensor]]:
        """Yield a split's rows once, in stored order, floats as float32; only the last batch may be smaller."""
        held: dict[str, Tensor] = {}
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
                read_verified(self.path, record)
                yield record, None
            except StoreCorruptError as error:
                yield record, str(error)


def token_file(split: Split) -> str:
    """Return the name of the file that holds a split's tokens."""
    return f"tokens/{split}.safetensors"


def shard_file(split: Split, index: int) -> str:
    """Return the name of a shard."""
    return f"{split}/{index:05d}.safetensors"


def read_verified(store: Path, record: FileRecord) -> dict[str, Tensor]:
    """Return the tensors of a store's file, or raise an error that names it when any byte has changed."""
    path = store / record.file
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreCorruptError(f"{path} cannot be read: {error.strerror}. {_remedy(store)}") from error
    if hashlib.sha256(data).hexdigest() != record.sha256:
        raise StoreCorruptError(f"{path} is damaged: its checksum is not the one written. {_remedy(store)}")
    return safetensors.torch.load(data)


def is_complete(path: Path) -> bool:
    """Return whether a store has been finished."""
    return (path / _COMPLETE).is_file()


def lock(path: Path) -> Any:
    """Return a context that keeps other processes from writing the store."""
    return exclusive_lock(path / _LOCK, f"The store {path.name}")


def list_stores(root: Path) -> list[Summary]:
    """Return the stores under a root, finished or not; a damaged one is listed as such."""
    return [_summary(path) for path in _paths(root)]


def _summary(path: Path) -> Summary:
    rows = dict.fromkeys(Split, 0)
    size = _directory_bytes(path)
    try:
        complete = is_complete(path)
        store = Store.open(path) if complete else None
        request = store.request if store else _read_json(path / _REQUEST)
        for record in store.records if store else _read_journal(path):
            head = record.file.split("/")[0]
            if head != "tokens":
                rows[Split(head)] += record.rows
        names = (request["model"]["name"], request["model"]["hook"], request["source"])
    except (StoreError, KeyError, ValueError):
        return Summary(path.name, "damaged", "", "", "", dict.fromkeys(Split, 0), size)
    return Summary(path.name, "complete" if complete else "unfinished", *names, rows, size)


def _paths(root: Path) -> list[Path]:
    return sorted(request.parent for request in root.glob(f"*/{_REQUEST}"))


def find_store(root: Path, key: str) -> Path:
    """Return the path of the one store whose key begins with `key`."""
    known = [path.name for path in _paths(root)]
    matches = [name for name in known if name.startswith(key)]
    if len(matches) == 1:
        return root / matches[0]
    if matches:
        raise StoreError(f"{key!r} could be {' or '.join(matches)}: give more letters.")
    raise StoreError(f"No store under {root} has a key that begins with {key!r}. {nearest(key, known)}")


def remove_store(path: Path) -> None:
    """Remove a store that nobody is writing; a half-removed one never looks complete, nor its shards finished."""
    with lock(path):
        for name in (_COMPLETE, _JOURNAL):
            (path / name).unlink(missing_ok=True)
        shutil.rmtree(path)


def _line(record: FileRecord) -> str:
    return json.dumps(to_dict(record)) + "\n"


def _read_journal(path: Path) -> list[FileRecord]:
    """Return the finished files; a last line that a crash cut short counts for nothing."""
    if not (path / _JOURNAL).is_file():
        return []
    try:
        lines = (path / _JOURNAL).read_text(encoding="utf8").split("\n")[:-1]
        return [FileRecord(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise StoreCorruptError(f"{path / _JOURNAL} is damaged: {error}. {_remedy(path)}") from error


def _whole(path: Path, records: list[FileRecord]) -> list[FileRecord]:
    """Return the finished files that are still as they were written: the others are to be made again."""
    found = []
    with progress("check what is there", len(records), "files") as bar:
        for record in records:
            file = path / record.file
            if file.is_file() and sha256_of(file) == record.sha256:
                found.append(record)
            bar.advance(1)
    return found


def _place(file: str) -> tuple[bool, int, str]:
    """Return what files are sorted by: tokens first, then the splits in their order, shard by shard."""
    head, name = file.split("/")
    is_shard = head != "tokens"
    split = Split(head if is_shard else name.removesuffix(".safetensors"))
    return is_shard, list(Split).index(split), name


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf8"))
    except ValueError as error:
        raise StoreCorruptError(f"{path} is not readable JSON: {error}. {_remedy(path.parent)}") from error
    return value


def _remedy(store: Path) -> str:
    return f"Run 'dmsae store remove {store.name} --root {store.parent}' and harvest again."


def _directory_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
