"""The Matryoshka objective and its gradients: `Σ_m w_m ‖x − x̂_m‖² + α·L_aux`, mean over tokens.

`backward_` takes one batch through the SAE with the training-time mask (BatchTopK, a dense core left free) and writes
every gradient without autograd, for the cost of the encoder product and a few sparse ones. A training step is then

    result = backward_(sae, x, objective, dead, warm_start)
    step_(sae, optimiser, result.grad_norm, max_norm)
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.config import require, take_choice
from dmsae.errors import ConfigError
from dmsae.ranks import Axis
from dmsae.sae.comms import ALONE, Comms
from dmsae.sae.grads import square_norm, summed_norm, write_, write_b_dec_
from dmsae.sae.sae import SAE
from dmsae.sae.selection import keep_largest_of_rows_
from dmsae.sae.sparse import Active, Gradients, decode, gradients, latent_offsets


class PrefixReduction(StrEnum):
    """How the squared errors of the G prefixes become one loss."""

    SUM = "sum"
    """Their sum, as in the paper."""
    MEAN = "mean"
    """Their mean."""
    SAEBENCH = "saebench"
    """Their sum over G², as the published baselines were trained."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What is minimised."""

    prefix_reduction: PrefixReduction = PrefixReduction.SUM
    """How the prefixes' errors are combined."""
    aux_alpha: float = 1 / 32
    """Weight α of the auxiliary loss that revives dead latents; 0 turns it off."""

    def __post_init__(self) -> None:
        take_choice(self, "prefix_reduction", PrefixReduction)
        finite = math.isfinite(self.aux_alpha)
        require(finite and self.aux_alpha >= 0, "aux_alpha", self.aux_alpha, "be a finite number of at least 0")

    def weight(self, n_prefixes: int) -> float:
        """Return the weight of each prefix's squared error."""
        match self.prefix_reduction:
            case PrefixReduction.SUM:
                return 1.0
            case PrefixReduction.MEAN:
                return 1 / n_prefixes
            case PrefixReduction.SAEBENCH:
                return 1 / n_prefixes**2


class BatchResult(NamedTuple):
    """What was measured on one batch, besides the gradients."""

    loss: float
    """The objective."""
    prefix_errors: Tensor
    """Squared error of each prefix, mean over tokens, [G]."""
    aux_loss: float
    """The auxiliary loss, before α."""
    n_fired: Tensor
    """Number of tokens on which each latent fired, [K]; on a mesh, for the rank's own latents."""
    l0_core: float
    """Core latents that fired per token."""
    l0_noncore: float
    """Non-core latents that fired per token."""
    threshold: float
    """The smallest kept non-core activation, 0 when there is none."""
    warm_start: float
    """The smallest activation that BatchTopK kept: what the next batch may start from."""
    grad_norm: float
    """Norm of all gradients together."""


_SPARSE_FROM = 8
"""Dead latents per kept one from which sparse products beat dense ones in the auxiliary loss."""


class _Auxiliary(NamedTuple):
    loss: float
    gradients: Iterator[Gradients]


@torch.no_grad()
def backward_(
    sae: SAE,
    x_BD: Tensor,
    objective: Objective,
    dead_K: Tensor | None = None,
    warm_start: float | None = None,
    comms: Comms = ALONE,
) -> BatchResult:
    """Overwrite the gradients of every parameter with those of this batch, and return what was measured.

    Decoder gradients come without their component along the decoder row, which has unit norm and keeps it. `dead_K`
    marks the latents that had not fired for long before this batch; those that fire in it are alive. Nothing but the
    gradients changes, and `warm_start` only saves time. On a mesh each rank gives its tokens and its own part of the
    SAE, and gets the gradients of its part over the tokens of all ranks.
    """
    config = sae.config
    if x_BD.ndim != 2 or x_BD.shape[1] != config.d_model or not len(x_BD):
        raise ConfigError(f"x has shape {list(x_BD.shape)}; it must have shape [B, {config.d_model}] with B > 0.")
    n_tokens, n_core = len(x_BD) * comms.data.size, config.n_core
    input_BD, active, core_BC = sae.train_codes(x_BD, warm_start, comms)
    centered_BD = input_BD if config.center_input else x_BD - sae.b_dec
    offsets = latent_offsets(active, config.width)
    n_fired = offsets.diff()
    if core_BC is not None:
        n_fired[:n_core] = (core_BC > 0).sum(0)
    comms.data.sum_(n_fired)

    residuals = _residuals(sae, active, offsets, core_BC, centered_BD, comms.latents)
    errors_G = comms.data.sum_(torch.stack([square_norm(residual) for residual in residuals])) / n_tokens
    auxiliary = _auxiliary(sae, input_BD, residuals[-1], dead_K, n_fired, objective.aux_alpha, comms)
    weight = objective.weight(len(residuals))
    upstreams = _upstreams_(residuals, -2 * weight / n_tokens)

    parts = chain(
        _gradients(sae, active, offsets, core_BC, input_BD, upstreams), auxiliary.gradients if auxiliary else ()
    )
    # Through `map`, so that no part is held while the next is computed.
    squares = list(chain.from_iterable(map(partial(write_, sae), parts)))
    square_b_dec = write_b_dec_(sae, upstreams[0], comms)
    grad_norm = summed_norm(sae, squares, square_b_dec, comms)

    aux_loss = auxiliary.loss if auxiliary is not None else 0.0
    noncore = active.values_S[int(offsets[n_core]) :]
    smallest = comms.both.min_(torch.stack([_smallest(noncore), _smallest(active.values_S)]))
    fired = comms.latents.sum_(torch.stack([n_fired[:n_core].sum(), n_fired[n_core:].sum()]))
    return BatchResult(
        loss=weight * float(errors_G.sum()) + objective.aux_alpha * aux_loss,
        prefix_errors=errors_G,
        aux_loss=aux_loss,
        n_fired=n_fired,
        l0_core=float(fired[0]) / n_tokens,
        l0_noncore=float(fired[1]) / n_tokens,
        threshold=_finite(smallest[0]),
        warm_start=_finite(smallest[1]),
        grad_norm=grad_norm,
    )


def _smallest(values: Tensor) -> Tensor:
    """Return the smallest value, or infinity when there is none."""
    return values.min() if len(values) else values.new_tensor(math.inf)


def _finite(smallest: Tensor) -> float:
    return float(smallest) if smallest.isfinite() else 0.0


def _residuals(
    sae: SAE, active: Active, offsets: Tensor, core_BC: Tensor | None, target_BD: Tensor, latents: Axis
) -> list[Tensor]:
    """Return x − x̂_m for every prefix m; `target_BD` is x − b_dec."""
    residuals: list[Tensor] = []
    bounds = offsets[[0, *sae.config.prefixes]].tolist()
    for part_BD in decode(active, bounds, sae.W_dec, len(target_BD)):
        if core_BC is not None and not residuals:
            part_BD.addmm_(core_BC, sae.W_dec[: sae.config.n_core])
        latents.sum_(part_BD)
        target_BD = torch.sub(target_BD, part_BD, out=part_BD)
        residuals.append(target_BD)
    return residuals


def _upstreams_(residuals: list[Tensor], factor: float) -> list[Tensor]:
    """Turn residuals, in place, into the loss's gradient with respect to what each group adds.

    A latent of group g takes part in prefixes g, g + 1, …, so it sees the sum of their residuals.
    """
    residuals[-1].mul_(factor)
    for later, residual in pairwise(reversed(residuals)):
        torch.add(later, residual, alpha=factor, out=residual)
    return residuals


def _gradients(
    sae: SAE,
    active: Active,
    offsets: Tensor,
    core_BC: Tensor | None,
    input_BD: Tensor,
    upstreams: list[Tensor],
) -> Iterator[Gradients]:
    """Yield the gradients of all latents."""
    n_core, n_dense = sae.config.n_core, sae.config.n_dense
    if core_BC is not None and sae.config.n_detectors:
        yield _detector_gradients(core_BC, upstreams[0], sae.W_dec[:n_core])
    elif core_BC is not None:
        yield _dense_gradients(core_BC, upstreams[0], None, sae.W_dec[:n_core])
    yield from gradients(active, offsets, range(n_dense, n_core), upstreams[0], None, sae.W_dec)
    for (first, stop), upstream_BD in zip(pairwise((n_core, *sae.config.prefixes)), upstreams, strict=True):
        yield from gradients(active, offsets, range(first, stop), upstream_BD, input_BD, sae.W_dec)


def _dense_gradients(f_BL: Tensor, upstream_BD: Tensor, x_BD: Tensor | None, W_dec_LD: Tensor) -> Gradients:
    """Return the gradients of a few latents that fire on many tokens."""
    df_BL = torch.mm(upstream_BD, W_dec_LD.T).mul_(f_BL > 0)
    return Gradients(
        rows=slice(0, len(W_dec_LD)),
        decoder=f_BL.T @ upstream_BD,
        parallel=(f_BL * df_BL).sum(0),
        encoder=None if x_BD is None else df_BL.T @ x_BD,
        bias=df_BL.sum(0),
    )


def _detector_gradients(f_BC: Tensor, upstream_BD: Tensor, W_dec_CD: Tensor) -> Gradients:
    """Return the gradients of detectors, of which only the decoder rows are learned."""
    decoder_CD = f_BC.T @ upstream_BD
    parallel_C = torch.linalg.vecdot(W_dec_CD, decoder_CD)
    return Gradients(slice(0, len(W_dec_CD)), decoder_CD, parallel_C, encoder=None, bias=None)


def _auxiliary(
    sae: SAE,
    input_BD: Tensor,
    residual_BD: Tensor,
    dead_K: Tensor | None,
    n_fired: Tensor,
    alpha: float,
    comms: Comms,
) -> _Auxiliary | None:
    """Rebuild the residual from each token's largest dead non-core latents; return the loss and its gradients."""
    n_core, n_kept, n_tokens = sae.config.n_core, sae.config.d_model // 2, len(input_BD) * comms.data.size
    if dead_K is None or alpha == 0:
        return None
    dead_A = (dead_K & (n_fired == 0))[n_core:].nonzero().squeeze(1) + n_core
    if not comms.latents.sum_(torch.tensor(len(dead_A), device=dead_A.device)):
        return None
    decoder_AD = sae.W_dec[dead_A]
    f_BA = torch.addmm(
        sae.b_enc[dead_A - sae.config.n_detectors], input_BD, sae.W_enc_noncore[dead_A - n_core].T
    ).relu_()
    values, indices = f_BA.topk(min(n_kept, len(dead_A)), sorted=False)
    keep_largest_of_rows_(values, n_kept, comms.latents)

    # Of the ranks with these tokens the first starts from the residual, so that the sum over them holds it once.
    target_BD = residual_BD if comms.latents.rank == 0 else torch.zeros_like(residual_BD)
    sparse = len(dead_A) > _SPARSE_FROM * n_kept
    if sparse:
        active = _by_latent(values, indices)
        (part_BD,) = decode(active, (0, len(active.values_S)), decoder_AD, len(input_BD))
        error_BD = target_BD - part_BD
    else:
        f_BA.zero_().scatter_(1, indices, values)
        error_BD = torch.addmm(target_BD, f_BA, decoder_AD, alpha=-1)
    comms.latents.sum_(error_BD)
    mean_D = comms.data.sum_(residual_BD.sum(0)) / n_tokens
    variance = comms.data.sum_((residual_BD - mean_D).square_().sum()) / n_tokens
    loss = float(comms.data.sum_(error_BD.square().sum()) / n_tokens / variance)
    if not math.isfinite(loss):
        return None
    upstream_BD = error_BD.mul_(-2 * alpha / (n_tokens * variance))
    if sparse:
        offsets = latent_offsets(active, len(dead_A))
        parts = gradients(active, offsets, range(len(dead_A)), upstream_BD, input_BD, decoder_AD)
    else:
        parts = iter([_dense_gradients(f_BA, upstream_BD, input_BD, decoder_AD)])
    return _Auxiliary(loss, (part._replace(rows=dead_A[part.rows]) for part in parts))


def _by_latent(values_BS: Tensor, indices_BS: Tensor) -> Active:
    """Return each token's positive activations, given with their latents, in the order that `Active` has."""
    tokens, places = (values_BS > 0).nonzero(as_tuple=True)
    latents, order = torch.sort(indices_BS[tokens, places].int(), stable=True)
    return Active(latents, tokens[order].int(), values_BS[tokens, places][order])
