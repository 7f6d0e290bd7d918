"""A page that opens from disk: no network, no script, light and dark, wide and narrow."""

import base64
from html import escape
from importlib import resources
from pathlib import Path

from dmsae.report.markup import Markup, tag

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(title: str, *sections: Markup) -> str:
    """Return a whole document."""
    head = tag(
        "head",
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", title),
        tag("style", Markup(_stylesheet())),
    )
    body = tag("body", tag("h1", title), *sections)
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def _stylesheet() -> str:
    return (resources.files("dmsae") / "report" / "page.css").read_text(encoding="utf8")


def section(heading: str, *parts: Markup) -> Markup:
    """Return a part of a page under a heading."""
    return tag("section", tag("h2", heading), *parts)


def figure(path: Path, caption: str, command: str) -> Markup:
    """Return a drawing inside the page, with the command that made it."""
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    image = Markup(f'<img alt="{escape(caption)}" src="data:image/svg+xml;base64,{data}">')
    return tag("figure", image, tag("figcaption", caption, " ", tag("code", command), class_="soft"))
