"""How long the rows of a core are.

Decoder rows have unit norm, so the norm of a frozen encoder row decides how much its latent adds to a reconstruction;
a latent that adds too much is silenced by its bias, whatever its direction.
"""

import math
from dataclasses import replace
from typing import Literal, NamedTuple

import torch

from dmsae.config import require
from dmsae.cores.core import Core
from dmsae.errors import CheckpointError
from dmsae.sae.detectors import Detectors

CoreNorm = Literal["found", "unit"] | float
"""Rows as they were found, of unit norm, or as found times a factor."""


class RowNorms(NamedTuple):
    """The norms of a core's encoder rows."""

    smallest: float
    median: float
    largest: float


def row_norms(core: Core) -> RowNorms | None:
    """Return the smallest, median and largest norm of a core's rows; None for an empty core."""
    if not len(core):
        return None
    norms = core.encoder_CD.double().norm(dim=1)
    return RowNorms(float(norms.min()), float(norms.median()), float(norms.max()))


def require_norm(norm: CoreNorm) -> None:
    """Raise unless rows can be given such a norm."""
    allowed = norm in ("found", "unit") or (isinstance(norm, float | int) and 0 < norm < math.inf)
    require(allowed, "core_norm", norm, "be found, unit, or a positive factor")


def with_norm(core: Core, norm: CoreNorm, n_carried: int = 0) -> Core:
    """Return a core with other row norms. Its latents fire where they did, if they are detectors, times the change.

    Latents whose slot is below `n_carried` came from the core before, where that was done, and stay as they are.
    """
    require_norm(norm)
    if norm == "found":
        return core
    norms = core.encoder_CD.double().norm(dim=1)
    if norm == "unit" and not norms.all():
        raise CheckpointError("A row of the core is zero: it cannot be given unit norm.")
    change = 1 / norms if norm == "unit" else torch.full_like(norms, float(norm))
    change[core.slots_C < n_carried] = 1.0
    detectors = core.detectors
    if detectors is not None:
        detectors = Detectors(*((values_C.double() * change).float() for values_C in detectors))
    rows = (core.encoder_CD.double() * change[:, None]).float()
    return replace(core, encoder_CD=rows, detectors=detectors)
