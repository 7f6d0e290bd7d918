"""How much each candidate latent matters to the next-token loss: gradient × activation (the paper's Algorithm 2).

From stored pairs (x_u, g_u), with f̃ under the training-time mask (a dense core fires freely, BatchTopK keeps the k·B
largest of all others) and w̄_j the unit decoder row, `GxA_{u,j} = |f̃_{u,j} · g_uᵀ w̄_j|` and `A_j = quantile_q over u`.
Candidates are the latents of the smallest reconstruction: the core and prefix-0.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import zip_longest
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from dmsae.activations.splits import Split
from dmsae.activations.store import Shard, Store
from dmsae.config import Json, require_whole, take_choice, to_dict
from dmsae.cores.bootstrap import bootstrap_scores
from dmsae.cores.quantile import LargestValues, require_quantile
from dmsae.disk import layout
from dmsae.disk.artifact import Bound, read_artifact, write_artifact
from dmsae.errors import AttributionError, CheckpointError, ConfigError, StoreError
from dmsae.ranks import ONE, Axis, settled
from dmsae.sae.sae import SAE
from dmsae.sae.sparse import latent_offsets

_TENSORS = ("latents_P", "scores_P", "firing_rates_P")
_OPTIONAL = ("scores_all_P", "scores_active_P", "mean_activations_P", "bootstrap_XP", "bootstrap_other_XP")
_FACTS = ("n_positions", "facts")


class QuantileOver(StrEnum):
    """Which positions a latent's quantile is taken over."""

    ALL = "all"
    """All positions; where the latent is silent counts as zero, as in the paper."""
    ACTIVE = "active"
    """The positions where the latent fires."""


@dataclass(frozen=True, slots=True)
class AttributionConfig:
    """How latents are scored.

    >>> dmsae.AttributionConfig(quantile=0.95).quantile_over.value
    'all'
    """

    quantile: float = 0.99
    """The quantile q over positions that becomes a latent's score."""
    quantile_over: QuantileOver = QuantileOver.ALL
    """Whether positions where a latent is silent count."""
    batch_size: int = 2048
    """Positions that compete in one BatchTopK; the training batch size is the natural choice."""
    n_bootstrap: int = 100
    """Resamples of the contexts from which each score gets an interval. 0: none."""

    def __post_init__(self) -> None:
        require_quantile(self.quantile)
        take_choice(self, "quantile_over", QuantileOver)
        require_whole("batch_size", self.batch_size, 1)
        require_whole("n_bootstrap", self.n_bootstrap, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Attribution:
    """Scores of candidate latents, and what they were measured on.

    >>> scores = dmsae.Attribution.load(run / "cycle-0")
    >>> float(scores.coverage_curve()[-1])
    1.0
    """

    latents_P: Tensor
    """The latents that were scored, as indices into the SAE, rising."""
    scores_P: Tensor
    """Each latent's score A, float64."""
    firing_rates_P: Tensor
    """Share of positions at which each latent fired, float64."""
    n_positions: int
    """Positions looked at."""
    facts: Json
    """Method, config and store, as JSON values."""
    scores_all_P: Tensor | None = None
    """The score over all positions, whichever rule `scores_P` follows; None for scores by ablation."""
    scores_active_P: Tensor | None = None
    """The score over the positions where the latent fires."""
    mean_activations_P: Tensor | None = None
    """Mean activation where the latent fires; 0 for one that never does."""
    bootstrap_XP: Tensor | None = None
    """`scores_P` in each of X resamples of the contexts, float32."""
    bootstrap_other_XP: Tensor | None = None
    """The scores of the other rule in the same resamples."""

    def __post_init__(self) -> None:
        if not torch.isfinite(self.scores_P).all():
            bad = self.latents_P[~torch.isfinite(self.scores_P)].tolist()
            raise AttributionError(
                f"The scores of {len(bad)} of {len(self.scores_P)} candidate latents are not finite (first: latent "
                f"{bad[0]}). Activations or gradients overflow; look at the SAE's training and the store."
            )
        if not self.scores_P.sum() > 0:
            fired = int((self.firing_rates_P > 0).sum())
            raise AttributionError(
                f"The attribution of all {len(self.scores_P)} candidate latents is zero; {fired} of them fired on "
                f"{self.n_positions} positions. Lower the quantile, set quantile_over to 'active', or train longer."
            )

    def coverage_curve(self) -> Tensor:
        """Return the share of all attribution that the 1, 2, … P highest-scoring latents hold, [P]."""
        cumulative = self.scores_P.sort(descending=True).values.cumsum(0)
        return cumulative / cumulative[-1]

    def interval(self) -> tuple[Tensor, Tensor]:
        """Return the 2.5 % and 97.5 % quantiles of each latent's score over resampled contexts, [P] each."""
        if self.bootstrap_XP is None or not len(self.bootstrap_XP):
            raise AttributionError("These scores have no intervals: they were made without a bootstrap.")
        low, high = self.bootstrap_XP.double().quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0)
        return low, high

    def over(self, quantile_over: QuantileOver) -> "Attribution":
        """Return the scores under a rule, with their intervals; both were computed."""
        scores = self.scores_all_P if quantile_over is QuantileOver.ALL else self.scores_active_P
        if scores is None:
            raise AttributionError(f"The scores over {quantile_over} positions were not kept. Score the SAE again.")
        if torch.equal(scores, self.scores_P):
            return self
        mine, other = self.bootstrap_XP, self.bootstrap_other_XP
        return replace(self, scores_P=scores, bootstrap_XP=other, bootstrap_other_XP=mine)

    def among(self, candidates_P: Tensor) -> "Attribution":
        """Return the scores of some of the candidates, given by a mask."""
        fields = {name: getattr(self, name) for name in (*_TENSORS, *_OPTIONAL)}
        return replace(self, **{name: v[..., candidates_P] for name, v in fields.items() if v is not None})

    def save(self, directory: Path, bound_to: Bound | None = None) -> None:
        """Write `attribution.safetensors`, with the coverage curve, and `attribution.json`, bound to the SAE scored."""
        tensors = {name: getattr(self, name) for name in _TENSORS} | {"coverage_curve": self.coverage_curve()}
        tensors |= {name: value for name in _OPTIONAL if (value := getattr(self, name)) is not None}
        facts = {name: getattr(self, name) for name in _FACTS}
        write_artifact(directory, layout.ATTRIBUTION, tensors, facts, bound_to)

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Return saved scores, or raise `CheckpointError` when anything about them is not as it was written."""
        tensors, facts = read_artifact(directory, layout.ATTRIBUTION)
        try:
            fields: Json = {name: tensors[name] for name in _TENSORS}
            fields |= {name: tensors[name] for name in _OPTIONAL if name in tensors}
            scores = cls(**fields, **{name: facts[name] for name in _FACTS})
        except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
            raise CheckpointError(
                f"{directory / layout.ATTRIBUTION}.json does not describe attribution: {error!r}. Restore it."
            ) from error
        _require_consistent(directory / f"{layout.ATTRIBUTION}.json", scores)
        return scores


def _require_consistent(path: Path, scores: Attribution) -> None:
    """Raise unless saved scores have one value of the right kind for each latent."""
    n = scores.latents_P.numel()
    per_latent = [getattr(scores, name) for name in (*_TENSORS, *_OPTIONAL)]
    fits = all(values is None or (values.ndim and values.shape[-1] == n) for values in per_latent)
    if not fits or scores.latents_P.dtype != torch.int64 or not isinstance(scores.facts, dict):
        raise CheckpointError(f"{path} does not describe attribution: its parts do not fit together. Restore it.")
    if type(scores.n_positions) is not int:
        raise CheckpointError(f"{path} says that {scores.n_positions!r} positions were looked at. Restore it.")


@torch.no_grad()
def attribute(sae: SAE, store: Store, config: AttributionConfig | None = None, everyone: Axis = ONE) -> Attribution:
    """Return the gradient × activation scores of an SAE's candidate pool; the SAE takes activations as stored.

    The ranks of an axis take turns with the batches, and all get the scores that one process would give.

    >>> sae = dmsae.SAE.load(run / "cycle-0" / "sae")
    >>> scores = dmsae.attribute(sae, store)
    >>> len(scores.scores_P) == sae.config.prefixes[0]
    True
    """
    config = config or AttributionConfig()
    require_match(sae, store)
    n_positions, n_pool = store.n_rows(Split.PAIRS), sae.config.prefixes[0]
    directions_PD = torch.nn.functional.normalize(sae.W_dec[:n_pool], dim=1)
    largest = LargestValues(n_pool, config.quantile, n_positions, sae.W_dec, keeps_owners=True)
    firing: _Firing | None = None
    codes, are_finite = CandidateCodes(sae), True
    with settled(everyone):
        for index, batch in enumerate(store.batches(Split.PAIRS, config.batch_size)):
            firing = firing or _Firing(n_pool, _n_contexts(store, batch), sae.W_dec.device, config.n_bootstrap > 0)
            if index % everyone.size != everyone.rank:
                continue
            x_BD, g_BD = batch["x"].to(sae.W_dec), batch["g"].to(sae.W_dec)
            are_finite = bool(torch.isfinite(x_BD).all() and torch.isfinite(g_BD).all())
            if not are_finite:
                break
            f_PB = codes(x_BD)
            contexts_B = _contexts(batch, index * config.batch_size).to(f_PB.device, torch.int64)
            firing.add(f_PB, contexts_B)
            largest.add(f_PB.mul_(directions_PD @ g_BD.T).abs_(), contexts_B)
    if not int(everyone.min_(torch.tensor(are_finite).int())):
        raise AttributionError(f"The store {store.key} holds (x, g) pairs that are not finite. Harvest it again.")
    assert firing is not None, "the store holds pairs"
    largest.merge_(everyone)
    firing.merge_(everyone)
    n_fired_P = firing.n_fired_P
    scores = {
        QuantileOver.ALL: largest.quantiles(torch.full_like(n_fired_P, n_positions)).cpu(),
        QuantileOver.ACTIVE: largest.quantiles(n_fired_P).cpu(),
    }
    other = QuantileOver.ACTIVE if config.quantile_over is QuantileOver.ALL else QuantileOver.ALL
    return Attribution(
        latents_P=torch.arange(n_pool),
        scores_P=scores[config.quantile_over].clone(),  # a tensor of its own, so that all of them can be saved
        firing_rates_P=(n_fired_P.double() / n_positions).cpu(),
        n_positions=n_positions,
        facts={"method": "gradient_x_activation", "config": to_dict(config), "store": store.key},
        scores_all_P=scores[QuantileOver.ALL],
        scores_active_P=scores[QuantileOver.ACTIVE],
        mean_activations_P=(firing.total_P() / n_fired_P.clamp(min=1)).cpu(),
        bootstrap_XP=_resampled(largest, firing, config.quantile_over, config.n_bootstrap),
        bootstrap_other_XP=_resampled(largest, firing, other, config.n_bootstrap),
    )


class _Firing:
    """How often each candidate fires, in each context if asked for, and how strongly."""

    def __init__(self, n_pool: int, n_contexts: int, device: torch.device, by_context: bool) -> None:
        self.n_fired_P = torch.zeros(n_pool, dtype=torch.int64, device=device)
        self.n_fired_PN = torch.zeros(n_pool, n_contexts, dtype=torch.int32, device=device) if by_context else None
        self.n_positions_N = torch.zeros(n_contexts, dtype=torch.int64, device=device)
        self._sums_P: list[Tensor] = [torch.zeros(n_pool, dtype=torch.float64, device=device)]

    def add(self, f_PB: Tensor, contexts_B: Tensor) -> None:
        """Take in a batch and the context of each position."""
        fires_PB = f_PB > 0
        self.n_fired_P += fires_PB.sum(1)
        if self.n_fired_PN is not None:
            self.n_fired_PN.index_add_(1, contexts_B, fires_PB.to(torch.int32))
        self.n_positions_N.index_add_(0, contexts_B, torch.ones_like(contexts_B))
        self._sums_P.append(f_PB.sum(1, dtype=torch.float64))

    def merge_(self, everyone: Axis) -> None:
        """Take in what all ranks of an axis have taken in, which took turns with the batches."""
        for counts in (self.n_fired_P, self.n_positions_N, self.n_fired_PN):
            if counts is not None:
                everyone.sum_(counts)
        by_rank = [list(sums) for sums in everyone.gather(torch.stack(self._sums_P))]
        self._sums_P = [one for turn in zip_longest(*by_rank) for one in turn if one is not None]

    def total_P(self) -> Tensor:
        """Return the sum of each candidate's activations, in the order of the batches: then it rounds in one way."""
        total_P = torch.zeros_like(self._sums_P[0])
        for sum_P in self._sums_P:
            total_P += sum_P
        return total_P


def _resampled(largest: LargestValues, firing: _Firing, over: QuantileOver, n: int) -> Tensor | None:
    """Return the scores of a rule in n resamples of the contexts, if any are asked for."""
    if firing.n_fired_PN is None:
        return None
    samples_PN = firing.n_positions_N[None] if over is QuantileOver.ALL else firing.n_fired_PN
    return bootstrap_scores(largest, samples_PN, n)


def _contexts(batch: Shard, first: int) -> Tensor:
    """Return the context of each position, of which `first` is the first; without text, each is one of its own."""
    return batch["context"] if "context" in batch else torch.arange(first, first + len(batch["x"]))


def _n_contexts(store: Store, batch: Shard) -> int:
    """Return how many contexts the pairs come from; where a row does not say, it is one of its own."""
    return len(store.tokens(Split.PAIRS)["tokens"]) if "context" in batch else store.n_rows(Split.PAIRS)


class CandidateCodes:
    """The activations f̃ of the candidate pool under the training-time mask, batch after batch."""

    def __init__(self, sae: SAE) -> None:
        self._sae = sae
        # A trained SAE's inference threshold is what its last batches kept at least: a good start for the first one.
        self._warm_start: float | None = float(sae.threshold[sae.config.n_dense :].median())

    @torch.no_grad()
    def __call__(self, x_BD: Tensor) -> Tensor:
        """Return f̃ [P, B]; all competing latents of the batch compete, whether candidates or not."""
        sae, config = self._sae, self._sae.config
        _, active, core_BC = sae.train_codes(x_BD, self._warm_start)
        self._warm_start = float(active.values_S.min()) if len(active.values_S) else None
        f_PB = x_BD.new_zeros(config.prefixes[0], len(x_BD))
        end = int(latent_offsets(active, config.width)[config.prefixes[0]])
        f_PB[active.latents_S[:end].long(), active.tokens_S[:end].long()] = active.values_S[:end]
        if core_BC is not None:
            f_PB[: config.n_core] = core_BC.T
        return f_PB


def require_match(sae: SAE, store: Store) -> None:
    """Raise unless the SAE is whole, fits the store, and the store holds pairs."""
    if store.d_model != sae.config.d_model:
        raise ConfigError(
            f"The store {store.key} holds activations of width {store.d_model}; the SAE takes {sae.config.d_model}."
        )
    if not store.n_rows(Split.PAIRS):
        raise StoreError(f"The store {store.key} holds no (x, g) pairs. Harvest with pair_tokens > 0.")
    for name, tensor in sae.state_dict().items():
        if not torch.isfinite(tensor).all():
            raise AttributionError(f"The SAE's {name} is not finite: its training diverged. It cannot be scored.")
