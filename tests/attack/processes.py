"""Attacks on running processes: kills, full disks, and several at once. Each is a process that does one job.

They are forked from a server that has imported everything and run nothing: a fork of a process in which torch has used
its threads may wait for them for ever.
"""

import multiprocessing
import os
import random
import resource
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from attack.scene import Scene, contents
from attack.tally import Outcome, Tally
from dmsae.errors import BusyError, DmsaeError

_DONE, _TYPED, _UNTYPED, _BUSY = 0, 2, 3, 4
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["attack.processes", "torch._dynamo", "pytest"])
_SECONDS = 120.0
"""How long one job may take, many times what it needs."""


def whole(scene: Scene, name: str, scratch: Path) -> dict[str, bytes]:
    """Return what a job leaves that nothing disturbs."""
    place = scratch / f"whole-{name}"
    if not place.exists():
        _wait(_start(scene, name, place, scratch / "message"))
    return contents(place)


def attack_by_kills(scene: Scene, name: str, scratch: Path, draws: random.Random, tally: Tally, at_most: int) -> None:
    """Kill a job again and again, at random moments or when it saves something; then let it end."""
    place, expected = _fresh(scratch / "killed"), whole(scene, name, scratch)
    n_kills = 0
    for attempt in range(at_most + 1):
        lives = attempt == at_most
        at_save = draws.randrange(1, 12) if not lives and draws.random() < 0.5 else None
        process = _start(scene, name, place, scratch / "message", _dying(at_save))
        if not lives and at_save is None:
            time.sleep(draws.uniform(0.0, 1.0))
            process.kill()
        code = _wait(process)
        n_kills += code < 0
        if code >= 0:
            break
    tally.n_kills += n_kills
    if n_kills:
        _judge(f"{name}, killed", code, place, expected, scratch, tally, f"after {n_kills} kills")


def attack_by_full_disk(scene: Scene, name: str, scratch: Path, draws: random.Random, tally: Tally) -> None:
    """Let no file become larger than some size; then lift the limit and run the same job again."""
    place, expected = _fresh(scratch / "full"), whole(scene, name, scratch)
    limit = draws.choice([0, 5, 100, 1000, 5000, 20_000, 60_000])
    code = _wait(_start(scene, name, place, scratch / "message", partial(_limit_files, limit)))
    message = _message(scratch)
    if code == _TYPED:
        outcome = Outcome.DETECTED if str(scratch) in message else Outcome.UNNAMED
        tally.add(f"{name}, full disk", outcome, message)
    elif code != _DONE:
        tally.add(f"{name}, full disk", Outcome.UNTYPED, message)
    code = _wait(_start(scene, name, place, scratch / "message"))
    _judge(f"{name}, after a full disk", code, place, expected, scratch, tally, f"limit {limit}")


def attack_by_race(scene: Scene, name: str, scratch: Path, draws: random.Random, tally: Tally) -> None:
    """Let several processes do the same job in the same place: one does it, the others are told so."""
    place, expected = _fresh(scratch / "raced"), whole(scene, name, scratch)
    processes = []
    for index in range(3):
        processes.append(_start(scene, name, place, scratch / f"message-{index}"))
        time.sleep(draws.uniform(0, 0.2))
    codes = [_wait(process) for process in processes]
    if not set(codes) <= {_DONE, _BUSY} or _DONE not in codes:
        messages = " ".join((scratch / f"message-{index}").read_text() for index in range(3))
        tally.add(f"{name}, three at once", Outcome.UNTYPED, messages)
        return
    same = contents(place) == expected
    tally.add(f"{name}, three at once", Outcome.HARMLESS if same else Outcome.SILENT, f"codes {codes}")


def _judge(
    kind: str, code: int, place: Path, expected: dict[str, bytes], scratch: Path, tally: Tally, example: str
) -> None:
    """Count a job that was disturbed: it must have ended, with the same bytes as one that was not."""
    if code != _DONE:
        tally.add(kind, Outcome.UNTYPED, f"{example}: {_message(scratch)}")
        return
    found = contents(place)
    unlike = [name for name in {*found, *expected} if found.get(name) != expected.get(name)]
    tally.add(kind, Outcome.SILENT if unlike else Outcome.HARMLESS, f"{example}: {unlike}")


def _start(
    scene: Scene, name: str, place: Path, message: Path, prepare: Callable[[], object] | None = None
) -> BaseProcess:
    """Start a job in a process of its own; how it ended is its exit code and a message."""
    process = _SERVER.Process(target=_work, args=(scene, name, place, message, prepare))
    process.start()
    return process


def _work(scene: Scene, name: str, place: Path, message: Path, prepare: Callable[[], object] | None) -> None:
    """Do a job, and leave with an exit code that says how it ended."""
    code = _UNTYPED
    try:
        torch.set_num_threads(1)
        descriptor = os.open(message, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        text = ""
        try:
            if prepare is not None:
                prepare()
            scene.jobs()[name](place)
            code = _DONE
        except BusyError as error:
            code, text = _BUSY, str(error)
        except DmsaeError as error:
            code, text = _TYPED, str(error)
        except BaseException:
            text = traceback.format_exc(limit=-4)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        os.write(descriptor, text.encode("utf8", "replace"))
    finally:
        os._exit(code)


def _wait(process: BaseProcess) -> int:
    """Return the exit code of a process, negative for a signal; one that does not end is killed."""
    process.join(_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
    assert process.exitcode is not None
    return process.exitcode


def _dying(at_save: int | None) -> Callable[[], None] | None:
    return None if at_save is None else partial(_die_at_save, at_save)


def _die_at_save(n: int) -> None:
    """Kill this process just before or after its n-th rename: the moments at which files take their place."""
    really, count = os.replace, [0]

    def replace(source: Path, target: Path) -> None:
        count[0] += 1
        if count[0] == n:
            if n % 2:
                really(source, target)
            os.kill(os.getpid(), signal.SIGKILL)
        really(source, target)

    os.replace = replace  # type: ignore[assignment]


def _limit_files(size: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _message(scratch: Path) -> str:
    return (scratch / "message").read_text(encoding="utf8", errors="replace")


def _fresh(place: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    return place
