"""Every kind of file reads back as written, and an error names the file and the line."""

import csv
import gzip
import io
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dmsae.errors import CorpusError
from dmsae.text.readers import TxtDocuments, kind_of, read_documents

DOCUMENTS = ["one\ntwo", 'quotes "and", commas', "ünïcode – 日本 🙂", "the last"]


def as_txt(texts: list[str]) -> bytes:
    return "\n\n\n".join(texts).encode()


def as_jsonl(texts: list[str]) -> bytes:
    return "\n".join(json.dumps({"id": 1, "text": text}) for text in texts).encode()


def as_csv(texts: list[str]) -> bytes:
    file = io.StringIO(newline="")
    csv.writer(file).writerows([["id", "text"], *[[1, text] for text in texts]])
    return file.getvalue().encode()


def as_parquet(texts: list[str]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), sink)
    return sink.getvalue()


KINDS: dict[str, Callable[[list[str]], bytes]] = {
    ".txt": as_txt,
    ".jsonl": as_jsonl,
    ".csv": as_csv,
    ".parquet": as_parquet,
}
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_reads_back(kind: str, compression: str, tmp_path: Path) -> None:
    path = tmp_path / f"file{kind}{compression}"
    path.write_bytes(COMPRESSIONS[compression](KINDS[kind](DOCUMENTS)))
    assert list(read_documents(path, "text")) == DOCUMENTS


def test_what_a_document_is_in_a_txt_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\ntwo\r\n\r\n  \r\nthree")
    assert list(read_documents(path, "text", "paragraph")) == ["one\ntwo", "three"]
    assert [line for line in read_documents(path, "text", "line") if line.strip()] == ["one", "two", "three"]
    assert list(read_documents(path, "text", "file")) == ["one\ntwo\n\n  \nthree"]


def test_concatenated_archives_are_read_to_their_end(tmp_path: Path) -> None:
    for name, compress in COMPRESSIONS.items():
        path = tmp_path / f"log.txt{name}"
        path.write_bytes(compress(b"first\n\n") + compress(b"second"))
        assert list(read_documents(path, "")) == ["first", "second"]


def test_byte_order_mark_belongs_to_no_column(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbftext\nhello\n")
    assert list(read_documents(tmp_path / "a.csv", "text")) == ["hello"]


def test_text_that_cannot_be_encoded_is_mended(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "half \\ud800 pair"}\n{"text": "whole \\ud83d\\ude42"}\n')
    assert list(read_documents(tmp_path / "a.jsonl", "text")) == ["half � pair", "whole 🙂"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n\n{"text": \n', r"a\.jsonl, line 3 is not JSON: Expecting value\."),
        ("a.jsonl", b'{"text": 3}\n', r"a\.jsonl, line 1 holds int under 'text', expected text\. Set text\.field"),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"txt": "y"}\n',
            r"a\.jsonl, line 2 has no text under 'text'\. Did you mean 'txt'",
        ),
        ("a.jsonl", b"[1]\n", r"a\.jsonl, line 1 holds a list; expected an object"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl cannot be read as \.jsonl: .*utf-8"),
        ("a.csv", b"txt,id\nx,1\n", r"a\.csv has no column 'text'\. Did you mean 'txt'"),
        ("a.csv", b"", r"a\.csv holds no text"),
        ("a.jsonl", b"[" * 200_000, r"a\.jsonl, line 1 is not JSON"),
        ("a.csv", b"text\n", r"a\.csv holds no text"),
        ("a.txt", b" \n\n ", r"a\.txt holds no text"),
        ("a.txt.gz", b"not gzip", r"a\.txt\.gz cannot be read as \.txt"),
        ("a.txt.gz", gzip.compress(b"cut short" * 99)[:-9], r"a\.txt\.gz cannot be read as \.txt: Truncated"),
        ("a.txt.zst", b"not zstd", r"a\.txt\.zst cannot be read"),
        ("a.parquet", b"not parquet", r"a\.parquet cannot be read as \.parquet"),
        ("a.parquet", as_parquet(["x"])[:-6], r"a\.parquet cannot be read as \.parquet"),
        ("a.pdf", b"x", r"a\.pdf is of no known kind"),
    ],
)
def test_bad_files_are_named(name: str, data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CorpusError, match=message):
        list(read_documents(tmp_path / name, "text"))


@pytest.mark.parametrize(
    ("name", "renamed"),
    [
        ("wiki.raw.gz", "wiki.txt.gz"),
        ("wiki.train.raw.ZST", "wiki.train.txt.ZST"),
        ("notes.md", "notes.txt"),
        ("notes", "notes.txt"),
        ("notes.gz", "notes.txt.gz"),
    ],
)
def test_an_unknown_kind_suggests_a_name_that_is_known(name: str, renamed: str) -> None:
    with pytest.raises(CorpusError, match=rf"{name} is of no known kind; .* rename it to {renamed}\.$"):
        list(read_documents(Path(name), "text"))
    assert kind_of(Path(renamed)) == ".txt"


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("dmsae.text.readers.open_regular", refuse)
    with pytest.raises(CorpusError, match=r"a\.txt cannot be read as \.txt: .*Permission denied"):
        list(read_documents(path, ""))


def test_columns_of_another_type_are_named_and_nulls_are_empty(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x", None, "y"], "n": [1, 2, 3]}), path)
    assert list(read_documents(path, "text")) == ["x", "", "y"]
    with pytest.raises(CorpusError, match=r"a\.parquet holds int under 'n', expected text"):
        list(read_documents(path, "n"))
    with pytest.raises(CorpusError, match=r"no column 'txt'\. Did you mean 'text'"):
        list(read_documents(path, "txt"))


def test_heavy_libraries_are_imported_when_a_file_is_opened() -> None:
    code = "import sys, dmsae.text.corpus; assert not {'pyarrow', 'datasets', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_long_documents_are_cut_and_nothing_is_lost(tmp_path: Path) -> None:
    text = "".join(chr(97 + i % 26) for i in range(2500))
    for kind, write in KINDS.items():
        path = tmp_path / f"long{kind}"
        path.write_bytes(write([text, "short"]))
        assert list(read_documents(path, "text", limit=1000)) == [text[:1000], text[1000:2000], text[2000:], "short"]
    path = tmp_path / "long.txt"
    units: tuple[TxtDocuments, ...] = ("line", "file")
    for unit in units:
        path.write_text(text)
        assert list(read_documents(path, "", unit, limit=1000)) == [text[:1000], text[1000:2000], text[2000:]]


def test_a_line_that_is_too_long_to_hold_is_named(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.csv"):
        (tmp_path / name).write_text("text\n" * (name == "a.csv") + "x" * 9000)
        with pytest.raises(CorpusError, match=rf"{name}, line [12] has more than 8,000 .* raise text.max_document"):
            list(read_documents(tmp_path / name, "text", limit=1000))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("unit", ["paragraph", "line", "file"])
def test_compressed_text_is_never_held_whole(tmp_path: Path, suffix: str, unit: TxtDocuments) -> None:
    path = tmp_path / f"bomb.txt{suffix}"
    path.write_bytes(COMPRESSIONS[suffix](b"a" * 60_000_000))
    tracemalloc.start()
    try:
        n_chars = sum(map(len, read_documents(path, "", unit, limit=100_000)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert n_chars == 60_000_000
    assert peak < 10_000_000


def test_a_compressed_parquet_file_is_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(as_parquet(["x" * 5000, "y" * 5000]))
    monkeypatch.setattr("dmsae.text.readers._PARQUET_BYTES", 1000)
    with pytest.raises(CorpusError, match=r"a\.parquet: column 'text' of row group 0 has more than 1\.0 kB"):
        list(read_documents(path, "text"))
    packed = tmp_path / "a.parquet.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(CorpusError, match="decompressed, has more than"):
        list(read_documents(packed, "text"))


def test_a_stray_quote_is_refused_with_the_number_of_rows(tmp_path: Path) -> None:
    rows = [f"{i},row {i}" for i in range(300)]
    rows[7] = '7,"never closed'
    (tmp_path / "a.csv").write_text("\n".join(["id,text", *rows]))
    with pytest.raises(CorpusError, match=r"a\.csv cannot be read as \.csv: .*after 7 rows.*quote"):
        list(read_documents(tmp_path / "a.csv", "text"))
    rows[200] = '200,said "so"'
    (tmp_path / "a.csv").write_text("\n".join(["id,text", *rows]))
    with pytest.raises(CorpusError, match=r"row that ends at line 202, after 7 rows"):
        list(read_documents(tmp_path / "a.csv", "text"))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(CorpusError, match=r"a\.txt cannot be read as \.txt: .*not a regular file"):
        list(read_documents(tmp_path / "a.txt", "text"))


def test_names_that_are_not_utf8_are_read(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    for kind, write in KINDS.items():
        named = path.with_name(path.name + kind)
        named.write_bytes(write(DOCUMENTS))
        assert list(read_documents(named, "text")) == DOCUMENTS
