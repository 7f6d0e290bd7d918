"""Files that are either whole or absent: atomic writes, checksums, locks."""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.filesize import decimal as human_bytes

from dmsae.errors import BusyError, ConfigError, DiskSpaceError
from dmsae.progress import Progress

if TYPE_CHECKING:  # torch is slow to import, and many commands need only the files
    from torch import Tensor

_CHUNK_BYTES = 1 << 22
_RESERVE_BYTES = 64 << 20
"""How much of a disk stays free."""
_LOCK_BYTES = 32
"""How long a lock file can be: it holds the number of a process."""
_DEEPEST = 100
"""How deeply JSON may be nested."""
_BRACKET_OR_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"|[][{}]', re.DOTALL)
_JSON_BYTES = 1 << 28
"""How large a file of facts may be."""
_SECONDS_BETWEEN_TRIES = 0.2


def user_path(text: str) -> Path:
    """Return the path that a user wrote, `~` meaning their home; that of nobody known is an error."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{text!r}: there is no such user, and so no home directory. Give the whole path.") from error


def without_places(value: Any) -> Any:
    """Return a JSON value in which every absolute path has been cut down to its last part, to be given to others."""
    if isinstance(value, str):
        return Path(value).name if Path(value).is_absolute() else value
    if isinstance(value, Mapping):
        return {name: without_places(one) for name, one in value.items()}
    return [without_places(one) for one in value] if isinstance(value, list | tuple) else value


def open_regular(path: Path) -> IO[bytes]:
    """Open a file for reading; anything else under that name (a pipe, a device) is an `OSError`, never waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "It is not a regular file", os.fspath(path))
    return os.fdopen(descriptor, "rb")


def read_json_value(path: Path) -> Any:
    """Return what a JSON file holds; one that cannot be read is an `OSError`, one that is not JSON a `ValueError`."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > _JSON_BYTES:
            raise ValueError(f"it has {human_bytes(size)}; at most {human_bytes(_JSON_BYTES)} are read as JSON")
        text = file.read(size).decode("utf8")
    return parse_json(text)


def parse_json(text: str) -> Any:
    """Return what JSON text says; anything that is not JSON, or nested deeply, is a `ValueError`.

    The depth is found before parsing. The parser would stop at the interpreter's recursion limit, which libraries raise
    beyond what the stack can hold: then it ends the process.
    """
    if text.count("[") + text.count("{") > _DEEPEST and _depth(text) > _DEEPEST:
        raise ValueError("it is nested too deeply")
    return json.loads(text)


def _depth(text: str) -> int:
    depth = deepest = 0
    for found in _BRACKET_OR_STRING.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found.group()[0], 0)
        deepest = max(deepest, depth)
    return deepest


def sha256_of(path: Path) -> str:
    """Return the hex SHA-256 of a file, read in bounded memory."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def fsync_directory(path: Path) -> None:
    """Make renames inside a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part of it."""
    with replacing(path, len(data)) as file:
        file.write(data)


@contextmanager
def replacing(path: Path, size_bytes: int) -> Iterator[IO[bytes]]:
    """Yield a file to write to, which takes its place in one piece when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name is fixed, not random: a killed writer's leftover is overwritten by the next one. Writers hold a lock.
    temporary = path.with_name(path.name + ".tmp")
    try:
        with _full_disk_named(path, size_bytes), _created(temporary) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except DiskSpaceError:
        temporary.unlink(missing_ok=True)
        raise
    temporary.replace(path)
    fsync_directory(path.parent)


def append_text(path: Path, text: str, sync: bool = False) -> None:
    """Add text to the end of a file; with `sync` it is on the disk when this returns."""
    with _full_disk_named(path, len(text)), path.open("a", encoding="utf8") as file:
        file.write(text)
        file.flush()
        if sync:
            os.fsync(file.fileno())


@contextmanager
def _full_disk_named(path: Path, size_bytes: int) -> Iterator[None]:
    """Turn the error of a full disk, which names no file, into one that does."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise DiskSpaceError(
            f"The disk filled up while {path} ({human_bytes(size_bytes)}) was written. Free some space and run the "
            "same command again: what was finished is kept."
        ) from error


def _created(path: Path) -> IO[bytes]:
    """Open a new file for writing. Whatever had its name is unlinked, never written through: it may be a link."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "wb")


def write_json(path: Path, value: Any, indent: int | None = 2) -> None:
    """Write a value as JSON, atomically; without an indent on one line."""
    try:
        data = json.dumps(value, indent=indent, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # the name of a file that is not UTF-8
        data = json.dumps(value, indent=indent).encode()
    write_bytes(path, data + b"\n")


def write_tensors(path: Path, tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str] | None = None) -> str:
    """Write tensors as safetensors, atomically, and return the file's SHA-256."""
    import safetensors.torch

    data = safetensors.torch.save(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, dict(metadata) if metadata else None
    )
    write_bytes(path, data)
    return hashlib.sha256(data).hexdigest()


def canonical_hash(value: Any) -> str:
    """Return a hex SHA-256 of a JSON-like value that does not depend on the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@contextmanager
def exclusive_lock(path: Path, what: str, waiting: Progress | None = None) -> Iterator[None]:
    """Hold a lock that ends with the process, however it ends; raise `BusyError` when another process has it.

    Given a `Progress` that can say so, wait for that process instead.
    """
    with _locked(path, what, waiting) as file:
        with _full_disk_named(path, _LOCK_BYTES):  # without a buffer, which would be written once more when it closes
            os.ftruncate(file.fileno(), 0)
            os.pwrite(file.fileno(), str(os.getpid()).encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(file.fileno(), 0)


def _locked(path: Path, what: str, waiting: Progress | None) -> IO[str]:
    """Return the open lock file, locked."""
    has_told = False
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _open_lock(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The former holder may have removed the file meanwhile, and a lock on a removed file keeps nobody out.
            if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                return file
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            if waiting is not None:
                if not has_told:
                    waiting.note(f"{what} is in use by process {holder}: waiting for it.")
                has_told = True
                time.sleep(_SECONDS_BETWEEN_TRIES)
                continue
            raise BusyError(
                f"{what} is in use by process {holder}. Wait until it has finished, or stop it, and run the same "
                f"command again: nothing has been changed. (Lock: {path})"
            ) from None
        file.close()


def _open_lock(path: Path) -> IO[str]:
    """Open a lock file, made if it is missing. Another kind of file under its name is refused, and left as it is."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        raise BusyError(f"{path} is not a lock file of dmsae. Remove it, or use another directory.") from error
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1 or facts.st_size > _LOCK_BYTES:
        os.close(descriptor)
        raise BusyError(f"{path} is not a lock file of dmsae. Remove it, or use another directory.")
    return os.fdopen(descriptor, "r+", encoding="utf8", errors="replace")


def require_space(directory: Path, needed_bytes: int, what: str) -> None:
    """Raise `DiskSpaceError` unless the disk that holds `directory` can take `needed_bytes` and a little more."""
    existing = directory
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if needed_bytes + _RESERVE_BYTES > free:
        raise DiskSpaceError(
            f"{what} needs {human_bytes(needed_bytes)} and {human_bytes(_RESERVE_BYTES)} must stay free, but only "
            f"{human_bytes(free)} are free under {existing}. "
            "Ask for fewer tokens, choose a smaller dtype, or use a larger disk (--root)."
        )
