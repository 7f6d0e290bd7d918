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
from dmsae.config import Json
from dmsae.cores.core import Core, Lineage, Provenance
from dmsae.cores.null import covariance_matched_rows
from dmsae.cores.statistics import sample_activations
from dmsae.errors import ConfigError, StoreError
from dmsae.sae.detectors import Detectors, detect
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
