"""What the jobs of sweeps do in tests: importable by their processes, light, and able to fail."""

import os
import time
from pathlib import Path

from dmsae.errors import TrainingError


def leave(file: Path, text: str = "") -> None:
    """Add a line to a file: the text, or the threads that this process was given."""
    with file.open("a", encoding="utf8") as opened:
        opened.write(f"{text or os.environ['OMP_NUM_THREADS']}\n")


def fail(cause: str) -> None:
    """Print something, and fail as a training would."""
    print("about to fail")
    raise TrainingError(cause)


def break_down() -> None:
    """Fail as a mistake of ours would."""
    raise ZeroDivisionError("a bug")


def kill_oneself() -> None:
    """End without a word."""
    os.kill(os.getpid(), 9)


def save_when_stopped(begun: Path, saved: Path) -> None:
    """Work until somebody interrupts, then take a while to save; done at once if something was saved before."""
    if saved.exists():
        return
    try:
        begun.write_text("")
        while True:
            time.sleep(0.02)
    except KeyboardInterrupt:
        time.sleep(0.3)
        saved.write_text("")
        raise
