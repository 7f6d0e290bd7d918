"""Damage to files of ours: flips, truncations, deletions, and files of another place."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from attack.scene import Scene, contents, copied
from attack.tally import Tally
from conftest import Recorder
from dmsae.activations.store import Store
from dmsae.disk import layout
from dmsae.progress import SILENT, Bar

_IRRELEVANT = (layout.LOCK, layout.TIMING)


class _Stopped(Exception):
    """Raised where a run is to stop."""


class _Counter:
    """A bar that stops the work after some steps."""

    def __init__(self, left: int) -> None:
        self._left = left

    def advance(self, count: int, note: str = "") -> None:
        self._left -= count
        if self._left < 0:
            raise _Stopped

    def skip(self, count: int) -> None:
        self._left -= count


class _StopAfter(Recorder):
    """A `Progress` that stops the work after some steps of training."""

    def __init__(self, n_steps: int) -> None:
        super().__init__()
        self._counter = _Counter(n_steps)

    @contextmanager
    def bar(self, what: str, total: int, unit: str) -> Iterator[Bar]:
        if what == "train":
            yield self._counter
            return
        with SILENT.bar(what, total, unit) as bar:
            yield bar


def damage_file(path: Path, draws: random.Random) -> str:
    """Damage a file in place, and return how."""
    data = bytearray(path.read_bytes())
    how = draws.choice(["flip", "flip", "flip", "truncate", "empty", "zero"]) if data else "append"
    if how == "flip":
        at = draws.randrange(8 * len(data))
        data[at // 8] ^= 1 << at % 8
    elif how == "truncate":
        del data[draws.randrange(len(data)) :]
    elif how == "empty":
        data.clear()
    elif how == "zero":
        start = draws.randrange(len(data))
        stop = min(len(data), start + draws.choice([1, 16, 512]))
        data[start:stop] = bytes(stop - start)
    else:
        data += b"x"
    path.write_bytes(data)
    return how


def attack_store(scene: Scene, scratch: Path, draws: random.Random, tally: Tally) -> None:
    """Damage one file of a sealed store and read all of it."""
    place = copied(scene.store.path, scratch / scene.store.key)
    path = _choose(place, draws)
    how = damage_file(path, draws)
    tally.attempt(f"sealed store, {how}", path.name, lambda: _read_all(place), _read_all(scene.store.path))


def attack_unfinished_store(scene: Scene, scratch: Path, draws: random.Random, tally: Tally) -> None:
    """Damage one file of a store in the making, and finish it."""
    root = scratch / "unfinished"
    place = copied(scene.store.path, root / scene.store.key)
    (place / layout.STORE_COMPLETE).unlink()
    path = place / layout.STORE_JOURNAL if draws.random() < 0.6 else _choose(place, draws)
    how = damage_file(path, draws)
    _finish_and_compare(
        f"unfinished store, {how}", path, lambda _, seen: scene.harvest(root, seen), place, scene.store.path, tally
    )


def attack_run(scene: Scene, scratch: Path, draws: random.Random, tally: Tally) -> None:
    """Damage, remove or exchange one file of a finished run, and run the same command again."""
    place = copied(scene.run, scratch / "run")
    path = _choose(place, draws)
    twins = [other for other in place.rglob(path.name) if other != path and other.parent.name == path.parent.name]
    how = draws.choice(["damage", "damage", "damage", "delete", "swap"])
    if how == "swap" and twins:
        _exchange(path, draws.choice(twins))
    elif how == "delete":
        path.unlink()
    else:
        how = damage_file(path, draws)
    _finish_and_compare(f"finished run, {how}", path, scene.distill, place, scene.run, tally)


def attack_unfinished_run(scene: Scene, scratch: Path, draws: random.Random, tally: Tally) -> None:
    """Stop a run at some step, damage one of its files, and resume it."""
    place = scratch / "half"
    shutil.rmtree(place, ignore_errors=True)
    try:
        scene.distill(place, _StopAfter(draws.randrange(2, 110)))
    except _Stopped:
        path = _choose(place, draws)
        how = damage_file(path, draws)
        _finish_and_compare(f"unfinished run, {how}", path, scene.distill, place, scene.run, tally)


def _finish_and_compare(
    kind: str, path: Path, work: Callable[[Path, Recorder], None], place: Path, whole: Path, tally: Tally
) -> None:
    """Run a command again on what is damaged: what it then holds must be as it should be."""
    expected, name, seen = contents(whole), str(path.relative_to(place)), Recorder()

    def use() -> dict[str, bytes]:
        work(place, seen)
        found = contents(place)
        return found | {name: expected[name]} if _same(found.get(name, b""), expected.get(name, b"")) else found

    tally.attempt(kind, path.name.split(".")[0], use, expected, seen.warnings)


def _same(found: bytes, expected: bytes) -> bool:
    """Return whether two files say the same: a flip may have hit a blank between two facts."""
    try:
        return bool(json.loads(found) == json.loads(expected))
    except ValueError:
        return found == expected


def _choose(place: Path, draws: random.Random) -> Path:
    return draws.choice([path for path in sorted(place.rglob("*")) if path.is_file() and path.name not in _IRRELEVANT])


def _exchange(path: Path, other: Path) -> None:
    """Put a file, and the one beside it that belongs to it, in the place of another."""
    for source in other.parent.glob(f"{other.stem}.*"):
        shutil.copy(source, path.parent / source.name)


def _read_all(store: Path) -> list[dict[str, bytes]]:
    opened = Store.open(store)
    files = [opened.read(record) for record in opened.records]
    return [{name: tensor.numpy().tobytes() for name, tensor in file.items()} for file in files]
