"""Exact sparse linear algebra for what BatchTopK keeps: decoding, and its gradients.

Of B·K pre-activations only k·B survive, so everything but the encoder product runs over the survivors. They are held
latent by latent (`Active`). Sums of rows are `embedding_bag`s: a bag per token to decode, a bag per latent for the
gradients. Inner products of rows, one per survivor or candidate, are a `sampled_addmm`.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

GRADIENT_ELEMENTS = 1 << 20
"""Gradients computed at a time; again so that they are still in cache when they are read."""

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


def true_positions(numbers_rB: Tensor, compare: Callable[[Tensor, Tensor], object]) -> Tensor:
    """Return the flat positions of entries for which `compare(numbers, flags)` sets flags; few of many.

    Eight flags are tested at once, and only the words with one set are looked into.
    """
    n_entries = numbers_rB.numel()
    flags = torch.empty(-(-n_entries // 8) * 8, dtype=torch.bool, device=numbers_rB.device)
    flags[n_entries:] = False
    compare(numbers_rB, flags[:n_entries].view_as(numbers_rB))
    words = flags.view(torch.int64).nonzero().squeeze(1)
    bits = flags.view(-1, 8).index_select(0, words).view(-1).nonzero().squeeze(1)
    return words.index_select(0, bits >> 3).mul_(8).add_(bits & 7)


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
        df = inner_products(tokens, bags, W_dec[start:stop], upstream_BD)
        yield Gradients(
            rows=slice(start, stop),
            decoder=_bags(tokens, upstream_BD, bags, f),
            parallel=torch.segment_reduce(f * df, "sum", offsets=bags),
            encoder=None if x_BD is None else _bags(tokens, x_BD, bags, df),
            bias=torch.segment_reduce(df, "sum", offsets=bags),
        )


def inner_products(tokens_S: Tensor, bags: Tensor, left_rD: Tensor, right_BD: Tensor) -> Tensor:
    """Return ⟨left row, right row⟩ of each entry, [S]; row i of `left` has entries bags[i] … bags[i + 1] − 1.

    The bits of a product depend on its two rows alone, not on what else is computed.
    """
    zeros, shape = right_BD.new_zeros(len(tokens_S)), (len(left_rD), len(right_BD))
    pattern = torch.sparse_csr_tensor(bags, tokens_S, zeros, shape, check_invariants=False)
    products: Tensor = torch.sparse.sampled_addmm(pattern, left_rD, right_BD.T, beta=0).values()
    return products


def _bags(rows: Tensor, table: Tensor, bags: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of table rows of each bag; bag i is entries bags[i] … bags[i + 1] − 1."""
    return embedding_bag(rows, table, bags, mode="sum", per_sample_weights=weights, include_last_offset=True)
