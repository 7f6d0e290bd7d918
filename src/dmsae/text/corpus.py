"""The first stage: files, bundled corpora and Hub datasets become one stream of documents.

Exact duplicates are dropped. A hash of its own text gives each document its place between 0 and 1, which decides what
it is used for: that does not depend on the order. The order is shuffled with a seed.
"""

import dataclasses
import hashlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple, Protocol, get_args

from dmsae.config import Json, require, require_whole, to_dict
from dmsae.disk.files import canonical_hash, sha256_of, user_path
from dmsae.errors import CorpusError, first_line, nearest
from dmsae.progress import SILENT, Progress
from dmsae.seeds import derive_seed
from dmsae.text import assets
from dmsae.text.hub import dataset_commit
from dmsae.text.readers import (
    DOCUMENT_CHARS,
    KINDS,
    TxtDocuments,
    is_compressed,
    kind_of,
    read_documents,
    require_kind,
    text_of,
)

_HUB = "hub:"


@dataclass(frozen=True, slots=True)
class HubText:
    """Which part of a Hub dataset to read. Only used when `source` is `hub:owner/name`."""

    subset: str = ""
    """The dataset's configuration, if it has several."""
    split: str = "train"
    """The dataset's split."""
    revision: str = ""
    """Branch, tag or commit. Empty: the default branch. The commit it points to is recorded."""


@dataclass(frozen=True, slots=True)
class TextConfig:
    """Where the text comes from and how it is split."""

    source: str = "probes"
    """A bundled corpus (see `dmsae assets list`), a local file, directory or glob (.txt, .jsonl, .csv, .parquet; plain,
    .gz or .zst), or a Hub dataset as `hub:owner/name`."""
    field: str = ""
    """The column or key that holds the text. Empty: `text`, or the text column of a bundled corpus."""
    txt_documents: TxtDocuments = "paragraph"
    """What one document is in a .txt file: text between blank lines, one line, or the whole file."""
    exclude: tuple[str, ...] = ()
    """Globs of file names to leave out, together with every document that also appears in those files. A bundled corpus
    adds its own: the tables reserved for probing."""
    hub: HubText = dataclasses.field(default_factory=HubText)
    heldout_fraction: float = 0.05
    """Share of documents that are kept for evaluation: never trained on, never attributed to."""
    pairs_fraction: float = 0.05
    """Share of documents that are kept for attribution: never trained on, never evaluated on."""
    shuffle_chars: int = 256_000_000
    """Size of the shuffle buffer, in characters. A corpus that fits is shuffled whole."""
    max_document_chars: int = DOCUMENT_CHARS
    """Longer documents are cut into several: one document at a time is held in memory."""

    def __post_init__(self) -> None:
        require(bool(self.source.strip()), "text.source", self.source, "name a corpus, a file, a directory or a glob")
        units = get_args(TxtDocuments)
        require(self.txt_documents in units, "text.txt_documents", self.txt_documents, f"be one of {', '.join(units)}")
        for name in ("heldout_fraction", "pairs_fraction"):
            require(0 < getattr(self, name) < 1, f"text.{name}", getattr(self, name), "lie between 0 and 1")
        both = self.heldout_fraction + self.pairs_fraction
        name = "text.heldout_fraction + text.pairs_fraction"
        require(both < 1, name, both, "be below 1: the rest is trained on")
        require_whole("text.shuffle_chars", self.shuffle_chars, 1)
        require_whole("text.max_document_chars", self.max_document_chars, 1000)

    def cut_facts(self) -> Json:
        """Return how documents are cut, when it is not as by default: then the text is another one."""
        is_default = self.max_document_chars == DOCUMENT_CHARS
        return {} if is_default else {"max_document_chars": self.max_document_chars}


class Document(NamedTuple):
    """A text, and its place among all texts."""

    text: str
    place: float
    """A number in [0, 1) that depends on the text alone, and is spread evenly over texts."""


class Corpus(Protocol):
    """A source of text that has been located and identified."""

    @property
    def source(self) -> str:
        """The source as the user wrote it."""

    @property
    def identity(self) -> Json:
        """What the documents depend on, for provenance. Paths and file names are no part of it."""

    def documents(self, seed: int) -> Iterator[Document]:
        """Yield every distinct document once, in an order that depends only on the seed."""

    def hint_if_too_small(self) -> str:
        """Return what might make this corpus yield more documents, as a sentence; "" if nothing is known."""


def open_corpus(config: TextConfig, progress: Progress = SILENT) -> Corpus:
    """Return the corpus that a config names. A bundled one is fetched if it is missing."""
    if config.source.startswith(_HUB):
        return HubCorpus(config)
    return FileCorpus(config, progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileIdentity:
    """What the documents of files depend on."""

    kind: str = "files"
    field: str
    files: str
    """Hash of the content of the files that are read."""
    excluded: str
    """Hash of the content of the files whose documents are left out."""


class FileCorpus:
    """Text from files: the user's own, or those of a bundled corpus."""

    def __init__(self, config: TextConfig, progress: Progress = SILENT) -> None:
        self.source = config.source
        self.field = config.field or "text"
        exclude = config.exclude
        if config.source in assets.ASSETS:
            asset = assets.find(config.source)
            require(asset.kind == "corpus", "text.source", config.source, "be a corpus", f"It is a {asset.kind}.")
            files = _files_below(assets.fetch_whole(config.source, progress))
            self.field = config.field or asset.text_field
            exclude += asset.reserved
        else:
            files = _find_files(config.source)
        self.files = [path for path in files if not any(fnmatch(path.name, pattern) for pattern in exclude)]
        self.excluded = [path for path in files if path not in self.files]
        require(bool(self.files), "text.exclude", exclude, f"leave at least one file of {config.source!r}")
        self.identity: Json = to_dict(
            FileIdentity(field=self.field, files=_content_hash(self.files), excluded=_content_hash(self.excluded))
        )
        self.identity |= config.cut_facts()
        self._config, self._progress = config, progress

    def documents(self, seed: int) -> Iterator[Document]:
        """Yield every distinct document once, in an order that depends only on the seed."""
        excluded = {digest for path in self.excluded for digest in map(_digest, self._read(path, may_be_empty=True))}
        return _distinct_and_shuffled(self._texts(), excluded, self._config, seed)

    def _texts(self) -> Iterator[str]:
        """Yield the text of all files, and report how much there was: a count can show what an error does not."""
        n_texts = n_files = 0
        for path in self.files:
            for text in self._read(path):
                n_texts += 1
                yield text
            n_files += 1
        self._progress.note(f"Read {n_texts:,} documents from {n_files:,} files of {self.source!r}.")

    def hint_if_too_small(self) -> str:
        """Return how .txt files were cut into documents, if there are any."""
        if self._config.txt_documents == "paragraph" and any(kind_of(path) == ".txt" for path in self.files):
            return (
                "In a .txt file, blank lines separate documents; to read one document per line, set "
                "text.txt_documents to 'line'."
            )
        return ""

    def _read(self, path: Path, may_be_empty: bool = False) -> Iterator[str]:
        config = self._config
        return read_documents(path, self.field, config.txt_documents, may_be_empty, config.max_document_chars)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubIdentity:
    """What the documents of a Hub dataset depend on."""

    kind: str = "hub"
    field: str
    dataset: str
    subset: str
    split: str
    revision: str | None
    """The commit."""


class HubCorpus:
    """Text streamed from a dataset on the Hugging Face Hub."""

    def __init__(self, config: TextConfig) -> None:
        self.source = config.source
        name = config.source.removeprefix(_HUB)
        self._config = config
        self._dataset = HubIdentity(
            field=config.field or "text",
            dataset=name,
            subset=config.hub.subset,
            split=config.hub.split,
            revision=dataset_commit(name, config.hub.revision),
        )
        self.identity: Json = to_dict(self._dataset) | config.cut_facts()

    def documents(self, seed: int) -> Iterator[Document]:
        """Yield every distinct document once, in an order that depends only on the seed."""
        return _distinct_and_shuffled(self._texts(), set(), self._config, seed)

    def hint_if_too_small(self) -> str:
        """Return nothing: rows are documents."""
        return ""

    def _texts(self) -> Iterator[str]:
        field = self._dataset.field
        try:
            for row in self._rows():
                if field not in row:
                    raise CorpusError(f"{self.source} has no column {field!r}. {nearest(field, row)} Set text.field.")
                text, limit = text_of(row[field], self.source, field), self._config.max_document_chars
                yield from (text[at : at + limit] for at in range(0, len(text), limit))
        except CorpusError:
            raise
        except Exception as error:  # what a broken connection raises depends on the HTTP client in use
            raise CorpusError(
                f"The Hub dataset {self.source!r} cannot be read: {first_line(error)}. Check text.hub.subset, "
                "text.hub.split and the network, and run the same command again."
            ) from error

    def _rows(self) -> Iterable[dict[str, Any]]:
        import datasets

        rows: Iterable[dict[str, Any]] = datasets.load_dataset(
            self._dataset.dataset,
            self._dataset.subset or None,
            split=self._dataset.split,
            revision=self._dataset.revision,
            streaming=True,
        )
        return rows


def _files_below(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and kind_of(path))


def _find_files(source: str) -> list[Path]:
    """Return the files that a path or glob names, in order. A file named explicitly must be of a known kind."""
    path = user_path(source)
    files: list[Path] = []
    if path.is_dir():
        files = _files_below(path)
    elif path.is_file():
        files = [path]
    elif any(letter in source for letter in "*?["):
        anchor = Path(path.anchor or ".")
        files = sorted(file for file in anchor.glob(str(path.relative_to(path.anchor))) if file.is_file())
    if not files:
        corpora = [asset.name for asset in assets.ASSETS.values() if asset.kind == "corpus"]
        raise CorpusError(
            f"text.source = {source!r}; it must be a bundled corpus ({', '.join(corpora)}), an existing file, "
            f"directory or glob of {', '.join(KINDS)} files, or a Hub dataset written as hub:owner/name."
        )
    for file in files:
        require_kind(file)
    return files


def _content_hash(files: list[Path]) -> str:
    """Return a hash of what the files hold and how they are read. Their names do not matter."""
    try:
        return canonical_hash([[kind_of(path), is_compressed(path), sha256_of(path)] for path in files])
    except OSError as error:
        raise CorpusError(f"{error.filename} cannot be read: {error.strerror}. Check text.source.") from error


def _distinct_and_shuffled(
    texts: Iterable[str], excluded: set[bytes], config: TextConfig, seed: int
) -> Iterator[Document]:
    return _shuffled(_distinct(texts, excluded), config.shuffle_chars, seed)


def _distinct(texts: Iterable[str], seen: set[bytes]) -> Iterator[Document]:
    """Yield each text that is new and not blank, with its place. `seen` grows."""
    for text in texts:
        digest = _digest(text)
        if text.strip() and digest not in seen:
            seen.add(digest)
            yield Document(text, place=(int.from_bytes(digest[:8], "big") >> 11) / 2**53)


def _shuffled(documents: Iterable[Document], buffer_chars: int, seed: int) -> Iterator[Document]:
    """Shuffle a stream within a bounded buffer."""
    choose = random.Random(derive_seed(seed, "documents"))
    buffer: list[Document] = []
    held_chars = 0
    for document in documents:
        buffer.append(document)
        held_chars += len(document.text)
        while held_chars > buffer_chars:
            chosen = choose.randrange(len(buffer))
            buffer[chosen], buffer[-1] = buffer[-1], buffer[chosen]
            released = buffer.pop()
            held_chars -= len(released.text)
            yield released
    choose.shuffle(buffer)
    yield from buffer


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
