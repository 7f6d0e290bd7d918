"""Text from models and corpora is printed so that nothing in it acts on the terminal."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsae.commands.output import out, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" was", " was"),
        ("a\nb", "a⏎b"),
        ("\t", r"\t"),
        ("\r\n", r"\r⏎"),
        ("\x1b[31mred\x1b]8;;http://x\x07", r"\x1b[31mred\x1b]8;;http://x\x07"),
        ("\x9b2J", r"\x9b2J"),
        ("\u202eevil", r"\u202eevil"),
        ("\ud800", r"\ud800"),
        ("\u2028", r"\u2028"),
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


def test_nothing_that_is_printed_is_markup_or_the_name_of_an_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    out.print("[red]a[/red] :smile: [link=http://x]b[/link] 12 'c'")
    assert capsys.readouterr().out == "[red]a[/red] :smile: [link=http://x]b[/link] 12 'c'\n"
