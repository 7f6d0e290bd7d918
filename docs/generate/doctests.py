"""Examples in docstrings become blocks of code: without this, Markdown reads `>>>` as three nested quotes."""

import re

from griffe import Extension, Object

_EXAMPLE = re.compile(r"^[ ]*>>> (?:.*\n?)(?:[ ]*\S.*\n?)*", re.MULTILINE)


def fenced(docstring: str) -> str:
    """Return a docstring with a fence around each of its examples."""
    return _EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", docstring)


class Doctests(Extension):
    """Puts a fence around the examples of everything that is documented."""

    def on_object(self, *, obj: Object, **_: object) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
