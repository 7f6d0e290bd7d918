"""The method page names the functions that implement the paper; they exist."""

import importlib
import re

import pytest

from doc_blocks import DOCS

NAMES = sorted(set(re.findall(r"`(dmsae(?:\.\w+)+)`", (DOCS / "method.md").read_text(encoding="utf8"))))
ROWS = [f"Eq. {number}" for number in range(1, 10)] + [f"Algorithm {number}" for number in (1, 2, 3)]


def find(name: str) -> object:
    """Return what a dotted name stands for: the longest part of it that is a module, then attributes."""
    parts = name.split(".")
    for n_module in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:n_module]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[n_module:]:
            found = getattr(found, attribute)
        return found
    raise AssertionError(f"there is no {name}")


@pytest.mark.parametrize("name", NAMES)
def test_every_function_that_the_page_names_exists(name: str) -> None:
    assert find(name) is not None


@pytest.mark.parametrize("row", ROWS)
def test_every_equation_and_algorithm_has_a_function(row: str) -> None:
    text = (DOCS / "method.md").read_text(encoding="utf8")
    assert re.search(rf"^\| {row}\b.*`dmsae\.\w+", text, flags=re.MULTILINE)
