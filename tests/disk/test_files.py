"""Files are whole or absent; locks end with their process; space is asked for before it is used."""

import errno
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pytest
import torch
from safetensors.torch import load_file

from conftest import Recorder
from dmsae.disk.files import (
    append_text,
    canonical_hash,
    exclusive_lock,
    parse_json,
    read_json_value,
    require_space,
    sha256_of,
    user_path,
    write_bytes,
    write_json,
    write_tensors,
)
from dmsae.errors import BusyError, ConfigError, DiskSpaceError
from dmsae.seeds import derive_seed, generator


def test_write_replaces_whole_files_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    write_bytes(path, b"old")
    (path.parent / "file.tmp").write_bytes(b"a killed writer's leftover, longer than what comes next")
    write_bytes(path, b"new")
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskSpaceError, match=r"filled up while .*file .* run the same command again"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_other_write_errors_pass_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output error"):
        write_bytes(tmp_path / "file", b"new")


def test_tensors_round_trip_with_their_checksum(tmp_path: Path) -> None:
    tensors = {"x": torch.arange(6.0).view(2, 3).T, "n": torch.tensor([1, 2])}
    assert write_tensors(tmp_path / "t.safetensors", tensors) == sha256_of(tmp_path / "t.safetensors")
    loaded = load_file(tmp_path / "t.safetensors")
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_canonical_hash_sees_values_and_not_the_order_of_keys() -> None:
    assert canonical_hash({"a": 1, "b": [1, 2]}) == canonical_hash({"b": [1, 2], "a": 1})
    assert canonical_hash({"a": 1, "b": [1, 2]}) != canonical_hash({"a": 1, "b": [2, 1]})


def test_lock_keeps_out_others_and_ends_with_the_block(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with (
        exclusive_lock(path, "The thing"),
        pytest.raises(BusyError, match=f"The thing is in use by process {os.getpid()}"),
        exclusive_lock(path, "The thing"),
    ):
        pass
    with exclusive_lock(path, "The thing"):
        pass


def test_a_lock_can_be_waited_for(tmp_path: Path) -> None:
    first = ExitStack()
    first.enter_context(exclusive_lock(tmp_path / "lock", "The thing"))

    class Releasing(Recorder):
        def note(self, message: str) -> None:
            super().note(message)
            first.close()

    told = Releasing()
    with exclusive_lock(tmp_path / "lock", "The thing", told):
        assert (tmp_path / "lock").read_text() == str(os.getpid())
    assert told.notes == [f"The thing is in use by process {os.getpid()}: waiting for it."]


def test_lock_ends_with_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom dmsae.disk.files import exclusive_lock\n"
        "with exclusive_lock(Path(sys.argv[1]), 'it'):\n    print('held', flush=True)\n    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BusyError, match=f"process {holder.pid}"), exclusive_lock(path, "it"):
            pass
        holder.kill()
    with exclusive_lock(path, "it"):
        pass


def test_lock_on_a_removed_file_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening the file and locking it, the former holder removes it, as removing a store does."""
    path = tmp_path / "store" / "lock"
    really = fcntl.flock
    calls = []

    def slow_flock(file: IO[str], operation: int) -> None:
        calls.append(operation)
        if len(calls) == 1:
            path.unlink()
        really(file, operation)

    monkeypatch.setattr(fcntl, "flock", slow_flock)
    with exclusive_lock(path, "it"):
        assert len(calls) == 2
        with pytest.raises(BusyError), exclusive_lock(path, "it"):
            pass


def test_space_is_measured_where_the_directory_will_be(tmp_path: Path) -> None:
    require_space(tmp_path / "not" / "yet", 1, "It")
    with pytest.raises(DiskSpaceError, match=r"It needs 1\.0 EB and 67\.1 MB must stay free, but only .* are free"):
        require_space(tmp_path / "not" / "yet", 10**18, "It")


def test_seeds_depend_on_every_part_of_their_purpose() -> None:
    purposes: list[tuple[int | str, ...]] = [(0, "a"), (0, "b"), (1, "a"), ("0", "a"), (0, "a", 1), (0, "a1")]
    assert len({derive_seed(*purpose) for purpose in purposes}) == len(purposes)
    assert torch.equal(torch.rand(3, generator=generator(0, "a")), torch.rand(3, generator=generator(0, "a")))


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_temporary_and_lock_files_never_write_through_a_link(
    tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("all of it")
    link(precious, tmp_path / "file.tmp")
    write_bytes(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert not (tmp_path / "file").is_symlink()
    link(precious, tmp_path / ".lock")
    with pytest.raises(BusyError, match=r"\.lock is not a lock file"), exclusive_lock(tmp_path / ".lock", "It"):
        pass
    assert precious.read_text() == "all of it"


def test_what_is_no_lock_is_not_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / "poetry.lock").write_text("[[package]]\n" * 10)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("poetry.lock", "pipe", "folder"):
        with pytest.raises(BusyError, match="is not a lock file"), exclusive_lock(tmp_path / name, "It"):
            pass
    assert (tmp_path / "poetry.lock").read_text() == "[[package]]\n" * 10


def test_a_full_disk_is_named_also_when_a_line_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskSpaceError, match=r"filled up while .*shards\.jsonl"):
        append_text(tmp_path / "shards.jsonl", "line\n", sync=True)


def test_names_that_are_not_utf8_are_written_and_read_back(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    write_json(tmp_path / "a.json", {"source": name, "é": 1})
    assert read_json_value(tmp_path / "a.json") == {"source": name, "é": 1}


def test_the_home_of_nobody_is_an_error() -> None:
    with pytest.raises(ConfigError, match="there is no such user"):
        user_path("~nobody-of-that-name/model")


def test_a_lock_on_a_full_disk_is_named(tmp_path: Path) -> None:
    """A limit on file sizes stands in for a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(DiskSpaceError, match=r"filled up while .*\.lock"), exclusive_lock(tmp_path / ".lock", "It"):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '["\\"' + "[" * 100_000])
def test_deep_json_is_refused_whatever_the_recursion_limit(text: str) -> None:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000_000)  # as some libraries do; the parser in C would then overrun the stack
    try:
        with pytest.raises(ValueError, match=r"nested too deeply|Expecting|Invalid|Unterminated"):
            parse_json(text)
    finally:
        sys.setrecursionlimit(before)


def test_brackets_in_text_are_no_depth() -> None:
    value = {"text": "[{" * 1000 + '\\"[', "rows": [[1], [2]] * 200}
    assert parse_json(json.dumps(value)) == value
