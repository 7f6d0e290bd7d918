"""Which entries are among the largest, when they lie on several ranks: exactly those of one process.

The n-th largest value of the union is found by a radix search. Positive floating-point numbers are ordered as their
bits are; ranks count how many of theirs begin with each 11 bits, add up the counts, and go on with the entries that
begin as the n-th largest does. Three rounds give all bits of a float32, six those of a float64.
"""

import torch
from torch import Tensor

from dmsae.ranks import Axis

_DIGIT_BITS = 11
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def nth_largest(values: Tensor, n: int, axis: Axis) -> float:
    """Return the n-th largest value over all ranks of an axis, or 0 when there are fewer than n; none are negative."""
    if axis.size > 1:
        return _nth_largest_of_union(values, n, axis)
    if n > len(values):
        return 0.0
    return float(values.kthvalue(len(values) - n + 1).values)


def _nth_largest_of_union(values: Tensor, n: int, axis: Axis) -> float:
    # An entry that equals the scan's cut but for rounding can lie below zero when its bias is huge: never among the n.
    bits = values.clamp_min(0).view(_INTEGERS[values.dtype])
    found, left, high = 0, n, torch.iinfo(bits.dtype).bits - 1
    while high:
        low = max(0, high - _DIGIT_BITS)
        digits = (bits >> low) & ((1 << (high - low)) - 1)
        counts = axis.sum_(torch.bincount(digits, minlength=1 << (high - low)))
        at_least = counts.flip(0).cumsum(0).flip(0)
        digit = int((at_least >= left).sum()) - 1
        if digit < 0:
            return 0.0
        left -= int(at_least[digit] - counts[digit])
        bits, found, high = bits[digits == digit], found | digit << low, low
    return float(torch.tensor(found, dtype=bits.dtype).view(values.dtype))


def surplus_ties(order: Tensor, n_surplus: int, axis: Axis) -> Tensor:
    """Return which of a rank's ties are among the last `n_surplus` of all; `order` is their place in one process."""
    everyone = torch.cat(axis.gather(order)).sort().values
    return order >= everyone[len(everyone) - n_surplus]


def keep_largest_of_rows_(values_BS: Tensor, n: int, axis: Axis) -> Tensor:
    """Set to zero, in place, all but the n largest of each row over all ranks; equal ones of lower ranks stay.

    Each rank gives the largest of its own, so many that no other can be among the n. None are negative.
    """
    if axis.size == 1:
        return values_BS
    parts = axis.gather(values_BS.T.contiguous())
    everyone = torch.cat(parts)
    if len(everyone) <= n:
        return values_BS
    cut_B = everyone.topk(n, dim=0).values[-1]
    room_B = n - (everyone > cut_B).sum(0)
    for part in parts[: axis.rank]:
        room_B -= (part == cut_B).sum(0)
    ties_BS = values_BS == cut_B[:, None]
    keep_BS = (values_BS > cut_B[:, None]) | (ties_BS & (ties_BS.cumsum(1) <= room_B[:, None]))
    return values_BS.masked_fill_(~keep_BS, 0)
