"""What ranks tell each other: sums in memory that they share, errors, facts."""

import os
import random
import time
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from dmsae.errors import DmsaeError, StoreError
from dmsae.ranks import settled
from dmsae.sae.comms import Comms
from dmsae.training.mesh import Group, require_same


class Summed(NamedTuple):
    """What one rank has after a sum over data ranks of tensors that it was given a place for."""

    held: Tensor
    sent: Tensor
    """The same, summed in a tensor that is sent."""
    is_shared: bool
    left_open: list[str]


def sum_held(comms: Comms, values: list[Tensor], blind: list[int], lacking: str = "posix_fallocate") -> Summed:
    """Sum one tensor of each data rank where `holding` puts it; ranks in `blind` have no memory to share."""
    value = values[comms.data.rank]
    with patch.object(os, lacking, side_effect=OSError) if comms.data.rank in blind else nullcontext():
        axis, (held,) = comms.data.holding([value])
    held.copy_(value)
    axis.sum_(held)
    assert isinstance(axis, Group)
    descriptors = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    memory = [name for name in (str(link.readlink()) for link in descriptors) if "memfd:dmsae" in name]
    return Summed(held.clone(), comms.data.sum_(value.clone()), bool(axis._held), memory)


def sum_often(comms: Comms, n_sums: int) -> list[float]:
    """Sum one tensor again and again while ranks dawdle; return how far each sum is from what it should be."""
    dawdling = random.Random(comms.both.rank)
    axis, (held,) = comms.data.holding([torch.zeros(300_000, dtype=torch.float64)])
    assert isinstance(axis, Group)
    assert axis._held
    off = []
    for turn in range(n_sums):
        time.sleep(dawdling.choice((0.0, 0.0, 0.002, 0.01)))
        held.fill_(turn * (comms.data.rank + 1))
        axis.sum_(held)
        time.sleep(dawdling.choice((0.0, 0.0, 0.002, 0.01)))
        off.append(float((held - turn * sum(range(1, comms.data.size + 1))).abs().max()))
    return off


def settle(comms: Comms, failing: list[int]) -> str:
    """Fail on some ranks, and return what each of them hears."""
    try:
        with settled(comms.both):
            if comms.both.rank in failing:
                raise StoreError(f"rank {comms.both.rank} is out of luck")
    except DmsaeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def same(comms: Comms, values: list[int]) -> str:
    """Return what each rank hears when they compare their settings."""
    try:
        require_same({"batch_size": values[comms.both.rank]}, comms.both)
    except DmsaeError as error:
        return str(error)
    return "nothing"
