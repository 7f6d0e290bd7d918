"""Whether different distillations found the same core: encoder rows, matched one to one."""

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import torch

from dmsae.config import require
from dmsae.cores.compare import CarryOver, carry_over, n_identical_rows, require_comparable
from dmsae.cores.core import Core
from dmsae.evaluation.assignment import Matching, match_rows
from dmsae.evaluation.mcc_null import IsotropicNulls, NullMcc, own_covariance_matching
from dmsae.evaluation.stability import StabilityConfig
from dmsae.progress import SILENT, Progress


class CorePairStability(NamedTuple):
    """Two cores, compared by their encoder rows: a core has no decoder of its own."""

    first: str
    second: str
    n_first: int
    n_second: int
    encoder_signed: float
    """PW-MCC: the mean cosine of rows matched one to one."""
    encoder_absolute: float
    null_isotropic: NullMcc
    """Directions drawn evenly."""
    null_encoder: float | None
    """Directions drawn with the covariance of the rows, signed."""
    shared: float
    """Share of the smaller core whose partner is above the bound."""
    null_shared: float | None
    """The same for random directions with the covariance of the rows."""
    n_identical: int
    """Rows that are the same to the bit: frozen ones agree by construction."""
    carried: CarryOver | None
    """What the second kept of the first, by lineage, if they are of one run."""


@torch.no_grad()
def core_stability(
    cores: Mapping[str, Core],
    config: StabilityConfig,
    cache: Path | None = None,
    progress: Progress = SILENT,
) -> list[CorePairStability]:
    """Return how alike each two of several cores, by name, are."""
    require(len(cores) >= 2, "cores", list(cores), "be at least two cores")
    for name, core in cores.items():
        require(len(core) > 0, name, len(core), "be a core of at least one latent")
    nulls = IsotropicNulls(config.seed, cache)
    pairs = list(combinations(cores, 2))
    results = []
    with progress.bar("stability", len(pairs), "pairs") as bar:
        for first, second in pairs:
            results.append(_pair(first, cores[first], second, cores[second], config, nulls))
            bar.advance(1)
    return results


def _pair(
    first: str, one: Core, second: str, other: Core, config: StabilityConfig, nulls: IsotropicNulls
) -> CorePairStability:
    require_comparable(one, other)
    signed, absolute = (match_rows(one.encoder_CD, other.encoder_CD, by_size) for by_size in (False, True))
    null = own_covariance_matching(one.encoder_CD, other.encoder_CD, config.seed)
    return CorePairStability(
        first,
        second,
        len(one),
        len(other),
        encoder_signed=float(signed.cosines_K.nanmean()),
        encoder_absolute=float(absolute.cosines_K.abs().nanmean()),
        null_isotropic=nulls.of(len(one), len(other), one.encoder_CD.shape[1]),
        null_encoder=None if null is None else float(null.cosines_K.nanmean()),
        shared=_share_above(signed, config.min_cosine),
        null_shared=None if null is None else _share_above(null, config.min_cosine),
        n_identical=n_identical_rows(one, other),
        carried=carry_over(other, one) if one.provenance == other.provenance else None,
    )


def _share_above(matching: Matching, min_cosine: float) -> float:
    return float((matching.cosines_K[matching.matched] > min_cosine).double().mean())
