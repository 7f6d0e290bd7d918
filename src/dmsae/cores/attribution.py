"""How much each candidate latent matters to the next-token loss: gradient × activation (the paper's Algorithm 2).

From stored pairs (x_u, g_u), with f̃ under the training-time mask (a dense core fires freely, BatchTopK keeps the k·B
largest of all others) and w̄_j the unit decoder row, `GxA_{u,j} = |f̃_{u,j} · g_uᵀ w̄_j|` and `A_j = quantile_q over u`.
Candidates are the latents of the smallest reconstruction: the core and prefix-0.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.config import Json, require_choice, require_whole, to_dict
from dmsae.cores.quantile import LargestValues, require_quantile
from dmsae.disk import layout
from dmsae.disk.artifact import read_artifact, write_artifact
from dmsae.errors import AttributionError, CheckpointError, ConfigError, StoreError
from dmsae.sae.sae import SAE
from dmsae.sae.sparse import latent_offsets

_TENSORS = ("latents_P", "scores_P", "firing_rates_P")
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

    def __post_init__(self) -> None:
        require_quantile(self.quantile)
        require_choice("quantile_over", self.quantile_over, QuantileOver)
        require_whole("batch_size", self.batch_size, 1)


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

    def save(self, directory: Path) -> None:
        """Write `attribution.safetensors`, with the coverage curve, and `attribution.json`."""
        tensors = {name: getattr(self, name) for name in _TENSORS} | {"coverage_curve": self.coverage_curve()}
        write_artifact(directory, layout.ATTRIBUTION, tensors, {name: getattr(self, name) for name in _FACTS})

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Return saved scores, or raise `CheckpointError` when anything about them is not as it was written."""
        tensors, facts = read_artifact(directory, layout.ATTRIBUTION)
        try:
            fields: Json = {name: tensors[name] for name in _TENSORS}
            return cls(**fields, **{name: facts[name] for name in _FACTS})
        except KeyError as error:
            raise CheckpointError(
                f"{directory / layout.ATTRIBUTION}.json does not describe attribution: no {error}."
            ) from error


@torch.no_grad()
def attribute(sae: SAE, store: Store, config: AttributionConfig | None = None) -> Attribution:
    """Return the gradient × activation scores of an SAE's candidate pool; the SAE takes activations as stored.

    >>> sae = dmsae.SAE.load(run / "cycle-0" / "sae")
    >>> scores = dmsae.attribute(sae, store)
    >>> len(scores.scores_P) == sae.config.prefixes[0]
    True
    """
    config = config or AttributionConfig()
    require_match(sae, store)
    n_positions, n_pool = store.n_rows(Split.PAIRS), sae.config.prefixes[0]
    directions_PD = torch.nn.functional.normalize(sae.W_dec[:n_pool], dim=1)
    largest = LargestValues(n_pool, config.quantile, n_positions, sae.W_dec)
    n_fired_P = torch.zeros(n_pool, dtype=torch.int64, device=sae.W_dec.device)
    codes = CandidateCodes(sae)
    for batch in store.batches(Split.PAIRS, config.batch_size):
        x_BD, g_BD = batch["x"].to(sae.W_dec), batch["g"].to(sae.W_dec)
        if not (torch.isfinite(x_BD).all() and torch.isfinite(g_BD).all()):
            raise AttributionError(f"The store {store.key} holds (x, g) pairs that are not finite. Harvest it again.")
        f_PB = codes(x_BD)
        n_fired_P += (f_PB > 0).sum(1)
        largest.add(f_PB.mul_(directions_PD @ g_BD.T).abs_())
    over_all = config.quantile_over is QuantileOver.ALL
    return Attribution(
        latents_P=torch.arange(n_pool),
        scores_P=largest.quantiles(torch.full_like(n_fired_P, n_positions) if over_all else n_fired_P).cpu(),
        firing_rates_P=(n_fired_P.double() / n_positions).cpu(),
        n_positions=n_positions,
        facts={"method": "gradient_x_activation", "config": to_dict(config), "store": store.key},
    )


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
