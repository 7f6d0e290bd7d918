"""Exact quantiles of many streams at once, from the few largest values of each.

A high quantile of N values needs only the N − ⌊q·(N − 1)⌋ largest, about (1 − q)·N of them. The values here are not
negative and mostly zero, so what was never added counts as zero. The largest of several processes together are among
the largest of each, so they are found exactly from what each has kept.
"""

import math

import torch
from torch import Tensor

from dmsae.config import require
from dmsae.ranks import Axis


def n_above(quantile: float, n_samples: int) -> int:
    """Return how many of the largest of `n_samples` values the interpolated quantile depends on."""
    return n_samples - math.floor(quantile * (n_samples - 1)) if n_samples else 0


def require_quantile(quantile: float) -> None:
    """Raise `ConfigError` unless `quantile` lies in [0, 1]."""
    require(0 <= quantile <= 1, "quantile", quantile, "lie between 0 and 1")


class LargestValues:
    """The largest values of each of R rows, of at most `n_samples` values that each row will ever see."""

    def __init__(self, n_rows: int, quantile: float, n_samples: int, like: Tensor, keeps_owners: bool = False) -> None:
        """Make room for `quantile` of `n_samples` values per row, on the device and in the dtype of `like`.

        With `keeps_owners`, each value keeps the number of its owner, and twice as many are kept: a resample of the
        owners may reach deeper than the samples themselves.
        """
        require_quantile(quantile)
        self.quantile = quantile
        self._largest = like.new_zeros(n_rows, 0)
        self._owners = torch.zeros(n_rows, 0, dtype=torch.int32, device=like.device) if keeps_owners else None
        self._pending: list[Tensor] = []
        self._pending_owners: list[Tensor] = []
        self._n_pending = 0
        # One to spare: for a quantile within rounding of 1, fewer samples may need one value more.
        n_needed = n_above(quantile, n_samples) + 1
        self._n_kept = min(n_samples, 2 * n_needed + 8 if keeps_owners else n_needed)

    def add(self, values_RB: Tensor, owners_B: Tensor | None = None) -> None:
        """Take in some values, none negative, of every row; the tensor is kept until it has been looked through."""
        assert (owners_B is None) == (self._owners is None), "owners are given with every value, or with none"
        self._pending.append(values_RB)
        if owners_B is not None:
            self._pending_owners.append(owners_B.to(values_RB.device, torch.int32))
        self._n_pending += values_RB.shape[1]
        # Looking through as many new values as are kept makes the price per value independent of how many are kept.
        if self._n_pending >= self._n_kept:
            self._prune()

    def merge_(self, everyone: Axis) -> None:
        """Keep the largest of what all ranks of an axis have kept: those of all values that were added on any of them.

        Of equal values, those stay that `torch.topk` happens to keep; it may differ from one process in their owners.
        """
        self._prune()
        if everyone.size == 1:
            return
        values = torch.cat(everyone.gather(self._largest.T.contiguous())).T
        self._largest, places = values.topk(min(self._n_kept, values.shape[1]), dim=1)
        if self._owners is not None:
            self._owners = torch.cat(everyone.gather(self._owners.T.contiguous())).T.gather(1, places)

    def quantiles(self, n_samples_R: Tensor) -> Tensor:
        """Return each row's quantile of `n_samples_R` values, in float64, linearly interpolated; 0 for a row of none.

        Values that were not added are zeros. Equals `torch.quantile` in float64.
        """
        self._prune()
        n = n_samples_R.to(self._largest.device, torch.float64)
        rank = self.quantile * (n - 1).clamp(min=0)
        low = rank.floor()
        at_low = self._nth_from_below(n, low)
        at_high = self._nth_from_below(n, low + 1)
        return torch.lerp(at_low, at_high, rank - low)

    def with_owners(self) -> tuple[Tensor, Tensor]:
        """Return the largest values of each row, falling, and the owner of each."""
        self._prune()
        assert self._owners is not None, "made without owners"
        return self._largest, self._owners

    def _nth_from_below(self, n: Tensor, index: Tensor) -> Tensor:
        """Return what stands at `index`, or last, when a row's n values are sorted upwards; 0 for a row of none."""
        if not self._largest.shape[1]:
            return torch.zeros_like(index)
        from_above = (n - 1 - index).clamp(min=0).to(torch.int64)
        known = (from_above < self._largest.shape[1]) & (n > 0)
        values = self._largest.gather(1, from_above.where(known, 0)[:, None]).squeeze(1)
        return values.double().where(known, 0.0)

    def _prune(self) -> None:
        if not self._pending:
            return
        values = torch.cat([self._largest, *self._pending], dim=1)
        self._largest, places = values.topk(min(self._n_kept, values.shape[1]), dim=1)
        if self._owners is not None:
            owners = torch.cat([self._owners, torch.cat(self._pending_owners).expand(len(values), -1)], dim=1)
            self._owners = owners.gather(1, places)
        self._pending, self._pending_owners, self._n_pending = [], [], 0
