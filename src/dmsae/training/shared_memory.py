"""Tensors that ranks on one machine sum in memory which all of them see, instead of sending them through sockets.

Each rank has one such tensor and adds up its own stretch of everybody's. The memory belongs to no file: it is gone with
the processes, however they end. Ranks reach each other's through /proc, and where one cannot (another machine, another
container, another system) all of them do without.
"""

import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.ranks import Axis

_NONCE = 64
"""Bytes at the end of the memory, by which a rank knows that it has opened the right one."""
_BLOCK = 1 << 17
"""Entries that are added at a time: few enough to be in cache when they are written back."""


class _Place(NamedTuple):
    """Where a rank's memory is."""

    path: str
    n_bytes: int
    nonce: bytes


def shared_among(ranks: Axis, like: Tensor) -> list[Tensor] | None:
    """Return a tensor of zeros of each rank, in memory that all ranks see; None when one of them cannot."""
    n_bytes = like.numel() * like.element_size()
    with _offered(n_bytes if like.device.type == "cpu" else 0) as mine:
        seen = [_opened(place) for place in ranks.of_each(mine)]
        everywhere = all(ranks.of_each(None not in seen))
    return [one[:n_bytes].view(like.dtype).view_as(like) for one in seen if one is not None] if everywhere else None


def add_up_(parts: Sequence[Tensor], rank: int) -> None:
    """Replace this rank's stretch of every part by the sum over them; no other rank may touch it meanwhile."""
    flat = [part.view(-1) for part in parts]
    n_each = -(-len(flat[0]) // len(flat))
    stop = min((rank + 1) * n_each, len(flat[0]))
    for low in range(rank * n_each, stop, _BLOCK):
        block = slice(low, min(low + _BLOCK, stop))
        total, *others = (part[block] for part in flat)
        for other in others:
            total += other
        for other in others:
            other.copy_(total)


@contextmanager
def _offered(n_bytes: int) -> Iterator[_Place | None]:
    """Offer memory of this process, which others can open during the block; None where it cannot be had."""
    with ExitStack() as held:
        yield _reserved(n_bytes, held) if n_bytes and sys.platform == "linux" else None


def _reserved(n_bytes: int, held: ExitStack) -> _Place | None:
    """Return memory that is closed with a stack; what is mapped by then stays."""
    nonce = secrets.token_bytes(_NONCE)
    try:
        descriptor = os.memfd_create("dmsae")
        held.callback(os.close, descriptor)
        os.posix_fallocate(descriptor, 0, n_bytes + _NONCE)
        os.pwrite(descriptor, nonce, n_bytes)
    except OSError:
        return None
    return _Place(f"/proc/{os.getpid()}/fd/{descriptor}", n_bytes, nonce)


def _opened(place: _Place | None) -> Tensor | None:
    """Return the bytes at a place, or None when they are not to be seen from here."""
    if place is None:
        return None
    try:
        descriptor = os.open(place.path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            nonce = os.pread(descriptor, _NONCE, place.n_bytes)  # on another machine this may be anybody's file
        finally:
            os.close(descriptor)
        if nonce != place.nonce:
            return None
        return torch.from_file(place.path, shared=True, size=place.n_bytes + _NONCE, dtype=torch.uint8)
    except (OSError, RuntimeError):
        return None
