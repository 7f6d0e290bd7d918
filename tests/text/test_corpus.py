"""Every kind of file reads back as written, each document comes once, and the split depends on the document alone."""

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsae.errors import ConfigError, CorpusError
from dmsae.text import corpus as text_module
from dmsae.text.corpus import Corpus, Document, TextConfig, read_documents

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


def corpus(path: Path, **settings: object) -> list[Document]:
    return list(Corpus(TextConfig(source=str(path), **settings)).documents(seed=0))  # type: ignore[arg-type]


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


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "a.txt").write_text("x")
    monkeypatch.setattr(text_module, "sha256_of", refused)
    with pytest.raises(CorpusError, match=r"a\.txt cannot be read: Permission denied"):
        Corpus(TextConfig(source=str(tmp_path)))


def test_columns_of_another_type_are_named_and_nulls_are_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x", None, "y"], "n": [1, 2, 3]}), path)
    assert [document.text for document in corpus(path)] in (["x", "y"], ["y", "x"])
    with pytest.raises(CorpusError, match=r"a\.parquet holds int under 'n', expected text"):
        corpus(path, field="n")
    with pytest.raises(CorpusError, match=r"no column 'txt'\. Did you mean 'text'"):
        corpus(path, field="txt")


def test_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(text_module.pa, "input_stream", refuse)
    with pytest.raises(CorpusError, match=r"a\.txt cannot be read as \.txt: .*Permission denied"):
        list(read_documents(path, ""))


def test_exact_duplicates_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("same\n\nown a\n\nsame")
    (tmp_path / "b.jsonl").write_text('{"text": "same"}\n{"text": "own b"}\n{"text": "  "}\n')
    assert sorted(document.text for document in corpus(tmp_path)) == ["own a", "own b", "same"]


@given(st.lists(st.integers(0, 40), unique=True, min_size=1), st.integers(0, 3), st.integers(1, 400))
def test_split_depends_on_the_document_alone(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int], seed: int, buffer_chars: int
) -> None:
    path = tmp_path_factory.mktemp("split") / "a.jsonl"
    path.write_bytes(as_jsonl([f"document {i}" for i in ids]))
    config = TextConfig(source=str(path), heldout_fraction=0.5, shuffle_chars=buffer_chars)
    found = list(Corpus(config).documents(seed))
    assert sorted(document.text for document in found) == sorted(f"document {i}" for i in ids)
    path.write_bytes(as_jsonl([f"document {i}" for i in range(41)]))
    everything = dict(Corpus(TextConfig(str(path), heldout_fraction=0.5)).documents(seed=9))
    assert all(everything[document.text] == document.heldout for document in found)


def test_order_depends_on_the_seed_and_shares_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(as_jsonl([f"document {i}" for i in range(4000)]))
    config = TextConfig(source=str(path), heldout_fraction=0.25, shuffle_chars=10_000)
    first, again, other = (list(Corpus(config).documents(seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert sorted(first) == sorted(other)
    assert sum(document.heldout for document in first) / 4000 == pytest.approx(0.25, abs=0.03)


def test_excluded_documents_stay_out_wherever_they_appear(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("only here\n\nalso reserved")
    (tmp_path / "probe_1.txt").write_text("also reserved\n\nreserved")
    (tmp_path / "probe_2.txt").write_text("")
    found = corpus(tmp_path, exclude=("probe_*",))
    assert [document.text for document in found] == ["only here"]
    with pytest.raises(CorpusError, match=r"leaves no file"):
        corpus(tmp_path, exclude=("*",))


def test_identity_sees_content_and_exclusion_but_no_names(tmp_path: Path) -> None:
    def identity(path: Path, **settings: object) -> dict[str, object]:
        return Corpus(TextConfig(source=str(path), **settings)).identity  # type: ignore[arg-type]

    for folder in ("one", "two", "three"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("text a")
        (tmp_path / folder / "b.txt").write_text("text b")
    assert identity(tmp_path / "one") == identity(tmp_path / "two")
    (tmp_path / "three" / "b.txt").write_text("text B")
    assert identity(tmp_path / "one") != identity(tmp_path / "three")
    assert identity(tmp_path / "one") != identity(tmp_path / "two", exclude=("b*",))


def test_sources_are_files_directories_or_globs(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a1.txt", "a2.txt", "in/b.txt", "notes.md"):
        (tmp_path / name).write_text(f"text of {name}")
    names = {
        tmp_path / "a1.txt": {"a1.txt"},
        tmp_path: {"a1.txt", "a2.txt", "in/b.txt"},
        tmp_path / "a*.txt": {"a1.txt", "a2.txt"},
        tmp_path / "**" / "b.txt": {"in/b.txt"},
    }
    for source, expected in names.items():
        assert {document.text for document in corpus(source)} == {f"text of {name}" for name in expected}
    for absent in ("absent.txt", "absent*"):
        with pytest.raises(CorpusError, match=r"no bundled corpus \(probes\) and no readable file.*hub:owner/name"):
            corpus(tmp_path / absent)


def test_a_bundled_model_is_no_corpus() -> None:
    with pytest.raises(ConfigError, match="'smollm2-135m' is a model, not a corpus"):
        Corpus(TextConfig(source="smollm2-135m"))


@pytest.mark.real
def test_bundled_corpus_keeps_probing_tables_out() -> None:
    found = Corpus(TextConfig())
    assert len(found.files) > 100
    assert {path.name.split("_")[0] for path in found.excluded} >= {"5", "87", "92", "96"}
    reserved = next(read_documents(found.excluded[0], found.field))
    texts = {document.text for document in found.documents(seed=0)}
    assert len(texts) > 100_000
    assert reserved not in texts
