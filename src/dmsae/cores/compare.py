"""How two cores, or two scorings of one SAE, differ."""

from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.cores.attribution import Attribution
from dmsae.cores.core import Core
from dmsae.cores.ranking import spearman
from dmsae.cores.selection import select_core
from dmsae.errors import AttributionError, ConfigError


class CarryOver(NamedTuple):
    """How a core differs from the one before it."""

    size: int
    """Latents in the core."""
    kept: int
    """Those that were in the one before."""
    new: int
    """Those that were not."""
    dropped: int
    """Latents of the one before that are gone."""


def carry_over(current: Core, previous: Core | None) -> CarryOver:
    """Return how many latents a core kept, gained and lost."""
    before = set() if previous is None else set(previous.identities)
    kept = len(before & set(current.identities))
    return CarryOver(len(current), kept, len(current) - kept, len(before) - kept)


class Nearest(NamedTuple):
    """For each latent of one core, the one of another whose encoder row points most nearly the same way."""

    cosine_C: Tensor
    index_C: Tensor


def require_comparable(core: Core, other: Core) -> None:
    """Raise unless two cores are of the same model and hook: only then do their directions share a space."""
    remedy = "Directions of different activations cannot be compared."
    core.provenance.model.require_same(other.provenance.model, "the first core", "the second", remedy)


def nearest_in(core: Core, other: Core) -> Nearest:
    """Return the nearest latent of `other` for each of `core`; both must be of one width and not empty."""
    return nearest_rows(core.encoder_CD, other.encoder_CD)


def nearest_rows(rows_CD: Tensor, others_CD: Tensor) -> Nearest:
    """Return, for each row, the one among others that points most nearly the same way, whatever their lengths."""
    if rows_CD.shape[1] != others_CD.shape[1]:
        widths = f"{rows_CD.shape[1]} and {others_CD.shape[1]}"
        raise ConfigError(f"The cores are of activations of other widths ({widths}) and cannot be compared.")
    ours, theirs = (torch.nn.functional.normalize(rows, dim=1) for rows in (rows_CD, others_CD))
    return Nearest(*(ours @ theirs.T).max(dim=1))


def n_identical_rows(core: Core, other: Core) -> int:
    """Return how many encoder rows of a core are in the other, to the bit."""
    rows = {row.numpy().tobytes() for row in other.encoder_CD}
    return sum(row.numpy().tobytes() in rows for row in core.encoder_CD)


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
    jaccard: float | None
    """Latents that both select, as a share of those that either does; None when neither selects any."""


def agreement(first: Attribution, second: Attribution, coverage: float, max_rate: float | None = None) -> Agreement:
    """Return how far two scorings of the same SAE agree, and the cores that each would select.

    Both select from the latents that fire on at most `max_rate` of the first scoring's positions. The rank correlation
    is over all latents that both scored.
    """
    shared = torch.tensor(sorted(set(first.latents_P.tolist()) & set(second.latents_P.tolist())), dtype=torch.int64)
    if not len(shared):
        raise AttributionError("The two scorings have no latent in common: they cannot be compared.")
    places = [torch.searchsorted(a.latents_P, shared) for a in (first, second)]
    scores = [a.scores_P[places_S] for a, places_S in zip((first, second), places, strict=True)]
    eligible = first.firing_rates_P[places[0]] <= (1.0 if max_rate is None else max_rate)
    one, other = (_selected(values.where(eligible, 0.0), coverage) for values in scores)
    both, either = len(one & other), len(one | other)
    return Agreement(len(shared), spearman(*scores), len(one), len(other), both, both / either if either else None)


def _selected(scores_S: Tensor, coverage: float) -> set[int]:
    """Return what is selected; of latents without any score, none."""
    return set(select_core(scores_S, coverage).tolist()) if scores_S.any() else set()
