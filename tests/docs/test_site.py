"""The site builds without a warning, and is whole: every link leads somewhere, and nothing comes from the network."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import pytest

import dmsae
from pages import commands

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(built)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert not result.stderr, result.stderr
    return built


class Page(NamedTuple):
    """What a page refers to, and what in it can be referred to."""

    links: list[str]
    loaded: list[str]
    ids: set[str]


class _Reading(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = Page([], [], set())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attributes if value is not None}
        if "id" in found:
            self.page.ids.add(found["id"])
        if tag == "a" and "href" in found:
            self.page.links.append(found["href"])
        loads = "src" in found or (tag == "link" and found.get("rel") != "canonical")
        if loads:
            self.page.loaded.append(found.get("src") or found.get("href", ""))


@pytest.fixture(scope="module")
def read(site: Path) -> dict[Path, Page]:
    """Every page of the site but that for addresses that do not exist, which is meant for a server."""
    pages = {}
    for path in sorted(site.rglob("*.html")):
        if path.name != "404.html":
            reading = _Reading()
            reading.feed(path.read_text(encoding="utf8"))
            pages[path.resolve()] = reading.page
    return pages


def test_nothing_is_loaded_from_the_network(read: dict[Path, Page]) -> None:
    for path, page in read.items():
        for address in page.loaded:
            assert urlsplit(address).scheme in ("", "data"), f"{path} loads {address}"


def test_styles_load_nothing_from_the_network(site: Path) -> None:
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import )[\"']?(?:https?:)?//", style.read_text(encoding="utf8")), style


def test_every_link_leads_somewhere(read: dict[Path, Page]) -> None:
    broken = []
    for path, page in read.items():
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            missing_anchor = anchor and target in read and anchor not in read[target].ids
            if not target.exists() or missing_anchor:
                broken.append(f"{path.name}: {link}")
    assert not broken


def test_every_command_and_every_public_name_has_its_place(read: dict[Path, Page], site: Path) -> None:
    cli = read[(site / "reference" / "cli.html").resolve()].ids
    assert {f"dmsae-{'-'.join(command)}" for command in commands()} <= cli
    api = read[(site / "reference" / "api.html").resolve()].ids
    homes = {f"{getattr(dmsae, name).__module__}.{name}" for name in dmsae.__all__ if name != "__version__"}
    assert homes <= api


def test_examples_of_docstrings_are_blocks_of_code(site: Path) -> None:
    text = (site / "reference" / "api.html").read_text(encoding="utf8")
    assert "<blockquote>" not in text, "Markdown took an example for a quotation"


def test_the_search_works_from_disk(site: Path) -> None:
    assert (site / "search" / "search_index.js").read_text(encoding="utf8").startswith("var __index = {")
    assert "iframe-worker.js" in (site / "index.html").read_text(encoding="utf8")


def test_notebooks_are_pages_with_what_they_printed(site: Path) -> None:
    text = (site / "notebooks" / "own-activations.html").read_text(encoding="utf8")
    assert "distilled core:" in text
    assert "data:image/png;base64," in text
    assert (site / "notebooks" / "own-activations.ipynb").is_file()
