"""The first room: files, Hub datasets and the bundled corpus become one stream of documents.

Exact duplicates are dropped, each document goes to the training or the held-out side by a hash of its own text (so that
the split never depends on order), and the order is shuffled with a seed.
"""

import csv
import hashlib
import io
import json
import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from dmsae.disk.files import canonical_hash, sha256_of
from dmsae.errors import ConfigError, CorpusError, nearest
from dmsae.seeds import derive_seed
from dmsae.text import assets

_SUFFIXES = (".txt", ".jsonl", ".csv", ".parquet")
_COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
csv.field_size_limit(1 << 30)


@dataclass(frozen=True, slots=True)
class TextConfig:
    """Where the text comes from and how it is split."""

    source: str = "probes"
    """A bundled corpus (see `dmsae assets list`), a local file, directory or glob (.txt, .jsonl, .csv, .parquet; plain,
    .gz or .zst), or a Hub dataset as `hub:owner/name`."""
    field: str = ""
    """The column or key that holds the text. Empty: `text`, or what a bundled corpus names."""
    txt_documents: Literal["paragraph", "line", "file"] = "paragraph"
    """What one document is in a .txt file: text between blank lines, one line, or the whole file."""
    exclude: tuple[str, ...] = ()
    """Globs of file names to keep out, with every document that also appears in them. A bundled corpus adds a list of
    its own: the tables reserved for probing."""
    hub_subset: str = ""
    """Of a Hub dataset: the configuration name."""
    hub_split: str = "train"
    """Of a Hub dataset: the split."""
    hub_revision: str = ""
    """Of a Hub dataset: branch, tag or commit. Empty: the default branch, resolved to its commit."""
    heldout_fraction: float = 0.05
    """Share of documents that never enter training."""
    shuffle_chars: int = 256_000_000
    """Size of the buffer, in characters, within which documents are shuffled. A corpus that fits is shuffled whole."""

    def __post_init__(self) -> None:
        if not 0 < self.heldout_fraction < 1:
            raise ConfigError(f"text.heldout_fraction = {self.heldout_fraction} must lie between 0 and 1.")
        if self.shuffle_chars < 1:
            raise ConfigError(f"text.shuffle_chars = {self.shuffle_chars} must be at least 1.")


class Document(NamedTuple):
    """A text and the side of the split that it is on."""

    text: str
    heldout: bool


class Corpus:
    """A resolved source: what it is (for provenance) and its documents."""

    def __init__(self, config: TextConfig) -> None:
        self.config = config
        self.field = config.field or "text"
        self.files: list[Path] = []
        self.excluded: list[Path] = []
        if config.source.startswith("hub:"):
            self.identity = self._resolve_hub(config.source.removeprefix("hub:"))
        else:
            self.identity = self._resolve_files()

    def documents(self, seed: int) -> Iterator[Document]:
        """Yield every distinct document once, in an order that depends on the seed alone."""
        seen: set[bytes] = set()
        for path in self.excluded:
            found = read_documents(path, self.field, self.config.txt_documents, may_be_empty=True)
            seen.update(_digest(text) for text in found)
        return _shuffled(self._distinct(seen), self.config.shuffle_chars, seed)

    def _distinct(self, seen: set[bytes]) -> Iterator[Document]:
        limit = int(self.config.heldout_fraction * 2**64)
        for text in self._read_all():
            digest = _digest(text)
            if text.strip() and digest not in seen:
                seen.add(digest)
                yield Document(text, heldout=int.from_bytes(digest[:8], "big") < limit)

    def _read_all(self) -> Iterator[str]:
        if self.files:
            for path in self.files:
                yield from read_documents(path, self.field, self.config.txt_documents)
            return
        try:
            for row in self._open_hub():
                if self.field not in row:
                    raise CorpusError(
                        f"{self.config.source} has no column {self.field!r}. {nearest(self.field, row)} Set text.field."
                    )
                yield _as_text(row[self.field], self.config.source, self.field)
        except CorpusError:
            raise
        except Exception as error:  # what a broken connection raises depends on the HTTP client of the day
            raise CorpusError(
                f"The Hub dataset {self.config.source!r} cannot be read: {_first_line(error)}. Check text.hub_subset, "
                "text.hub_split and the network, and run the same command again."
            ) from error

    def _resolve_files(self) -> dict[str, Any]:
        source = self.config.source
        exclude = self.config.exclude
        if source in assets.ASSETS:
            asset = assets.find(source)
            if asset.kind != "corpus":
                raise ConfigError(f"text.source = {source!r} is a {asset.kind}, not a corpus. Try 'probes'.")
            found = sorted(path for path in assets.fetch_whole(source).iterdir() if _kind(path))
            self.field = self.config.field or asset.text_field
            exclude += asset.reserved
        else:
            found = _find_files(source)
        self.files = [path for path in found if not any(fnmatch(path.name, pattern) for pattern in exclude)]
        self.excluded = [path for path in found if path not in self.files]
        if not self.files:
            raise CorpusError(f"text.exclude = {list(exclude)} leaves no file of {source!r}.")
        return {
            "kind": "files",
            "field": self.field,
            "files": _content_hash(self.files),
            "excluded": _content_hash(self.excluded),
        }

    def _resolve_hub(self, name: str) -> dict[str, Any]:
        from huggingface_hub import HfApi

        try:
            info = HfApi().dataset_info(name, revision=self.config.hub_revision or None)
        except Exception as error:  # what an unreachable host raises depends on the HTTP client of the day
            raise CorpusError(
                f"The Hub dataset {name!r} cannot be reached: {_first_line(error)}. Check the name and the network, or "
                "give a local file as text.source."
            ) from error
        return {
            "kind": "hub",
            "field": self.field,
            "dataset": name,
            "subset": self.config.hub_subset,
            "split": self.config.hub_split,
            "revision": info.sha,
        }

    def _open_hub(self) -> Iterable[dict[str, Any]]:
        import datasets

        rows: Iterable[dict[str, Any]] = datasets.load_dataset(
            self.identity["dataset"],
            self.identity["subset"] or None,
            split=self.identity["split"],
            revision=self.identity["revision"],
            streaming=True,
        )
        return rows


def read_documents(
    path: Path, field: str, txt_documents: str = "paragraph", may_be_empty: bool = False
) -> Iterator[str]:
    """Yield the documents of one file; a file that cannot be read, or holds none, is an error that names it."""
    readers = {".jsonl": _read_jsonl, ".csv": _read_csv, ".parquet": _read_parquet}
    kind = _kind(path)
    if kind is None:
        raise CorpusError(f"{path} is of no known kind; expected {', '.join(_SUFFIXES)}, plain or with .gz or .zst.")
    empty = True
    try:
        for text in _read_txt(path, txt_documents) if kind == ".txt" else readers[kind](path, field):
            empty = empty and not text.strip()
            yield text
    except (OSError, UnicodeDecodeError, pa.ArrowException, csv.Error) as error:
        raise CorpusError(f"{path} cannot be read as {kind}: {_first_line(error)}.") from error
    if empty and not may_be_empty:
        raise CorpusError(f"{path} holds no text. Remove it from text.source, or exclude it with text.exclude.")


def _content_hash(files: list[Path]) -> str:
    """Return a hash of what the files hold and as what they are read; their names do not count."""
    try:
        return canonical_hash([[_kind(path), path.suffix.lower() in _COMPRESSION, sha256_of(path)] for path in files])
    except OSError as error:
        raise CorpusError(f"{error.filename} cannot be read: {error.strerror}. Check text.source.") from error


def _find_files(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.is_file() and _kind(file))
    elif path.is_file():
        found = [path]
    elif any(letter in source for letter in "*?["):
        anchor = Path(path.anchor or ".")
        found = sorted(file for file in anchor.glob(str(path.relative_to(path.anchor))) if file.is_file())
    else:
        found = []
    if not found:
        corpora = [asset.name for asset in assets.ASSETS.values() if asset.kind == "corpus"]
        raise CorpusError(
            f"text.source = {source!r} is no bundled corpus ({', '.join(corpora)}) and no readable file, directory or "
            f"glob of {', '.join(_SUFFIXES)} files. A Hub dataset is written hub:owner/name."
        )
    return found


def _kind(path: Path) -> str | None:
    name = path.name.lower()
    for suffix in _COMPRESSION:
        name = name.removesuffix(suffix)
    return next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), None)


def _open(path: Path, newline: str | None = None) -> io.TextIOWrapper:
    compression = _COMPRESSION.get(path.suffix.lower())
    stream = pa.input_stream(os.fspath(path), compression=compression)
    return io.TextIOWrapper(stream, encoding="utf-8-sig", newline=newline)  # with or without a byte order mark


def _read_txt(path: Path, documents: str) -> Iterator[str]:
    with _open(path) as file:
        if documents == "file":
            yield file.read()
        elif documents == "line":
            yield from (line.rstrip("\n") for line in file)
        else:
            paragraph: list[str] = []
            for line in file:
                if line.strip():
                    paragraph.append(line)
                elif paragraph:
                    yield "".join(paragraph).rstrip("\n")
                    paragraph = []
            if paragraph:
                yield "".join(paragraph).rstrip("\n")


def _read_jsonl(path: Path, field: str) -> Iterator[str]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                reason = error.msg if isinstance(error, json.JSONDecodeError) else _first_line(error)
                raise CorpusError(f"{path}, line {number} is not JSON: {reason}.") from error
            if not isinstance(record, dict):
                raise CorpusError(f"{path}, line {number} holds a {type(record).__name__}; expected an object.")
            if field not in record:
                raise CorpusError(
                    f"{path}, line {number} has no text under {field!r}. {nearest(field, record)} Set text.field."
                )
            yield _as_text(record[field], f"{path}, line {number}", field)


def _read_csv(path: Path, field: str) -> Iterator[str]:
    with _open(path, newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames is None:
            return  # an empty file
        if field not in reader.fieldnames:
            raise CorpusError(f"{path} has no column {field!r}. {nearest(field, reader.fieldnames)} Set text.field.")
        for row in reader:
            yield row[field] or ""


def _read_parquet(path: Path, field: str) -> Iterator[str]:
    source: Any = path
    if compression := _COMPRESSION.get(path.suffix.lower()):
        source = pa.BufferReader(pa.input_stream(os.fspath(path), compression=compression).read())
    table = pq.ParquetFile(source)
    if field not in table.schema_arrow.names:
        raise CorpusError(f"{path} has no column {field!r}. {nearest(field, table.schema_arrow.names)} Set text.field.")
    for batch in table.iter_batches(batch_size=1024, columns=[field]):
        for value in batch.column(0):
            yield _as_text(value.as_py(), path, field)


def _as_text(value: Any, source: Path | str, field: str) -> str:
    """Return a cell as text that can be encoded: nothing for null, a replacement mark for half a surrogate pair."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise CorpusError(f"{source} holds {type(value).__name__} under {field!r}, expected text. Set text.field.")
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _shuffled(documents: Iterable[Document], buffer_chars: int, seed: int) -> Iterator[Document]:
    """Shuffle a stream within a bounded buffer."""
    choose = random.Random(derive_seed(seed, "documents"))
    buffer: list[Document] = []
    held = 0
    for document in documents:
        buffer.append(document)
        held += len(document.text)
        while held > buffer_chars:
            chosen = choose.randrange(len(buffer))
            buffer[chosen], buffer[-1] = buffer[-1], buffer[chosen]
            out = buffer.pop()
            held -= len(out.text)
            yield out
    choose.shuffle(buffer)
    yield from buffer


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
