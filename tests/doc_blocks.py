"""The blocks of code in a page of the documentation, and how the tests run them.

Blocks of `bash`, `python` and `toml title="file"` are run, in the order of the page; `text` is what something printed.
A block that cannot be run stands below a line that the reader sees too: `*Not run by the tests: the reason.*`
"""

import re
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[1] / "docs"
_FENCE = re.compile(
    r'^(?:\*Not run by the tests: (?P<reason>.+?)\.\*\n\n)?```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n'
    r"(?P<source>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A block of code."""

    page: str
    line: int
    language: str
    title: str
    source: str
    not_run: str
    """Why it is not run; empty if it is."""


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page."""
    text = page.read_text(encoding="utf8")
    return [
        Block(
            page.relative_to(DOCS).as_posix(),
            text.count("\n", 0, found.start("source")) + 1,
            found["language"],
            found["title"] or "",
            found["source"],
            found["reason"] or "",
        )
        for found in _FENCE.finditer(text)
    ]


def pages() -> list[Path]:
    """Return every page that is written by hand."""
    return sorted(page for page in DOCS.rglob("*.md") if "generate" not in page.parts)
