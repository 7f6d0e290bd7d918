"""What is printed is text: no markup, no emoji, and no control character of a stranger's reaches the terminal."""

import pytest

from dmsae.cli import main
from dmsae.commands.output import out, plain_table
from dmsae.commands.terminal import TERMINAL

HOSTILE = "\x1b[2J\x1b]0;owned\x07[red]\u202e\udcff\r"
SHOWN = "⟨1B⟩[2J⟨1B⟩]0;owned⟨7⟩[red]⟨202E⟩⟨DCFF⟩␍"


def test_nothing_that_is_printed_is_markup_or_the_name_of_an_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    out.print("[red]a[/red] :smile: [link=http://x]b[/link] 12 'c'")
    assert capsys.readouterr().out == "[red]a[/red] :smile: [link=http://x]b[/link] 12 'c'\n"


def test_names_of_strangers_do_not_act_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    table = plain_table("name")
    table.add_row(f"{HOSTILE}\n")
    out.print(table)
    out.print(f"Store {HOSTILE}\nsecond line")
    TERMINAL.note(HOSTILE)
    TERMINAL.warn(HOSTILE)
    with TERMINAL.bar(HOSTILE, 2, "steps") as bar:
        bar.advance(1, HOSTILE)
    printed = capsys.readouterr()
    assert [line.rstrip() for line in printed.out.splitlines()] == [
        "name",
        f"{SHOWN}⏎",
        f"Store {SHOWN}",
        "second line",
    ]
    assert printed.err.splitlines() == [SHOWN, f"Warning: {SHOWN}"]


def test_an_error_with_a_hostile_name_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["status", f"/nowhere/{HOSTILE}"])
    assert SHOWN in capsys.readouterr().err
