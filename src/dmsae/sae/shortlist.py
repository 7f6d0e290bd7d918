"""Which pre-activations can exceed a cut: short-listed by a product in bfloat16, decided in float32.

Hardware that multiplies bfloat16 natively does so at twice the speed of float32 or more. Rounding moves an inner
product by less than c‖w‖‖x‖, so the product of rows that are a little longer,

    [w, c‖w‖, b] · [x, ‖x‖, 1]  ≥  w·x + b,

bounds every pre-activation from above, as long as float32 can hold the squares of their entries. Entries whose bound
reaches the cut are computed again in float32, one by one. So nothing is missed, and a value does not depend on how a
batch is cut into blocks, on the ranks that share it, or on the cut.
"""

import torch
from torch import Tensor

from dmsae.devices import multiplies_bfloat16
from dmsae.sae.sparse import Active, inner_products, true_positions

_UNIT = 2.0**-8
"""What rounding to bfloat16 changes a number by at most, as a share of it."""
_ROUNDED_UP = 1 + 2 * _UNIT
"""A number that is multiplied by this before it is rounded to bfloat16 does not get smaller."""
_MIN_ENTRIES = 1 << 20
"""Fewer pre-activations than this are not worth the effort."""
_MAX_KEPT = 1 / 24
"""Share of them that may be kept: an inner product by itself takes ten times as long as one in a matrix product."""


def is_faster(x_BD: Tensor, n_entries: int, n_keep: float) -> bool:
    """Return whether a short list saves time: on a CPU with bfloat16 products, where few of many entries are kept.

    On a GPU it has not been tried, and is not used.
    """
    if x_BD.device.type != "cpu" or x_BD.dtype != torch.float32 or n_entries < _MIN_ENTRIES:
        return False
    return n_keep <= _MAX_KEPT * n_entries and multiplies_bfloat16()


class Shortlist:
    """Scans the pre-activations of one batch."""

    def __init__(self, x_BD: Tensor, n_rows: int) -> None:
        """Take a batch of which blocks of at most `n_rows` latents will be scanned."""
        self.n_rows, self._x_BD = n_rows, x_BD
        n_tokens, d_model = x_BD.shape
        self._inputs = x_BD.new_ones(n_tokens, d_model + 3, dtype=torch.bfloat16)
        self._inputs[:, :d_model] = x_BD
        self._inputs[:, d_model] = torch.linalg.vector_norm(x_BD, dim=1).mul_(_ROUNDED_UP)
        # Both factors are rounded. So are sums of products, in float32: those of the short list, and the exact ones.
        summed = 4 * (d_model + 3) * torch.finfo(x_BD.dtype).eps
        self._slack = 2 * _UNIT + _UNIT**2 + summed
        self._bias_slack = 4 * _UNIT**2 + summed
        self._rows = self._inputs.new_empty(n_rows, d_model + 3)
        self._bounds = self._inputs.new_empty(n_rows, n_tokens)

    def product(self, rows_rD: Tensor, bias_r: Tensor) -> Tensor:
        """Return upper bounds of `rows @ x + bias`, [r, B]; the next call overwrites them."""
        rows, d_model = self._rows[: len(rows_rD)], rows_rD.shape[1]
        rows[:, :d_model] = rows_rD
        rows[:, d_model] = torch.linalg.vector_norm(rows_rD, dim=1).mul_(self._slack * _ROUNDED_UP)
        raised_r = bias_r + self._bias_slack * bias_r.abs()
        rows[:, d_model + 1] = raised_r
        rows[:, d_model + 2] = raised_r - rows[:, d_model + 1]  # the part of the bias that rounding took away
        return torch.mm(rows, self._inputs.T, out=self._bounds[: len(rows)])

    def entries_above(self, bounds_rB: Tensor, rows_rD: Tensor, bias_r: Tensor, cut: float, first: int) -> Active:
        """Return the entries of `rows @ x + bias` above `cut`, and those equal to it if it is positive."""
        n_tokens = bounds_rB.shape[1]
        # Rounding keeps the order of numbers, and the bits of positive ones, read as whole numbers, have it as well.
        lowest = torch.tensor(cut * (1 - 1e-6)).bfloat16().view(torch.int16).item()
        flat = true_positions(bounds_rB.view(torch.int16), lambda bits, out: torch.ge(bits, lowest, out=out))
        rows = torch.div(flat, n_tokens, rounding_mode="floor")
        tokens = flat.sub_(rows, alpha=n_tokens).int()
        bags = torch.searchsorted(rows, torch.arange(len(rows_rD) + 1, device=rows.device), out_int32=True)
        values = inner_products(tokens, bags, rows_rD, self._x_BD).add_(bias_r.index_select(0, rows))
        index = (values >= cut if cut > 0 else values > 0).nonzero().squeeze(1)
        latents = rows.add_(first).int()
        return Active(*(tensor.index_select(0, index) for tensor in (latents, tokens, values)))
