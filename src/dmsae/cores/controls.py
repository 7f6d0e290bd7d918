"""Controls: cores of equal size that nothing was distilled into, or that another rule than attribution chose.

What is said of a distilled core has to be compared with random directions, with random detectors that are active as
often and as strongly, and with what a simpler rule takes from the same SAE. Each control is a `Core` that trains like
any other; `provenance.config` says what it is.
"""

from dataclasses import replace
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn.functional import normalize

from dmsae.activations.store import Store
from dmsae.config import Json, require
from dmsae.cores.attribution import Attribution
from dmsae.cores.core import Core, Lineage, Provenance
from dmsae.cores.null import covariance_matched_rows
from dmsae.cores.selection import detectors_of
from dmsae.cores.statistics import principal_directions, sample_activations
from dmsae.errors import AttributionError, ConfigError, StoreError
from dmsae.sae.detectors import Detectors, detect
from dmsae.sae.sae import SAE
from dmsae.seeds import derive_seed, generator

_BLOCK = 256
"""Detectors that are matched at once: bounds memory."""


class RandomKind(StrEnum):
    """What the rows of a random core share with the core that they stand in for."""

    UNIT = "unit"
    """Nothing: isotropic directions of unit norm."""
    NORM_MATCHED = "norm_matched"
    """Isotropic directions; each row has the norm of the row that it replaces."""
    COVARIANCE_MATCHED = "covariance_matched"
    """Directions with the covariance of the activations; each row has the norm of the row that it replaces."""


def random_core(like: Core, kind: RandomKind, seed: int, store: Store | None = None) -> Core:
    """Return a control: rows in random directions, as many as in `like`, selected by nothing.

    `store` gives the activations whose covariance rows are to have. A random core has no detectors: offsets and
    thresholds of other rows mean nothing for these. `random_detectors` makes some.

    >>> from dmsae.cores.controls import RandomKind
    >>> core = dmsae.Core.load(run)
    >>> control = dmsae.random_core(core, RandomKind.NORM_MATCHED, seed=0)
    >>> len(control) == len(core)
    True
    """
    origin: Json = {"kind": str(kind), "seed": seed, "like": like.digest()}
    if kind is not RandomKind.COVARIANCE_MATCHED:
        rows = _isotropic(like, generator(seed, "random core"))
    elif store is None:
        raise ConfigError(
            f"A random core of kind {kind} takes the covariance of activations, but was given no store. Give the store "
            f"that the core was distilled from, or choose kind {RandomKind.NORM_MATCHED}."
        )
    else:
        origin["store"] = store.key
        # A seed of its own: the null that a core is compared with must not be this very core.
        own_seed = derive_seed(seed, "random core")
        rows = covariance_matched_rows(_sample(like.provenance, store), len(like), own_seed).double()
    if kind is not RandomKind.UNIT:
        rows *= like.encoder_CD.double().norm(dim=1, keepdim=True)
    return _standing_in(like, rows.float(), None, {"random_core": origin})


def random_detectors(like: Core, store: Store, seed: int) -> Core:
    """Return a control: detectors along random directions, each as active as the one that it replaces.

    On a sample of the store's activations it fires as often, with the same mean value where it fires, above the same
    threshold. One that never fires on the sample stays silent, in a random direction of the same norm.
    """
    if like.detectors is None:
        raise ConfigError(
            "The core has no offsets and thresholds, so there are no firing rates to match: it was made before cores "
            "kept them, or its rows are random. Select it again from its SAE."
        )
    x_BD = _sample(like.provenance, store)
    directions = _isotropic(like, generator(seed, "random detectors")).float()
    blocks = zip(*(tensor.split(_BLOCK) for tensor in (directions, like.encoder_CD, *like.detectors)), strict=True)
    matched = [_as_active(x_BD, u_CD, rows, Detectors(*frozen)) for u_CD, rows, *frozen in blocks]
    slopes_C, offsets_C = (torch.cat(parts) for parts in zip(*matched, strict=True))
    if not torch.isfinite(slopes_C).all():
        raise StoreError(
            f"The first {len(x_BD)} activations of the store {store.key} hold too few distinct rows: along a random "
            "direction no threshold lets a detector fire at the rate asked for. Harvest more text."
        )
    detectors = Detectors(offsets_C.float(), like.detectors.thresholds_C)
    origin = {"seed": seed, "like": like.digest(), "store": store.key}
    return _standing_in(like, (slopes_C[:, None] * directions).float(), detectors, {"random_detectors": origin})


class Rule(StrEnum):
    """How a control chooses latents from a candidate pool.

    Mean activation × decoder norm is no rule of its own: decoder rows have unit norm, so it is the mean activation.
    """

    FIRING_RATE = "firing_rate"
    """Those that fire most often. Rates and means are those under the training-time mask, measured with the scores."""
    MEAN_ACTIVATION = "mean_activation"
    """Those with the largest mean activation, silent positions included."""
    RANDOM_SUBSET = "random_subset"
    """Any."""
    PRINCIPAL_COMPONENTS = "principal_components"
    """None of them: principal directions of the activations, with the median norm of the candidates' encoder rows. As
    detectors they fire where an activation lies above the mean, which is about half of the time."""
    ATTRIBUTION = "attribution"
    """Those with the highest scores: a core of a given size instead of a given coverage, without further cycles."""


def core_by_rule(
    rule: Rule,
    sae: SAE,
    attribution: Attribution,
    n: int,
    store: Store,
    provenance: Provenance,
    seed: int,
    cycle: int = 0,
) -> Core:
    """Return a control: the n latents that a rule chooses from an SAE's candidates, in descending order of attribution.

    All are born in the SAE's `cycle`, those of its core as well. Of equal candidates the lower index goes first.
    """
    pool_P = attribution.latents_P
    if int(pool_P.max()) >= sae.config.prefixes[0]:
        raise AttributionError(
            f"Latent {int(pool_P.max())} was scored, but the SAE's candidates are the first {sae.config.prefixes[0]}: "
            "the scores belong to another SAE."
        )
    of_sae = rule is not Rule.PRINCIPAL_COMPONENTS
    n_most = len(pool_P) if of_sae else sae.config.d_model
    what = "candidates" if of_sae else "directions"
    require(1 <= n <= n_most, "n", n, f"be at least 1 and at most {n_most}, the number of {what}")
    origin = {"rule": str(rule), "n": n, "seed": seed, "store": store.key, "run": provenance.config}
    provenance = replace(provenance, config={"core_by_rule": origin})
    if not of_sae:
        norm = sae.W_enc[pool_P].double().norm(dim=1).median()
        return _principal_core(_sample(provenance, store), n, float(norm), provenance, cycle)
    preferred_P = _preferences(rule, attribution, seed).sort(descending=True, stable=True).indices
    chosen = preferred_P[:n].sort().values
    scores, order = attribution.scores_P[chosen].double().sort(descending=True, stable=True)
    slots = pool_P[chosen[order]]
    return Core(
        encoder_CD=sae.W_enc[slots].detach().cpu().float(),
        scores_C=scores,
        slots_C=slots,
        lineage=tuple(Lineage(cycle, slot, (cycle,)) for slot in slots.tolist()),
        cycle=cycle,
        provenance=provenance,
        detectors=detectors_of(sae, slots),
    )


def _preferences(rule: Rule, attribution: Attribution, seed: int) -> Tensor:
    """Return what a rule ranks candidates by, [P]."""
    if rule is Rule.RANDOM_SUBSET:
        return torch.rand(len(attribution.latents_P), generator=generator(seed, "random subset"), dtype=torch.float64)
    if rule is not Rule.MEAN_ACTIVATION:
        return attribution.firing_rates_P if rule is Rule.FIRING_RATE else attribution.scores_P
    if attribution.mean_activations_P is None:
        raise AttributionError(
            "The scores come without mean activations: they are by ablation, or of an earlier version. Score the SAE "
            "again, by gradient × activation."
        )
    return attribution.mean_activations_P * attribution.firing_rates_P


def _sample(provenance: Provenance, store: Store) -> Tensor:
    """Return a sample of the activations that a core of this provenance sees."""
    provenance.model.require_same(store.model, "the core", f"the store {store.key}")
    return sample_activations(store)


def _isotropic(like: Core, draws: torch.Generator) -> Tensor:
    """Return random unit rows, as many and as wide as those of a core, in float64."""
    return normalize(torch.randn(like.encoder_CD.shape, generator=draws, dtype=torch.float64))


def _as_active(x_BD: Tensor, directions: Tensor, rows_CD: Tensor, detectors: Detectors) -> tuple[Tensor, Tensor]:
    """Return the slopes s and offsets β [C] with which s·u is as active on a sample as given detectors are.

    With z = u·x and a cut q above which z lies as often as the detector fires, s·(z − q) + θ has the detector's rate
    for any slope; the slope then sets the mean of the active values.
    """
    f_BC = detect(x_BD, rows_CD, detectors)
    fired_C, thresholds_C = (f_BC != 0).sum(0), detectors.thresholds_C.double()
    z_BC = (x_BD @ directions.T).double().sort(dim=0).values
    reach_C = z_BC[-1] - z_BC[0]
    # The cut is half-way between two neighbours; the ends get neighbours too, far away where nothing is to fire.
    ends_BC = torch.cat([z_BC[:1] - reach_C / len(z_BC), z_BC, z_BC[-1:] + 2 * reach_C])
    below = (len(z_BC) - fired_C)[None]
    cut_C = (ends_BC.gather(0, below) + ends_BC.gather(0, below + 1))[0] / 2
    excess_C = (z_BC - cut_C).clamp_(min=0).sum(0)
    slopes_C = (f_BC.double().sum(0) - fired_C * thresholds_C) / excess_C
    slopes_C = slopes_C.where(fired_C > 0, rows_CD.double().norm(dim=1))
    return slopes_C, thresholds_C - slopes_C * cut_C


def _principal_core(x_BD: Tensor, n: int, norm: float, provenance: Provenance, cycle: int) -> Core:
    """Return the core of the first n principal directions of activations."""
    rows_CD = norm * principal_directions(x_BD, n)
    offsets_C = -(rows_CD @ x_BD.double().mean(0))
    return Core(
        encoder_CD=rows_CD.float(),
        scores_C=torch.zeros(n, dtype=torch.float64),
        slots_C=torch.arange(n),
        lineage=tuple(Lineage(cycle, i, ()) for i in range(n)),
        cycle=cycle,
        provenance=provenance,
        detectors=Detectors(offsets_C.float(), torch.zeros(n)),
    )


def _standing_in(like: Core, rows_CD: Tensor, detectors: Detectors | None, origin: Json) -> Core:
    """Return the core of rows that stand in for those of another, selected by nothing."""
    return replace(
        like,
        encoder_CD=rows_CD,
        scores_C=torch.zeros(len(like), dtype=torch.float64),
        slots_C=torch.arange(len(like)),
        lineage=tuple(Lineage(like.cycle, i, ()) for i in range(len(like))),
        provenance=replace(like.provenance, config=origin),
        detectors=detectors,
    )
