"""Consensus: the latents that several independently trained SAEs agree on.

The candidates of the first SAE are matched one to one with those of every other, by encoder row, decoder row and firing
together. What enough of the others have too is the core, in order of attribution. It takes one pass of training where
cycles take several.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.config import require, require_whole, to_dict
from dmsae.cores.attribution import Attribution
from dmsae.cores.core import Core, Lineage, Provenance
from dmsae.cores.selection import detectors_of, eligible_scores, select_core
from dmsae.errors import AttributionError, ConfigError
from dmsae.sae.sae import SAE


@dataclass(frozen=True, slots=True)
class ConsensusConfig:
    """What counts as agreement."""

    min_similarity: float = 0.5
    """How alike matched latents must be: the mean of their encoder cosine, decoder cosine and firing Jaccard."""
    min_share: float = 0.5
    """Share of the other SAEs that must have a latent, for it to enter the core."""
    heldout_tokens: int = 16_384
    """Held-out activations on which firing is compared, at most."""

    def __post_init__(self) -> None:
        require(0 < self.min_similarity < 1, "min_similarity", self.min_similarity, "lie between 0 and 1")
        require(0 < self.min_share <= 1, "min_share", self.min_share, "be above 0 and at most 1")
        require_whole("heldout_tokens", self.heldout_tokens, 1)


class Match(NamedTuple):
    """The candidates of one SAE matched one to one with those of another."""

    partners_P: Tensor
    """For each candidate of the first, its partner in the second; −1 when there are too few."""
    similarity_P: Tensor
    """How alike they are; −1 without a partner."""


@torch.no_grad()
def consensus_core(
    saes: Sequence[SAE],
    attribution: Attribution,
    store: Store,
    provenance: Provenance,
    config: ConsensusConfig | None = None,
    coverage: float = 1.0,
    max_rate: float | None = None,
) -> Core:
    """Return the candidates of the first SAE, which `attribution` scores, that enough of the others have too.

    Those that fire on more than `max_rate` of the positions stay out. Of the others it is the fewest that hold
    `coverage` of their attribution.
    """
    config = config or ConsensusConfig()
    require(len(saes) >= 2, "saes", len(saes), "be at least 2 SAEs")
    _require_no_core(saes)
    matches = [match_candidates(saes[0], other, store, config.heldout_tokens) for other in saes[1:]]
    similarity_MP = torch.stack([match.similarity_P for match in matches])
    agreed_MP = similarity_MP >= config.min_similarity
    share_P = agreed_MP.double().mean(0)
    scores_P = eligible_scores(attribution, max_rate).double().where(share_P >= config.min_share, 0.0)
    if not scores_P.any():
        raise AttributionError(
            f"The {len(saes)} SAEs agree on no candidate: the most alike have similarity {similarity_MP.max():.2f}; "
            f"min_similarity is {config.min_similarity}. Train longer, lower min_similarity, or use fewer members."
        )
    chosen = select_core(scores_P, coverage)
    found_by = [(agreed_MP[:, slot].nonzero().squeeze(1) + 1).tolist() for slot in chosen.tolist()]
    details = {"members": len(saes), **to_dict(config), "found_by": found_by}
    details["similarity"] = [round(value, 4) for value in similarity_MP.mean(0)[chosen].tolist()]
    return Core(
        encoder_CD=saes[0].W_enc[chosen].detach().cpu().float(),
        scores_C=attribution.scores_P[chosen].double(),
        slots_C=chosen,
        lineage=tuple(Lineage(0, slot, (0,)) for slot in chosen.tolist()),
        cycle=0,
        provenance=Provenance(provenance.model, provenance.store, {**provenance.config, "consensus": details}),
        detectors=detectors_of(saes[0], chosen),
    )


@torch.no_grad()
def match_candidates(first: SAE, second: SAE, store: Store, heldout_tokens: int = 16_384) -> Match:
    """Return the one-to-one matching of two candidate pools that makes the summed similarity largest."""
    from scipy.optimize import linear_sum_assignment

    n_first, n_second = first.config.prefixes[0], second.config.prefixes[0]
    similarity = _cosines(first.W_enc[:n_first], second.W_enc[:n_second])
    similarity += _cosines(first.W_dec[:n_first], second.W_dec[:n_second])
    similarity += firing_jaccard(first, second, store, heldout_tokens)
    similarity /= 3
    rows, columns = (torch.from_numpy(indices) for indices in linear_sum_assignment(similarity.numpy(), maximize=True))
    partners_P, similarity_P = torch.full((n_first,), -1), torch.full((n_first,), -1.0, dtype=torch.float64)
    partners_P[rows], similarity_P[rows] = columns, similarity[rows, columns]
    return Match(partners_P, similarity_P)


@torch.no_grad()
def firing_jaccard(first: SAE, second: SAE, store: Store, heldout_tokens: int) -> Tensor:
    """Return the Jaccard index of firing of every pair of candidates on held-out activations, float64."""
    if not store.n_rows(Split.HELDOUT):
        raise ConfigError(f"The store {store.key} holds no held-out activations, on which firing is compared.")
    n_first, n_second = first.config.prefixes[0], second.config.prefixes[0]
    both = torch.zeros(n_first, n_second, dtype=torch.float64)
    fired = torch.zeros(n_first, dtype=torch.float64), torch.zeros(n_second, dtype=torch.float64)
    n_seen = 0
    for batch in store.batches(Split.HELDOUT, 2048):
        x_BD = batch["x"][: heldout_tokens - n_seen]
        if not len(x_BD):
            break
        n_seen += len(x_BD)
        on = [_fires(first, x_BD), _fires(second, x_BD)]
        both += (on[0].T @ on[1]).double()
        for total, active in zip(fired, on, strict=True):
            total += active.sum(0)
    either = fired[0][:, None] + fired[1][None] - both
    return both / either.clamp(min=1)


def _fires(sae: SAE, x_BD: Tensor) -> Tensor:
    """Return 1 where a candidate fires, [B, P]."""
    return (sae.encode(x_BD.to(sae.W_dec))[:, : sae.config.prefixes[0]] > 0).float().cpu()


def _cosines(first: Tensor, second: Tensor) -> Tensor:
    one, other = (torch.nn.functional.normalize(rows.detach().double().cpu(), dim=1) for rows in (first, second))
    return one @ other.T


def _require_no_core(saes: Sequence[SAE]) -> None:
    if any(sae.config.core for sae in saes):
        raise ConfigError("SAEs with a core agree on it by construction. Give SAEs that were trained without one.")
    if len({sae.config.d_model for sae in saes}) != 1:
        raise ConfigError("The SAEs have different d_model and cannot be compared.")
