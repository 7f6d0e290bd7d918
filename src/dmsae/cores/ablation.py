"""Latent ablation: what a latent's removal does to the next-token loss, measured rather than linearised.

The paper names it as a more direct measure than gradient × activation, and a more expensive one. For a context, a
latent's contribution f̃_{u,j}·W_dec[j] is subtracted from x at all positions u at once and the rest of the model is run;
the sample is the absolute change of the context's summed loss. (One position at a time would cost a forward pass for
each.) A context in which the latent does not fire does not change and costs nothing. The samples become a score by the
same quantile rule, over contexts instead of positions, and f̃ is the same: the same stored activations under the same
mask in the same batches.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.activations.above_hook import AboveHook
from dmsae.activations.base_model import BaseModel
from dmsae.activations.splits import Split
from dmsae.activations.store import Shard, Store
from dmsae.config import from_dict, require_whole, to_dict
from dmsae.cores.attribution import Attribution, AttributionConfig, CandidateCodes, QuantileOver, require_match
from dmsae.cores.quantile import LargestValues
from dmsae.errors import AttributionError
from dmsae.progress import SILENT, Progress
from dmsae.sae.sae import SAE
from dmsae.seeds import generator


@dataclass(frozen=True, slots=True)
class AblationConfig:
    """How much is ablated."""

    n_contexts: int = 128
    """Contexts that are sampled from the store's pairs, or all if there are fewer. The scores' quantile is taken over
    them: of 128, one lies above the 0.99 quantile; of 24 none does, and it is little else than the maximum."""
    n_latents: int | None = 32
    """Candidates that are ablated, spread over the whole range of gradient × activation: the highest alone would say
    nothing about how well the two agree on what matters and what does not. None: all."""
    batch_contexts: int = 8
    """Contexts per forward pass."""
    seed: int = 0
    """Decides which contexts are sampled, and which latents."""

    def __post_init__(self) -> None:
        require_whole("n_contexts", self.n_contexts, 1)
        require_whole("batch_contexts", self.batch_contexts, 1)
        if self.n_latents is not None:
            require_whole("n_latents", self.n_latents, 1)


class LossChanges(NamedTuple):
    """What the removal of each of R latents does to the loss of each of N contexts."""

    latents_R: Tensor
    f_RNL: Tensor
    """Their activations at every position, 0 where the store holds none."""
    changes_RN: Tensor
    """Of the context's summed loss, in float64."""
    n_positions: int
    """Positions that the store holds."""


@torch.no_grad()
def loss_changes(
    sae: SAE,
    store: Store,
    model: BaseModel,
    scored: Attribution,
    config: AblationConfig,
    split: Split,
    progress: Progress = SILENT,
) -> LossChanges:
    """Return what removing candidates from the whole range of `scored` does to contexts of the pairs or held out."""
    require_match(sae, store)
    store.model.require_same(model.identity, f"the store {store.key}", "the model given")
    how = from_dict(AttributionConfig, scored.facts["config"])
    latents_R = scored.latents_P[_spread(scored.scores_P, config)]
    tokens_NL = store.tokens(split)["tokens"]
    order = torch.randperm(len(tokens_NL), generator=generator(config.seed, "ablation"))
    contexts_N = order[: config.n_contexts].sort()[0]
    f_RNL, n_positions = _codes(sae, store.batches(split, how.batch_size), latents_R, contexts_N, tokens_NL.shape)
    counted_NL = store.counted_losses(split, model.keep_mask)[contexts_N]  # the losses that make g
    changes_RN = _loss_changes(
        model, tokens_NL[contexts_N], counted_NL, f_RNL, sae.W_dec[latents_R], config.batch_contexts, progress
    )
    return LossChanges(latents_R, f_RNL, changes_RN, n_positions)


@torch.no_grad()
def ablate(
    sae: SAE,
    store: Store,
    model: BaseModel,
    scored: Attribution,
    config: AblationConfig | None = None,
    progress: Progress = SILENT,
) -> Attribution:
    """Return ablation scores of candidates from the whole range of `scored`, the gradient × activation scores."""
    config = config or AblationConfig()
    how = from_dict(AttributionConfig, scored.facts["config"])
    measured = loss_changes(sae, store, model, scored, config, Split.PAIRS, progress)
    f_RNL, changes_RN, n_contexts = measured.f_RNL, measured.changes_RN, measured.f_RNL.shape[1]
    largest = LargestValues(len(changes_RN), how.quantile, n_contexts, changes_RN)
    largest.add(changes_RN.abs())
    n_firing_R = (f_RNL > 0).any(2).sum(1)
    over_all = how.quantile_over is QuantileOver.ALL
    return Attribution(
        latents_P=measured.latents_R,
        scores_P=largest.quantiles(torch.full_like(n_firing_R, n_contexts) if over_all else n_firing_R),
        firing_rates_P=(f_RNL > 0).sum((1, 2)).double() / measured.n_positions,
        n_positions=measured.n_positions,
        facts={
            "method": "ablation",
            "config": to_dict(how),
            "ablation": to_dict(config),
            "n_contexts": n_contexts,
            "store": store.key,
        },
    )


def _spread(scores_P: Tensor, config: AblationConfig) -> Tensor:
    """Return the places of candidates, rising: one drawn from each of as many stretches of equal length by rank."""
    n = len(scores_P) if config.n_latents is None else min(config.n_latents, len(scores_P))
    ranked = scores_P.sort(descending=True, stable=True).indices
    edges = [stretch * len(ranked) // n for stretch in range(n + 1)]
    draw = generator(config.seed, "ablated latents")
    chosen = [low + int(torch.randint(high - low, (), generator=draw)) for low, high in pairwise(edges)]
    return ranked[chosen].sort().values


def _codes(
    sae: SAE, batches: Iterable[Shard], latents_R: Tensor, contexts_N: Tensor, shape: torch.Size
) -> tuple[Tensor, int]:
    """Return f̃ [R, N, L] of some latents in some contexts, and how many positions of these the store holds."""
    f_RNL = torch.zeros(len(latents_R), len(contexts_N), shape[1])
    place = torch.full((shape[0],), -1).index_put((contexts_N,), torch.arange(len(contexts_N)))
    codes, n_positions = CandidateCodes(sae), 0
    for batch in batches:
        f_PB = codes(batch["x"].to(sae.W_dec))
        context = place[batch["context"].long()]
        rows = (context >= 0).nonzero().squeeze(1)
        f_RNL[:, context[rows], batch["position"][rows].long()] = f_PB[latents_R][:, rows].float().cpu()
        n_positions += len(rows)
    if not n_positions:
        raise AttributionError(f"The {len(contexts_N)} sampled contexts have no activations in the store. Sample more.")
    return f_RNL, n_positions


def _loss_changes(
    model: BaseModel,
    tokens_NL: Tensor,
    counted_NL: Tensor,
    f_RNL: Tensor,
    W_dec_RD: Tensor,
    batch: int,
    progress: Progress,
) -> Tensor:
    """Return the change [R, N] of each context's summed loss when a latent is taken out of it, in float64."""
    W_dec_RD, f_RNL = W_dec_RD.to(model.device), f_RNL.to(model.device)
    x_NLD = torch.cat([model.activations(some).float() for some in tokens_NL.split(batch)])
    above = AboveHook(model)  # the blocks below the hook have run, once for all latents
    batches = zip(tokens_NL.split(batch), x_NLD.split(batch), counted_NL.split(batch), strict=True)
    clean_N = torch.cat([above.losses(*some).double().sum(1).cpu() for some in batches])
    changes_RN = torch.zeros(f_RNL.shape[:2], dtype=torch.float64)
    jobs = (f_RNL > 0).any(2).nonzero().cpu()
    with progress.bar("ablate", len(jobs), "ctx") as bar:
        for latent, context in (some.unbind(1) for some in jobs.split(batch)):
            without = x_NLD[context] - f_RNL[latent, context][:, :, None] * W_dec_RD[latent][:, None, :]
            losses_J = above.losses(tokens_NL[context], without, counted_NL[context]).double().sum(1).cpu()
            changes_RN[latent, context] = losses_J - clean_N[context]
            bar.advance(len(latent))
    return changes_RN
