"""Latent ablation: what a latent's removal does to the next-token loss, measured rather than linearised.

The paper names it as the more direct measure than gradient × activation, and the dearer one. For a context, a latent's
contribution f̃_{u,j}·W_dec[j] is taken out of x at all positions u of the context at once and the model is run on; the
sample is the absolute change of the context's summed loss. (One position at a time would cost a forward pass for each
of the context's positions.) A context in which the latent does not fire changes by nothing and costs nothing. The
samples become a score by the same quantile rule, over contexts where gradient × activation has positions, and f̃ is the
very same: the same stored activations under the same mask in the same batches.

Shapes: N contexts, L positions, D model width, P candidate latents, R latents ablated.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.activations.base_model import BaseModel
from dmsae.activations.store import Split, Store
from dmsae.config import from_dict, to_dict
from dmsae.cores.attribution import Attribution, AttributionConfig, CandidateCodes, QuantileOver, require_match
from dmsae.cores.core import select_core
from dmsae.cores.quantile import LargestValues
from dmsae.errors import AttributionError, ConfigError
from dmsae.progress import progress
from dmsae.sae.sae import SAE
from dmsae.seeds import generator


@dataclass(frozen=True, slots=True)
class AblationConfig:
    """How much is ablated."""

    n_contexts: int = 32
    """Contexts that are sampled from the store's pairs."""
    n_latents: int | None = 64
    """Candidates that are ablated: those with the highest gradient × activation. None: all."""
    batch_contexts: int = 8
    """Contexts per forward pass."""
    seed: int = 0
    """Decides which contexts are sampled."""

    def __post_init__(self) -> None:
        for name in ("n_contexts", "n_latents", "batch_contexts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")


@torch.no_grad()
def ablate(
    sae: SAE, store: Store, model: BaseModel, scored: Attribution, config: AblationConfig | None = None
) -> Attribution:
    """Return ablation scores of the candidates that `scored`, the gradient × activation scores, ranks highest."""
    config = config or AblationConfig()
    require_match(sae, store)
    _require_same_model(store, model)
    how = from_dict(AttributionConfig, scored.facts["config"])
    ranked = scored.scores_P.sort(descending=True, stable=True).indices
    latents_R = scored.latents_P[ranked[: config.n_latents]].sort().values
    tokens_NL = store.tokens(Split.PAIRS)["tokens"]
    order = torch.randperm(len(tokens_NL), generator=generator(config.seed, "ablation"))
    contexts_N = order[: config.n_contexts].sort()[0]
    f_RNL, n_positions = _codes(sae, store, latents_R, contexts_N, tokens_NL.shape, how.batch_size)
    changes_RN = _loss_changes(model, tokens_NL[contexts_N], f_RNL, sae.W_dec[latents_R], config.batch_contexts)
    largest = LargestValues(len(latents_R), how.quantile, len(contexts_N), changes_RN)
    largest.add(changes_RN.abs())
    n_firing_R = (f_RNL > 0).any(2).sum(1)
    over_all = how.quantile_over is QuantileOver.ALL
    return Attribution(
        latents_P=latents_R,
        scores_P=largest.quantiles(torch.full_like(n_firing_R, len(contexts_N)) if over_all else n_firing_R),
        firing_rates_P=(f_RNL > 0).sum((1, 2)).double() / n_positions,
        n_positions=n_positions,
        facts={
            "method": "ablation",
            "config": to_dict(how),
            "ablation": to_dict(config),
            "n_contexts": len(contexts_N),
            "store": store.key,
        },
    )


def _codes(
    sae: SAE, store: Store, latents_R: Tensor, contexts_N: Tensor, shape: torch.Size, batch_size: int
) -> tuple[Tensor, int]:
    """Return f̃ [R, N, L] of some latents in some contexts, and how many positions of these the store holds."""
    f_RNL = torch.zeros(len(latents_R), len(contexts_N), shape[1])
    place = torch.full((shape[0],), -1).index_put((contexts_N,), torch.arange(len(contexts_N)))
    codes, n_positions = CandidateCodes(sae), 0
    for batch in store.batches(Split.PAIRS, batch_size):
        f_PB = codes(batch["x"].to(sae.W_dec))
        context = place[batch["context"].long()]
        rows = (context >= 0).nonzero().squeeze(1)
        f_RNL[:, context[rows], batch["position"][rows].long()] = f_PB[latents_R][:, rows].float().cpu()
        n_positions += len(rows)
    if not n_positions:
        raise AttributionError(f"The {len(contexts_N)} sampled contexts have no pairs in the store. Sample more.")
    return f_RNL, n_positions


def _loss_changes(model: BaseModel, tokens_NL: Tensor, f_RNL: Tensor, W_dec_RD: Tensor, batch: int) -> Tensor:
    """Return the change [R, N] of each context's summed loss when a latent is taken out of it, in float64."""
    W_dec_RD, f_RNL = W_dec_RD.to(model.device), f_RNL.to(model.device)
    clean_N = torch.cat([model.losses(tokens).double().sum(1).cpu() for tokens in tokens_NL.split(batch)])
    changes_RN = torch.zeros(f_RNL.shape[:2], dtype=torch.float64)
    jobs = (f_RNL > 0).any(2).nonzero().cpu()
    with progress("ablate", len(jobs), "ctx") as bar:
        for latent, context in (some.unbind(1) for some in jobs.split(batch)):

            def remove(x: Tensor, latent: Tensor = latent, context: Tensor = context) -> Tensor:
                contribution = f_RNL[latent, context][:, :, None] * W_dec_RD[latent][:, None, :]
                return x - contribution.to(x)

            losses_J = model.losses(tokens_NL[context], remove).double().sum(1).cpu()
            changes_RN[latent, context] = losses_J - clean_N[context]
            bar.advance(len(latent))
    return changes_RN


def _require_same_model(store: Store, model: BaseModel) -> None:
    here = to_dict(model.identity)
    for name in ("weights_sha256", "hook"):
        if store.model[name] != here[name]:
            raise ConfigError(
                f"The store {store.key} was harvested from a model with {name} {store.model[name]!r}; this one has "
                f"{here[name]!r}. Load the store's own model."
            )


class Agreement(NamedTuple):
    """How far two scorings agree, on the latents that both scored."""

    n_latents: int
    """Latents that both scored."""
    spearman: float | None
    """Rank correlation of the scores; None when one of them is the same for all."""
    n_first: int
    """Latents that the first selects at this coverage."""
    n_second: int
    """Latents that the second selects."""
    n_both: int
    """Latents that both select."""
    jaccard: float
    """Latents that both select, as a share of those that either does."""


def agreement(first: Attribution, second: Attribution, coverage: float) -> Agreement:
    """Return how far two scorings of the same SAE agree, and the cores that each would select."""
    shared = torch.tensor(sorted(set(first.latents_P.tolist()) & set(second.latents_P.tolist())), dtype=torch.int64)
    if not len(shared):
        raise AttributionError("The two scorings have no latent in common: they cannot be compared.")
    scores = [a.scores_P[torch.searchsorted(a.latents_P, shared)] for a in (first, second)]
    one, other = (set(select_core(values, coverage).tolist()) for values in scores)
    both = len(one & other)
    return Agreement(len(shared), spearman(*scores), len(one), len(other), both, both / len(one | other))


def spearman(first: Tensor, second: Tensor) -> float | None:
    """Return the rank correlation of two vectors, equal values sharing their mean rank; None if one is constant."""
    ranks = torch.stack([_ranks(first), _ranks(second)])
    ranks -= ranks.mean(1, keepdim=True)
    norms = ranks.norm(dim=1)
    return float(ranks[0] @ ranks[1] / norms.prod()) if norms.all() else None


def _ranks(values: Tensor) -> Tensor:
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    mean_ranks: Tensor = counts.cumsum(0).double() - (counts.double() - 1) / 2
    return mean_ranks[inverse]
