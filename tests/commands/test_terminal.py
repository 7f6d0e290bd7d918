"""In a log file, progress is a line now and then, with a rate that counts only the work of this run."""

import pytest

from dmsae.commands.terminal import TERMINAL
from dmsae.progress import SILENT, human_seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, which only the test changes."""
    now = [0.0]
    monkeypatch.setattr("dmsae.commands.terminal.time.monotonic", lambda: now[0])
    return now


def test_lines_come_now_and_then_with_rate_and_time_left(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with TERMINAL.bar("harvest", 1000, "tok") as bar:
        bar.skip(500)
        for _ in range(3):
            clock[0] += 10
            bar.advance(100, "fine")
    lines = capsys.readouterr().err.splitlines()
    # 100 in 10 s without the 500 that were skipped; the third step comes too soon after that line to print another.
    assert lines == ["harvest: 70 % of 1k, 10 tok/s fine, 30 s left"]


def test_a_slow_first_step_does_not_spoil_the_time_left(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with TERMINAL.bar("train", 52, "steps") as bar:
        clock[0] += 19  # reading, compiling, filling caches
        bar.advance(1)
        clock[0] += 1
        bar.advance(1)
    assert capsys.readouterr().err.splitlines() == ["train: 4 % of 52, 1 steps/s, 50 s left"]


def test_before_anything_is_finished_there_is_no_rate(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with TERMINAL.bar("absorption", 2, "SAEs") as bar:
        clock[0] += 30
        bar.advance(0, "probes 3/26")
    assert capsys.readouterr().err.splitlines() == ["absorption: 0 % of 2, probes 3/26"]


def test_notes_and_warnings_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    TERMINAL.note("a [bracketed] fact")
    TERMINAL.warn("look at this")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == ["a [bracketed] fact", "Warning: look at this"]


def test_silence_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with SILENT.bar("train", 3, "steps") as bar:
        bar.skip(1)
        bar.advance(2, "fine")
    SILENT.note("a fact")
    SILENT.warn("look at this")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (5400, "1.5 h")])
def test_human_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text
