"""One file of text becomes documents: .txt, .jsonl, .csv or .parquet, plain or compressed.

pyarrow decompresses and reads Parquet. It is imported when a file is opened, because this module is also imported by
commands that read no text.
"""

import csv
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from dmsae.errors import CorpusError, first_line, nearest

Kind = Literal[".txt", ".jsonl", ".csv", ".parquet"]
KINDS: tuple[Kind, ...] = (".txt", ".jsonl", ".csv", ".parquet")
TxtDocuments = Literal["paragraph", "line", "file"]
"""What one document is in a .txt file."""

_COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
csv.field_size_limit(1 << 30)


def kind_of(path: Path) -> Kind | None:
    """Return how a file is read, judged by its name; None for a name that says nothing."""
    name = path.name.lower()
    for suffix in _COMPRESSION:
        name = name.removesuffix(suffix)
    return next((kind for kind in KINDS if name.endswith(kind)), None)


def require_kind(path: Path) -> Kind:
    """Return how a file is read; an unknown kind is an error that suggests a new name for plain text."""
    if kind := kind_of(path):
        return kind
    plain = path.with_suffix("") if is_compressed(path) else path
    renamed = plain.with_suffix(".txt").name + (path.suffix if is_compressed(path) else "")
    raise CorpusError(
        f"{path} is of no known kind; expected {', '.join(KINDS)}, plain or with .gz or .zst. If it holds plain text, "
        f"rename it to {renamed}."
    )


def is_compressed(path: Path) -> bool:
    """Return whether a file's name says that it is compressed."""
    return path.suffix.lower() in _COMPRESSION


def read_documents(
    path: Path, field: str, txt_documents: TxtDocuments = "paragraph", may_be_empty: bool = False
) -> Iterator[str]:
    """Yield the documents of one file; a file that cannot be read, or has no text, is an error that names it."""
    import pyarrow as pa

    kind = require_kind(path)
    empty = True
    try:
        for text in _read(path, kind, field, txt_documents):
            empty = empty and not text.strip()
            yield text
    except (OSError, UnicodeDecodeError, pa.ArrowException, csv.Error) as error:
        raise CorpusError(f"{path} cannot be read as {kind}: {first_line(error)}.") from error
    if empty and not may_be_empty:
        raise CorpusError(f"{path} holds no text. Remove it from text.source, or exclude it with text.exclude.")


def text_of(value: object, where: str, field: str) -> str:
    """Return a cell as text that can be encoded: "" for null, and U+FFFD for half a surrogate pair."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise CorpusError(f"{where} holds {type(value).__name__} under {field!r}, expected text. Set text.field.")
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read(path: Path, kind: Kind, field: str, txt_documents: TxtDocuments) -> Iterator[str]:
    match kind:
        case ".txt":
            return _read_txt(path, txt_documents)
        case ".jsonl":
            return _read_jsonl(path, field)
        case ".csv":
            return _read_csv(path, field)
        case ".parquet":
            return _read_parquet(path, field)


def _read_txt(path: Path, documents: TxtDocuments) -> Iterator[str]:
    with _open(path) as file:
        if documents == "file":
            yield file.read()
        elif documents == "line":
            yield from (line.rstrip("\n") for line in file)
        else:
            yield from _paragraphs(file)


def _paragraphs(lines: Iterator[str]) -> Iterator[str]:
    paragraph: list[str] = []
    for line in lines:
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
            where = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                reason = error.msg if isinstance(error, json.JSONDecodeError) else first_line(error)
                raise CorpusError(f"{where} is not JSON: {reason}.") from error
            if not isinstance(record, dict):
                raise CorpusError(f"{where} holds a {type(record).__name__}; expected an object.")
            if field not in record:
                raise CorpusError(f"{where} has no text under {field!r}. {nearest(field, record)} Set text.field.")
            yield text_of(record[field], where, field)


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
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Parquet is read from its end, so a compressed file is decompressed whole.
    source = pa.BufferReader(_input_stream(path).read()) if is_compressed(path) else path
    table = pq.ParquetFile(source)
    columns = table.schema_arrow.names
    if field not in columns:
        raise CorpusError(f"{path} has no column {field!r}. {nearest(field, columns)} Set text.field.")
    for batch in table.iter_batches(batch_size=1024, columns=[field]):
        for value in batch.column(0):
            yield text_of(value.as_py(), str(path), field)


def _open(path: Path, newline: str | None = None) -> io.TextIOWrapper:
    return io.TextIOWrapper(_input_stream(path), encoding="utf-8-sig", newline=newline)  # skips a byte order mark


def _input_stream(path: Path) -> Any:
    import pyarrow as pa

    return pa.input_stream(os.fspath(path), compression=_COMPRESSION.get(path.suffix.lower()))
