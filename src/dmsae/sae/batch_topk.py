"""BatchTopK: which pre-activations of a batch are the largest, exactly.

The encoder product is computed block by block, because every entry is needed to know which win. A scan starts a little
under the threshold of the batch before, so that few entries are candidates; the n-th largest of these decides.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dmsae.sae.comms import ALONE, Comms
from dmsae.sae.selection import nth_largest, surplus_ties
from dmsae.sae.shortlist import Shortlist, is_faster
from dmsae.sae.sparse import Active, true_positions

BLOCK_ELEMENTS = 1 << 22
"""Pre-activations held at a time: few enough to stay in cache, enough rows for the product to run at full speed."""

DENSE_ELEMENTS = 1 << 18
"""Pre-activations looked into at a time while there is no threshold to start from: half of them may be candidates, each
of which takes several times the memory of a pre-activation."""

PRUNE_AT = 3
"""Candidates are thinned out when there are this many times as many as can survive."""

_WARM_START = 0.95
"""The scan starts a little under the last threshold: a scan that starts too high has to be repeated."""


@torch.no_grad()
def select_top(
    x_BD: Tensor,
    encoders: Sequence[Tensor],
    bias_K: Tensor,
    n_keep: int,
    warm_start: float | None = None,
    first_latent: int = 0,
    comms: Comms = ALONE,
) -> Active:
    """Return the `n_keep` largest positive entries of `encoders @ x + bias`, or all the positive ones when fewer.

    `encoders` are stacked blocks of rows, of which the first belongs to `first_latent`. Of equal entries the first
    survive. `warm_start`, the smallest survivor of a similar batch, saves work and never changes the result. On a mesh
    each rank gets its own of the `n_keep` largest entries of all ranks.
    """
    # Decided by the whole mesh: values must not depend on how many ranks share a batch.
    in_short = is_faster(x_BD, sum(map(len, encoders)) * len(x_BD) * comms.both.size, n_keep)
    longest = max(x_BD.shape) if in_short else len(x_BD)  # a short list holds a block of rows, too
    n_rows = min(max(1, BLOCK_ELEMENTS // max(1, longest)), max(map(len, encoders)))
    scanner = (Shortlist if in_short else _FullProduct)(x_BD, n_rows)
    cut = _WARM_START * warm_start if warm_start is not None and 0 < warm_start < float("inf") else 0.0
    candidates = _scan(scanner, x_BD, encoders, bias_K, n_keep, cut)
    threshold = nth_largest(candidates.values_S, n_keep, comms.both)
    if cut > 0 and not threshold > cut:
        candidates = _scan(scanner, x_BD, encoders, bias_K, n_keep, 0.0)
        threshold = nth_largest(candidates.values_S, n_keep, comms.both)
    candidates.latents_S.add_(first_latent)
    return _keep_largest(candidates, threshold, n_keep, len(x_BD), comms)


class _FullProduct:
    """Scans the pre-activations of one batch by the encoder product itself."""

    def __init__(self, x_BD: Tensor, n_rows: int) -> None:
        self.n_rows = n_rows
        self._x_BD, self._buffer = x_BD, x_BD.new_empty(n_rows, len(x_BD))

    def product(self, rows_rD: Tensor, _bias_r: Tensor) -> Tensor:
        """Return `rows @ x`, [r, B]; the next call overwrites it."""
        return torch.mm(rows_rD, self._x_BD.T, out=self._buffer[: len(rows_rD)])

    def entries_above(self, pre_rB: Tensor, _rows_rD: Tensor, bias_r: Tensor, cut: float, first: int) -> Active:
        """Return the entries of `pre + bias` above `cut`; when `cut` > 0, also some that equal it but for rounding."""
        n_tokens = pre_rB.shape[1]
        floor = -bias_r
        if cut > 0:
            slack = 8 * torch.finfo(pre_rB.dtype).eps
            floor = floor + cut - slack * (bias_r.abs() + cut)
        flat = true_positions(pre_rB, lambda pre, out: torch.gt(pre, floor[:, None], out=out))
        rows = torch.div(flat, n_tokens, rounding_mode="floor")
        values = pre_rB.view(-1).index_select(0, flat).add_(bias_r.index_select(0, rows))
        tokens = flat.sub_(rows, alpha=n_tokens).int()
        return Active(rows.add_(first).int(), tokens, values)


def _scan(
    scanner: Shortlist | _FullProduct,
    x_BD: Tensor,
    encoders: Sequence[Tensor],
    bias_K: Tensor,
    n_keep: int,
    cut: float,
) -> Active:
    """Return every entry above `cut` that can be among the `n_keep` largest, and maybe a few others."""
    parts: list[Active] = []
    n_found = 0
    for first, rows_rD, product_rB in _pieces(scanner, x_BD, encoders, bias_K, cut):
        bias_r = bias_K[first : first + len(rows_rD)]
        parts.append(scanner.entries_above(product_rB, rows_rD, bias_r, cut, first))
        n_found += len(parts[-1].values_S)
        if n_found > PRUNE_AT * n_keep:
            # What the blocks so far hold above their n_keep-th largest is all that later blocks have to beat.
            cut = max(cut, nth_largest(torch.cat([part.values_S for part in parts]), n_keep, ALONE.both))
            parts = [_take(part, part.values_S >= cut) for part in parts]
            n_found = sum(len(part.values_S) for part in parts)
    return _concatenate(parts) if parts else _none_of(x_BD)


def _pieces(
    scanner: Shortlist | _FullProduct, x_BD: Tensor, encoders: Sequence[Tensor], bias_K: Tensor, cut: float
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (first latent, encoder rows, their product): whole blocks, or pieces without a cut, which many exceed.

    A block is overwritten by the next.
    """
    in_piece = max(1, DENSE_ELEMENTS // max(1, len(x_BD)))
    first = 0
    for encoder in encoders:
        for rows_rD in torch.split(encoder, scanner.n_rows):
            if not len(rows_rD):
                continue
            product_rB = scanner.product(rows_rD, bias_K[first : first + len(rows_rD)])
            step = len(rows_rD) if cut > 0 else in_piece
            for start in range(0, len(rows_rD), step):
                piece = slice(start, start + step)
                yield first + start, rows_rD[piece], product_rB[piece]
            first += len(rows_rD)


def _keep_largest(candidates: Active, threshold: float, n_keep: int, n_tokens: int, comms: Comms) -> Active:
    """Return the candidates above the `n_keep`-th largest, and of those equal to it the first, `n_keep` in all."""
    values = candidates.values_S
    if threshold <= 0:
        return _take(candidates, values > 0)
    keep = values >= threshold
    if (surplus := int(comms.both.sum_(keep.sum())) - n_keep) > 0:
        ties = (values == threshold).nonzero().squeeze(1)
        latents = candidates.latents_S[ties].long() * comms.latents.size + comms.latents.rank
        tokens = candidates.tokens_S[ties] + comms.data.rank * n_tokens
        order = latents * (n_tokens * comms.data.size) + tokens
        keep[ties[surplus_ties(order, surplus, comms.both)]] = False
    return _take(candidates, keep)


def _take(entries: Active, mask: Tensor) -> Active:
    index = mask.nonzero().squeeze(1)
    return Active(*(tensor.index_select(0, index) for tensor in entries))


def _none_of(x_BD: Tensor) -> Active:
    none = torch.empty(0, dtype=torch.int32, device=x_BD.device)
    return Active(none, none.clone(), x_BD.new_empty(0))


def _concatenate(parts: Sequence[Active]) -> Active:
    return Active(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
