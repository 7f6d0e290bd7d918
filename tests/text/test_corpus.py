"""Each document comes once, the split depends on the document alone, and the identity on the content alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsae.config import Json
from dmsae.errors import ConfigError, CorpusError
from dmsae.text import corpus as corpus_module
from dmsae.text.corpus import Document, FileCorpus, TextConfig, open_corpus
from dmsae.text.readers import read_documents


def write_jsonl(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def read(source: Path, **settings: Any) -> list[Document]:
    return list(open_corpus(TextConfig(source=str(source), **settings)).documents(seed=0))


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "a.txt").write_text("x")
    monkeypatch.setattr(corpus_module, "sha256_of", refused)
    with pytest.raises(CorpusError, match=r"a\.txt cannot be read: Permission denied"):
        open_corpus(TextConfig(source=str(tmp_path)))


def test_exact_duplicates_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("same\n\nown a\n\nsame")
    (tmp_path / "b.jsonl").write_text('{"text": "same"}\n{"text": "own b"}\n{"text": "  "}\n')
    assert sorted(document.text for document in read(tmp_path)) == ["own a", "own b", "same"]


@given(st.lists(st.integers(0, 40), unique=True, min_size=1), st.integers(0, 3), st.integers(1, 400))
def test_a_documents_place_depends_on_its_text_alone(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int], seed: int, buffer_chars: int
) -> None:
    path = tmp_path_factory.mktemp("split") / "a.jsonl"
    write_jsonl(path, [f"document {i}" for i in ids])
    config = TextConfig(source=str(path), heldout_fraction=0.5, shuffle_chars=buffer_chars)
    documents = list(open_corpus(config).documents(seed))
    assert sorted(document.text for document in documents) == sorted(f"document {i}" for i in ids)
    write_jsonl(path, [f"document {i}" for i in range(41)])
    everything = dict(open_corpus(TextConfig(str(path), heldout_fraction=0.5)).documents(seed=9))
    assert all(everything[document.text] == document.place for document in documents)


def test_order_depends_on_the_seed_and_places_are_spread_evenly(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [f"document {i}" for i in range(4000)])
    config = TextConfig(source=str(path), heldout_fraction=0.25, shuffle_chars=10_000)
    first, again, other = (list(open_corpus(config).documents(seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert sorted(first) == sorted(other)
    for low in (0.0, 0.25, 0.5, 0.75):
        share = sum(low <= document.place < low + 0.25 for document in first) / 4000
        assert share == pytest.approx(0.25, abs=0.03)


def test_excluded_documents_stay_out_wherever_they_appear(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("only here\n\nalso reserved")
    (tmp_path / "probe_1.txt").write_text("also reserved\n\nreserved")
    (tmp_path / "probe_2.txt").write_text("")
    assert [document.text for document in read(tmp_path, exclude=("probe_*",))] == ["only here"]
    with pytest.raises(ConfigError, match=r"text\.exclude = \('\*',\); it must leave at least one file"):
        read(tmp_path, exclude=("*",))


def test_identity_sees_content_and_exclusion_but_no_names(tmp_path: Path) -> None:
    def identity(path: Path, **settings: Any) -> Json:
        return open_corpus(TextConfig(source=str(path), **settings)).identity

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
        assert {document.text for document in read(source)} == {f"text of {name}" for name in expected}
    for absent in ("absent.txt", "absent*"):
        with pytest.raises(CorpusError, match=r"must be a bundled corpus \(probes\), an existing file.*hub:owner/name"):
            read(tmp_path / absent)


def test_a_bundled_model_is_no_corpus() -> None:
    with pytest.raises(ConfigError, match=r"text\.source = .smollm2-135m.; it must be a corpus\. It is a model\."):
        open_corpus(TextConfig(source="smollm2-135m"))


def test_an_unknown_kind_is_refused_when_the_corpus_is_opened(tmp_path: Path) -> None:
    (tmp_path / "wiki.raw.gz").write_bytes(b"")
    for source in ("wiki.raw.gz", "wiki*"):
        with pytest.raises(CorpusError, match=r"wiki\.raw\.gz is of no known kind; .* rename it to wiki\.txt\.gz"):
            open_corpus(TextConfig(source=str(tmp_path / source)))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"heldout_fraction": 0.0}, "text.heldout_fraction = 0.0; it must lie between 0 and 1."),
        ({"heldout_fraction": 1.0}, "text.heldout_fraction = 1.0; it must lie between 0 and 1."),
        ({"pairs_fraction": 0.0}, "text.pairs_fraction = 0.0; it must lie between 0 and 1."),
        (
            {"heldout_fraction": 0.5, "pairs_fraction": 0.5},
            "text.heldout_fraction + text.pairs_fraction = 1.0; it must be below 1: the rest is trained on.",
        ),
        ({"shuffle_chars": 0}, "text.shuffle_chars = 0; it must be a whole number of at least 1."),
        ({"txt_documents": "page"}, "text.txt_documents = 'page'; it must be one of paragraph, line, file."),
    ],
)
def test_impossible_settings_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        TextConfig(**setting)
    assert str(refused.value) == message


def test_the_hint_is_about_txt_files_that_are_read_by_paragraph(tmp_path: Path) -> None:
    def hint(name: str, **settings: Any) -> str:
        return open_corpus(TextConfig(source=str(tmp_path / name), **settings)).hint_if_too_small()

    (tmp_path / "a.txt").write_text("x")
    shutil.copy(tmp_path / "a.txt", tmp_path / "my.txt.jsonl")
    assert "blank lines separate documents" in hint("a.txt")
    assert hint("*") == hint("a.txt")
    assert hint("a.txt", txt_documents="line") == hint("my.txt.jsonl") == hint("*", exclude=("a*",)) == ""


def test_a_store_made_before_is_found_again(tmp_path: Path) -> None:
    """Identities are part of the keys of stores: one that changes here is harvested anew everywhere."""
    (tmp_path / "a.txt").write_text("some text")
    opened = open_corpus(TextConfig(source=str(tmp_path)))
    assert opened.source == str(tmp_path)
    assert opened.identity == {
        "kind": "files",
        "field": "text",
        "files": "4079a6073bb916383f3c9f7a1d4436f683ad8b49607fd99ad91fd46611fd6d56",
        "excluded": "4f53cda18c2baa0c0354bb5f9a3ecbe5ed12ab4d8e11ba873c2f11161202b945",
    }


def test_documents_come_in_the_order_in_which_they_always_came(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [f"document {i}" for i in range(8)])
    config = TextConfig(source=str(tmp_path), heldout_fraction=0.5, shuffle_chars=40)
    documents = list(open_corpus(config).documents(seed=3))
    assert "".join(document.text[-1] for document in documents) == "45320167"
    assert "".join(document.text[-1] for document in documents if document.place < 0.5) == "4532"


@pytest.mark.real
def test_bundled_corpus_keeps_probing_tables_out() -> None:
    opened = FileCorpus(TextConfig())
    assert len(opened.files) > 100
    assert {path.name.split("_")[0] for path in opened.excluded} >= {"5", "87", "92", "96"}
    reserved = next(read_documents(opened.excluded[0], opened.field))
    texts = {document.text for document in opened.documents(seed=0)}
    assert len(texts) > 100_000
    assert reserved not in texts
