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
from dmsae.cores.statistics import sample_activations
from dmsae.errors import ConfigError
from dmsae.sae.detectors import Detectors
from dmsae.seeds import generator

_BLOCK = 256
"""Rows of a sample, or detectors, that are worked on at once: bounds memory."""


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
    thresholds of other rows mean nothing for these.

    >>> from dmsae.cores.controls import RandomKind
    >>> core = dmsae.Core.load(run)
    >>> control = dmsae.random_core(core, RandomKind.NORM_MATCHED, seed=0)
    >>> len(control) == len(core)
    True
    """
    origin: Json = {"kind": str(kind), "seed": seed, "like": like.digest()}
    draws = generator(seed, "random core")
    if kind is not RandomKind.COVARIANCE_MATCHED:
        rows = _isotropic(like, draws)
    elif store is None:
        raise ConfigError(
            f"A random core of kind {kind} takes the covariance of activations, but was given no store. Give the store "
            f"that the core was distilled from, or choose kind {RandomKind.NORM_MATCHED}."
        )
    else:
        origin["store"] = store.key
        rows = _with_covariance(_sample(like.provenance, store), len(like), draws)
    if kind is not RandomKind.UNIT:
        rows *= like.encoder_CD.double().norm(dim=1, keepdim=True)
    return _standing_in(like, rows.float(), None, {"random_core": origin})


def _sample(provenance: Provenance, store: Store) -> Tensor:
    """Return a sample of the activations that a core of this provenance sees."""
    provenance.model.require_same(store.model, "the core", f"the store {store.key}")
    return sample_activations(store)


def _isotropic(like: Core, draws: torch.Generator) -> Tensor:
    """Return random unit rows, as many and as wide as those of a core, in float64."""
    return normalize(torch.randn(like.encoder_CD.shape, generator=draws, dtype=torch.float64))


def _with_covariance(x_BD: Tensor, n: int, draws: torch.Generator) -> Tensor:
    """Return n unit rows, in float64, in directions drawn with the covariance of activations.

    A sum of centred activations with independent normal weights has it, and no D×D matrix needs to be factorised.
    """
    mean_D = x_BD.double().mean(0)
    rows = torch.zeros(n, x_BD.shape[1], dtype=torch.float64)
    for block in x_BD.split(_BLOCK):
        weights = torch.randn(n, len(block), generator=draws, dtype=torch.float64)
        rows.addmm_(weights, block.double() - mean_D)
    return normalize(rows)


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
