"""One file of text becomes documents: .txt, .jsonl, .csv or .parquet, plain or compressed.

Text is read as a stream: however large a file is, or becomes when it is decompressed, no more than a document is held.
A document that is longer than the limit is cut into several.

pyarrow decompresses and reads Parquet. It is imported when a file is opened, because this module is also imported by
commands that read no text.
"""

import csv
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rich.filesize import decimal as human_bytes

from dmsae.disk.files import open_regular, parse_json
from dmsae.errors import CorpusError, first_line, nearest

Kind = Literal[".txt", ".jsonl", ".csv", ".parquet"]
KINDS: tuple[Kind, ...] = (".txt", ".jsonl", ".csv", ".parquet")
TxtDocuments = Literal["paragraph", "line", "file"]
"""What one document is in a .txt file."""

_COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
DOCUMENT_CHARS = 10_000_000
"""How long a document may be, unless told otherwise."""
_LINE_SHARE = 8
"""How many times longer than a document a line of .jsonl or .csv may be: it holds other fields, and escapes."""
_PARQUET_BYTES = 1 << 30
"""How large a compressed Parquet file, or a column of one row group, may be in memory."""


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
    path: Path,
    field: str,
    txt_documents: TxtDocuments = "paragraph",
    may_be_empty: bool = False,
    limit: int = DOCUMENT_CHARS,
) -> Iterator[str]:
    """Yield the documents of one file; a file that cannot be read, or has no text, is an error that names it.

    A document of more than `limit` characters is cut into pieces of that length.
    """
    import pyarrow as pa

    kind = require_kind(path)
    empty = True
    try:
        for text in _read(path, kind, field, txt_documents, limit):
            empty = empty and not text.strip()
            yield from (text[at : at + limit] for at in range(0, len(text) or 1, limit))
    except (OSError, UnicodeDecodeError, MemoryError, pa.ArrowException) as error:
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


def _read(path: Path, kind: Kind, field: str, txt_documents: TxtDocuments, limit: int) -> Iterator[str]:
    match kind:
        case ".txt":
            return _read_txt(path, txt_documents, limit)
        case ".jsonl":
            return _read_jsonl(path, field, limit)
        case ".csv":
            return _read_csv(path, field, limit)
        case ".parquet":
            return _read_parquet(path, field)


def _read_txt(path: Path, documents: TxtDocuments, limit: int) -> Iterator[str]:
    with _open(path) as file:
        if documents == "file":
            yield from iter(lambda: file.read(limit), "")
        elif documents == "line":
            yield from (line.rstrip("\n") for line in iter(lambda: file.readline(limit), ""))
        else:
            yield from _paragraphs(iter(lambda: file.readline(limit), ""), limit)


def _paragraphs(lines: Iterator[str], limit: int) -> Iterator[str]:
    paragraph: list[str] = []
    n_chars = 0
    for line in lines:
        if paragraph and (n_chars + len(line) > limit or not line.strip()):
            yield "".join(paragraph).rstrip("\n")
            paragraph, n_chars = [], 0
        if line.strip():
            paragraph.append(line)
            n_chars += len(line)
    if paragraph:
        yield "".join(paragraph).rstrip("\n")


def _lines(file: io.TextIOWrapper, path: Path, limit: int) -> Iterator[str]:
    """Yield whole lines; one that is too long to hold is an error."""
    for number, line in enumerate(iter(lambda: file.readline(_LINE_SHARE * limit), ""), start=1):
        if len(line) == _LINE_SHARE * limit and not line.endswith("\n"):
            raise CorpusError(
                f"{path}, line {number} has more than {len(line):,} characters. Split it, or raise "
                f"text.max_document_chars ({limit:,})."
            )
        yield line


def _read_jsonl(path: Path, field: str, limit: int) -> Iterator[str]:
    with _open(path) as file:
        for number, line in enumerate(_lines(file, path, limit), start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                record = parse_json(line)
            except ValueError as error:
                reason = error.msg if isinstance(error, json.JSONDecodeError) else first_line(error)
                raise CorpusError(f"{where} is not JSON: {reason}.") from error
            if not isinstance(record, dict):
                raise CorpusError(f"{where} holds a {type(record).__name__}; expected an object.")
            if field not in record:
                raise CorpusError(f"{where} has no text under {field!r}. {nearest(field, record)} Set text.field.")
            yield text_of(record[field], where, field)


def _read_csv(path: Path, field: str, limit: int) -> Iterator[str]:
    csv.field_size_limit(_LINE_SHARE * limit)
    with _open(path, newline="") as file:
        rows = csv.reader(_lines(file, path, limit), strict=True)
        n_rows = 0
        try:
            names = next(rows, None)
            if names is None:
                return  # an empty file
            if field not in names:
                raise CorpusError(f"{path} has no column {field!r}. {nearest(field, names)} Set text.field.")
            column = len(names) - 1 - names[::-1].index(field)  # of columns with the same name, the last
            for row in filter(None, rows):
                n_rows += 1
                yield row[column] if column < len(row) else ""
        except csv.Error as error:
            raise CorpusError(
                f"{path} cannot be read as .csv: {first_line(error)}, in the row that ends at line {rows.line_num}, "
                f"after {n_rows:,} rows. Look for a quote that is not closed, or not doubled inside a quoted text."
            ) from error


def _read_parquet(path: Path, field: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _bytes(path) as source:
        if is_compressed(path):  # Parquet is read from its end, so a compressed file is decompressed whole.
            data = bytearray()
            while chunk := source.read(1 << 20):
                data += chunk
                _require_size(path, len(data), "the file, decompressed,")
            source = pa.BufferReader(data)
        table = pq.ParquetFile(source)
        columns = table.schema_arrow.names
        if field not in columns:
            raise CorpusError(f"{path} has no column {field!r}. {nearest(field, columns)} Set text.field.")
        if pa.types.is_string(table.schema_arrow.field(field).type):  # a text that is repeated is held once
            table = pq.ParquetFile(source, read_dictionary=[field])
        for group in range(table.metadata.num_row_groups):
            of_group = table.metadata.row_group(group)
            sizes = [of_group.column(i) for i in range(of_group.num_columns)]
            size = sum(one.total_uncompressed_size for one in sizes if one.path_in_schema.split(".")[0] == field)
            _require_size(path, size, f"column {field!r} of row group {group}")
        for batch in table.iter_batches(batch_size=256, columns=[field]):
            for value in batch.column(0):
                yield text_of(value.as_py(), str(path), field)


def _require_size(path: Path, size_bytes: int, what: str) -> None:
    if size_bytes > _PARQUET_BYTES:
        raise CorpusError(
            f"{path}: {what} has more than {human_bytes(_PARQUET_BYTES)}, which cannot be read as a stream. Write it "
            "with smaller row groups, without compressing the file as a whole."
        )


@contextmanager
def _open(path: Path, newline: str | None = None) -> Iterator[io.TextIOWrapper]:
    with _bytes(path) as stream:
        yield io.TextIOWrapper(stream, encoding="utf-8-sig", newline=newline)  # skips a byte order mark


@contextmanager
def _bytes(path: Path) -> Iterator[Any]:
    """Open a file to be read as it is, or as a stream of what it is when decompressed."""
    import pyarrow as pa

    # An open file, not its name: pyarrow would wait for a pipe, and refuses names that are not UTF-8.
    with open_regular(path) as file:
        if not is_compressed(path):
            yield file
            return
        with pa.input_stream(file, compression=_COMPRESSION[path.suffix.lower()]) as stream:
            yield stream
