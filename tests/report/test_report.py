"""The report: whole from what is on disk, and nothing that is put into it can break out of it."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsae.cli import main
from dmsae.errors import ConfigError
from dmsae.report.figures import FIGURES
from dmsae.report.latents import Scored, card
from dmsae.report.markup import Markup, table, tag
from dmsae.report.page import page
from dmsae.report.report import write_report
from dmsae.text.visible import visible
from hostile import HOSTILE, hostile_core, hostile_facts
from tiny_recipe import write_recipe

pytestmark = pytest.mark.usefixtures("one_thread")


class Elements(HTMLParser):
    """The elements of a page, and whether all that were opened were closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[str] = []
        self.text: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [name for name, _ in attrs]
        if tag not in ("meta", "img"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def is_whole(self) -> bool:
        return not self._open


def parsed(document: str) -> Elements:
    elements = Elements()
    elements.feed(document)
    assert elements.is_whole()
    return elements


@given(st.text(), st.text())
def test_text_stays_text(inside: str, attribute: str) -> None:
    elements = parsed(tag("p", inside, title=attribute, class_=None))
    assert elements.names == ["p"]
    assert elements.attributes == ["title"]


def test_markup_is_not_escaped_twice_and_strings_are() -> None:
    assert tag("p", tag("b", "1 < 2"), " & ") == "<p><b>1 &lt; 2</b> &amp; </p>"
    assert "<td>&lt;i&gt;</td>" in table(["a"], [["<i>"]])
    assert Markup.join_all([tag("b", 1), tag("i", 2)]) == "<b>1</b><i>2</i>"


def test_invisible_characters_are_shown() -> None:
    assert visible("a\n\x1b\u202eb") == "a⏎⟨1B⟩⟨202E⟩b"


def test_hostile_tokens_cannot_leave_their_place() -> None:
    since = {"jaccard": 0.9, "jaccard_chance": 0.25, "decoder_cosine": None}
    document = page(HOSTILE, card(0, hostile_core(), hostile_facts(), Scored(1.0, 0.5, 2.0), since))
    elements = parsed(document)
    assert not {"script", "iframe", "object"} & set(elements.names)
    assert "onerror" not in elements.attributes
    assert not {"\x1b", "\u202e"} & set(document)
    assert "ON MOST TOKENS" in document
    assert "95 % interval 0.5 to 2" in document
    assert "since the cycle before: firing Jaccard 0.90, by chance 0.25<" in document


def test_a_report_of_everything(
    tiny_model: Path,
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = str(write_recipe(tmp_path / "tiny.toml", tiny_model, tiny_text))
    main(["distill", "--recipe", recipe, "--out", "run", "--train.tokens", "2560"])
    main(["transfer", "--recipe", recipe, "--core", "run", "--out", "saes", "--k", "6", "--train.tokens", "2560"])
    preset = ["--preset", "smoke", "--recipe", recipe, "--seeds", "0"]
    main(["experiment", "all", *preset, "--out", "experiment"])
    main(["figures", "experiment"])
    drawn = capsys.readouterr().out
    assert all(f"experiment/figures/{name}.svg" in drawn for name in FIGURES)
    main(["report", "experiment", "run", "saes", "--to", "pages/report.html", "--latents", "3"])
    document = Path("pages/report.html").read_text(encoding="utf8")
    elements = parsed(document)
    assert elements.names.count("article") == min(3, json.loads(Path("run/summary.json").read_text())["n_distilled"])
    assert elements.names.count("img") == len(FIGURES)
    assert "script" not in elements.names
    assert not re.findall(r"https?://", document), "a page that asks for nothing from elsewhere"
    text = " ".join(elements.text)
    for expected in ("cannot be told", "not tested here", "Distilled core", "dense-k6", "msae-k6", "torch"):
        assert expected in text
    assert text.count("since the cycle before: firing") == elements.names.count("article")
    assert "What became of the core of run" in text
    assert f"text {tiny_text}" in text


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is neither a run nor an experiment"):
        write_report([tmp_path], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
