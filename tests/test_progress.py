"""In a log file, progress is a line now and then, with a rate that counts only this run's work."""

import pytest

from dmsae import progress as module
from dmsae.progress import human_seconds, progress


def test_lines_come_now_and_then_with_rate_and_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    with progress("harvest", 1000, "tok") as bar:
        bar.skip(500)
        for _ in range(3):
            clock[0] += 10
            bar.advance(100, "fine")
    lines = capsys.readouterr().err.splitlines()
    # 200 in 20 s without what was skipped; the third step comes too soon after the line for another one.
    assert lines == ["harvest: 70 % of 1k, 10 tok/s fine, 30 s left"]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (5400, "1.5 h")])
def test_human_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text
