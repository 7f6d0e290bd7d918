"""HTML that cannot be broken by what is put into it: text is escaped unless it is markup already.

Characters that would be invisible, or would change how the rest is shown, are shown themselves.
"""

from html import escape
from typing import Self

from dmsae.text.visible import visible


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()

    @classmethod
    def join_all(cls, parts: "list[Markup] | tuple[Markup, ...]") -> Self:
        """Return pieces of markup one after another."""
        return cls("".join(parts))


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """Return an element; children that are not markup are escaped, and so is every attribute.

    An attribute whose name ends in an underscore loses it (`class_`); None leaves one out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(visible(str(value)), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = "".join(child if isinstance(child, Markup) else escape(visible(str(child))) for child in children)
    return Markup(f"<{name}{given}>{inside}</{name}>")


def table(header: list[str], rows: "list[list[object]]", class_: str | None = None) -> Markup:
    """Return a table that scrolls sideways on a narrow screen."""
    head = tag("tr", *(tag("th", cell, scope="col") for cell in header))
    body = [tag("tr", *(tag("td", cell) for cell in row)) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body), class_=class_), class_="scroll")
