"""Text from models and corpora is shown so that nothing in it acts on the terminal or the page."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsae.text.visible import visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" was", " was"),
        ("a\nb", "a⏎b"),
        ("\t", "⇥"),
        ("\r\n", "␍⏎"),
        ("\x1b[31mred\x1b]8;;http://x\x07", "⟨1B⟩[31mred⟨1B⟩]8;;http://x⟨7⟩"),
        ("\x9b2J", "⟨9B⟩2J"),
        ("\u202eevil", "⟨202E⟩evil"),
        ("\ud800", "⟨D800⟩"),
        ("\u2028", "⟨2028⟩"),
        ("日本語 naïve 🤖 [bold] :smile:", "日本語 naïve 🤖 [bold] :smile:"),
    ],
)
def test_what_does_not_show_is_spelled_out(text: str, shown: str) -> None:
    assert visible(text) == shown


@given(st.text(st.characters(codec=None)))
def test_visible_text_is_one_line_without_controls_that_can_be_encoded(text: str) -> None:
    shown = visible(text)
    assert not {unicodedata.category(character) for character in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert len(shown.splitlines()) <= 1
    shown.encode("utf8")


def test_what_is_to_be_kept_is_kept() -> None:
    assert visible("a\n\x1b", keep="\n") == "a\n⟨1B⟩"
