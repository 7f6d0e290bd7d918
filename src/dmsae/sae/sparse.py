"""Exact sparse linear algebra for BatchTopK: select, decode, and the gradients of both.

Of B·K pre-activations only k·B survive, so everything but the encoder product runs over the survivors. They are held
latent by latent (`Active`). Sums of rows are `embedding_bag`s: a bag per token to decode, a bag per latent for the
gradients. Inner products of rows, one per survivor, are a `sampled_addmm`.
"""

import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from dmsae.sae.comms import ALONE, Comms
from dmsae.sae.selection import nth_largest, surplus_ties

BLOCK_ELEMENTS = 1 << 22
"""Pre-activations held at a time: few enough to stay in cache, enough rows for the product to run at full speed."""

DENSE_ELEMENTS = 1 << 18
"""Pre-activations looked into at a time while there is no threshold to start from: half of them may be candidates, each
of which takes several times the memory of a pre-activation."""

GRADIENT_ELEMENTS = 1 << 20
"""Gradients computed at a time; again so that they are still in cache when they are read."""

_WARM_START = 0.95
"""The scan starts a little under the last threshold: a scan that starts too high has to be repeated."""

PRUNE_AT = 3
"""Candidates are thinned out when there are this many times as many as can survive."""

with warnings.catch_warnings():
    # The first CSR tensor of a process makes torch say that their support is in beta. Let this one be the first.
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor(torch.tensor([0]), torch.tensor([]), torch.tensor([]), (0, 0), check_invariants=False)


class Active(NamedTuple):
    """The survivors of a selection: entries of a sparse [K, B] matrix, by latent, then by token."""

    latents_S: Tensor
    tokens_S: Tensor
    values_S: Tensor


class Gradients(NamedTuple):
    """Gradients of some latents."""

    rows: slice | Tensor
    """Which latents: a range, or their indices."""
    decoder: Tensor
    """Decoder gradient [rows, D], not yet projected."""
    parallel: Tensor
    """Inner product [rows] of each decoder row with its gradient."""
    encoder: Tensor | None
    """Encoder gradient [rows, D]; none for frozen rows."""
    bias: Tensor | None
    """Encoder bias gradient [rows]; none for detectors."""


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
    cut = _WARM_START * warm_start if warm_start is not None and 0 < warm_start < float("inf") else 0.0
    candidates = _scan(x_BD, encoders, bias_K, n_keep, cut)
    threshold = nth_largest(candidates.values_S, n_keep, comms.both)
    if cut > 0 and not threshold > cut:
        candidates = _scan(x_BD, encoders, bias_K, n_keep, 0.0)
        threshold = nth_largest(candidates.values_S, n_keep, comms.both)
    candidates.latents_S.add_(first_latent)
    return _keep_largest(candidates, threshold, n_keep, len(x_BD), comms)


def _scan(x_BD: Tensor, encoders: Sequence[Tensor], bias_K: Tensor, n_keep: int, cut: float) -> Active:
    """Return every entry above `cut` that can be among the `n_keep` largest, and maybe a few others."""
    parts: list[Active] = []
    n_found = 0
    for first, pre_rB in _pieces(x_BD, encoders, cut):
        bias = bias_K[first : first + len(pre_rB)]
        parts.append(_entries_above(pre_rB, bias, cut, first))
        n_found += len(parts[-1].values_S)
        if n_found > PRUNE_AT * n_keep:
            # What the blocks so far hold above their n_keep-th largest is all that later blocks have to beat.
            cut = max(cut, nth_largest(torch.cat([part.values_S for part in parts]), n_keep, ALONE.both))
            parts = [_take(part, part.values_S >= cut) for part in parts]
            n_found = sum(len(part.values_S) for part in parts)
    return _concatenate(parts) if parts else _none_of(x_BD)


def _pieces(x_BD: Tensor, encoders: Sequence[Tensor], cut: float) -> Iterator[tuple[int, Tensor]]:
    """Yield (first latent, pre-activations): whole blocks, or pieces of them without a cut, which many would exceed."""
    n_rows = max(1, DENSE_ELEMENTS // max(1, len(x_BD)))
    for first, pre_rB in _pre_activation_blocks(x_BD, encoders):
        for start in range(0, len(pre_rB), n_rows if cut <= 0 else len(pre_rB)):
            yield first + start, pre_rB[start : start + n_rows] if cut <= 0 else pre_rB


def _pre_activation_blocks(x_BD: Tensor, encoders: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield (first latent, encoder rows @ x) block by block; a block is overwritten by the next."""
    n_tokens = len(x_BD)
    n_rows = max(1, BLOCK_ELEMENTS // max(1, n_tokens))
    buffer = x_BD.new_empty(min(n_rows, max(map(len, encoders))), n_tokens)
    first = 0
    for encoder in encoders:
        for rows in torch.split(encoder, n_rows):
            if len(rows):
                yield first, torch.mm(rows, x_BD.T, out=buffer[: len(rows)])
            first += len(rows)


def _entries_above(pre_rB: Tensor, bias_r: Tensor, cut: float, first: int) -> Active:
    """Return the entries of `pre + bias` above `cut`; when `cut` > 0, also some that equal it but for rounding."""
    n_tokens = pre_rB.shape[1]
    floor = -bias_r
    if cut > 0:
        slack = 8 * torch.finfo(pre_rB.dtype).eps
        floor = floor + cut - slack * (bias_r.abs() + cut)
    # Survivors are rare, so eight flags are tested at once and only the words with one set are looked into.
    flags = torch.empty(-(-pre_rB.numel() // 8) * 8, dtype=torch.bool, device=pre_rB.device)
    flags[pre_rB.numel() :] = False
    torch.gt(pre_rB, floor[:, None], out=flags[: pre_rB.numel()].view_as(pre_rB))
    words = flags.view(torch.int64).nonzero().squeeze(1)
    bits = flags.view(-1, 8).index_select(0, words).view(-1).nonzero().squeeze(1)
    flat = words.index_select(0, bits >> 3).mul_(8).add_(bits & 7)
    rows = torch.div(flat, n_tokens, rounding_mode="floor")
    values = pre_rB.view(-1).index_select(0, flat).add_(bias_r.index_select(0, rows))
    tokens = flat.sub_(rows, alpha=n_tokens).int()
    return Active(rows.add_(first).int(), tokens, values)


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


def latent_offsets(active: Active, width: int) -> Tensor:
    """Return where each latent's survivors begin, [K + 1]."""
    latents = torch.arange(width + 1, dtype=torch.int32, device=active.latents_S.device)
    return torch.searchsorted(active.latents_S, latents, out_int32=True)


def decode(active: Active, bounds: Sequence[int], W_dec: Tensor, n_tokens: int) -> Iterator[Tensor]:
    """Yield, for survivors bounds[i] … bounds[i + 1] − 1, what they add to the reconstruction of each token, [B, D]."""
    keys = active.tokens_S.clone()
    for index, (low, high) in enumerate(pairwise(bounds)):
        keys[low:high] += index * n_tokens
    keys, order = torch.sort(keys, stable=True)
    latents, values = active.latents_S.index_select(0, order), active.values_S.index_select(0, order)
    first_keys = torch.arange((len(bounds) - 1) * n_tokens + 1, dtype=torch.int32, device=keys.device)
    starts = torch.searchsorted(keys, first_keys, out_int32=True)
    for index, (low, high) in enumerate(pairwise(bounds)):
        bags = starts[index * n_tokens : (index + 1) * n_tokens + 1] - low
        yield _bags(latents[low:high], W_dec, bags, values[low:high])


def gradients(
    active: Active, offsets: Tensor, latents: range, upstream_BD: Tensor, x_BD: Tensor | None, W_dec: Tensor
) -> Iterator[Gradients]:
    """Yield the gradients of a range of latents, block by block.

    `upstream_BD` is the gradient of the loss with respect to what these latents add to the reconstructions. Without
    `x_BD` the encoder's gradient is left out.
    """
    n_rows = max(1, GRADIENT_ELEMENTS // W_dec.shape[1])
    starts = range(latents.start, latents.stop, n_rows)
    bounds = offsets[[*starts, latents.stop]].tolist()
    for start, (low, high) in zip(starts, pairwise(bounds), strict=True):
        stop = min(start + n_rows, latents.stop)
        bags, tokens, f = offsets[start : stop + 1] - low, active.tokens_S[low:high], active.values_S[low:high]
        df = _inner_products(tokens, bags, W_dec[start:stop], upstream_BD)
        yield Gradients(
            rows=slice(start, stop),
            decoder=_bags(tokens, upstream_BD, bags, f),
            parallel=torch.segment_reduce(f * df, "sum", offsets=bags),
            encoder=None if x_BD is None else _bags(tokens, x_BD, bags, df),
            bias=torch.segment_reduce(df, "sum", offsets=bags),
        )


def _inner_products(tokens_S: Tensor, bags: Tensor, left_rD: Tensor, right_BD: Tensor) -> Tensor:
    """Return ⟨left row, right row⟩ of each survivor, [S]: the activation gradient."""
    zeros, shape = right_BD.new_zeros(len(tokens_S)), (len(left_rD), len(right_BD))
    pattern = torch.sparse_csr_tensor(bags, tokens_S, zeros, shape, check_invariants=False)
    products: Tensor = torch.sparse.sampled_addmm(pattern, left_rD, right_BD.T, beta=0).values()
    return products


def _bags(rows: Tensor, table: Tensor, bags: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of table rows of each bag; bag i is entries bags[i] … bags[i + 1] − 1."""
    return embedding_bag(rows, table, bags, mode="sum", per_sample_weights=weights, include_last_offset=True)
