"""The price of keeping: what an SAE that carries a core loses against one that is free, at the same measured L0.

Frozen latents cannot adapt to the others, so keeping them costs something. How many are kept, how much of the
attribution they hold and what that costs is a frontier on which cores, selection rules and freezes can be compared.
Unconstrained means a Matryoshka SAE without a core, of equal width and with a prefix-0 as large as core + prefix-0.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import torch

from dmsae.config import require
from dmsae.cores.attribution import Attribution
from dmsae.cores.core import Core
from dmsae.errors import AttributionError
from dmsae.evaluation.fidelity import Fidelity
from dmsae.sae.config import SAEConfig

NEAR = 0.005
"""By what share of it an L0 may miss that of the outermost point: measured L0 varies by as much between seeds."""


class Point(NamedTuple):
    """Held-out figures of one SAE."""

    l0: float
    """Latents that fire per token, the core included, as measured."""
    fve: float
    """Fraction of the variance explained by the full reconstruction."""
    fve_prefix0: float
    """The same for the smallest prefix, which includes the core."""
    loss: float | None = None
    """Next-token loss of the model with the reconstruction in place, in nats; None when it was not measured."""

    @classmethod
    def of(cls, figures: Fidelity, loss: float | None = None) -> Self:
        """Return the point of an SAE whose fidelity was measured."""
        return cls(figures.l0_core + figures.l0_noncore, figures.fve, figures.fve_prefixes[0], loss)

    @property
    def finite(self) -> bool:
        """Whether all figures that there are can be used."""
        return all(math.isfinite(value) for value in self if value is not None)


class Price(NamedTuple):
    """What keeping a core costs; None where it is not known."""

    n_kept: int
    """Latents of the core."""
    attribution_share: float | None
    """Share of the attribution that they hold, in the pool that they were selected from."""
    l0: float
    """Measured L0 of the SAE that carries the core."""
    fve: float
    fve_unconstrained: float | None
    """FVE of an unconstrained SAE at that L0."""
    price: float | None
    """How much less is explained because the core is kept; below 0, more is."""
    fve_prefix0: float
    fve_prefix0_unconstrained: float | None
    price_prefix0: float | None
    loss: float | None = None
    """Next-token loss with the reconstruction in place, in nats."""
    loss_unconstrained: float | None = None
    price_loss: float | None = None
    """How many nats the model predicts worse because the core is kept; below 0, better."""
    note: str = ""
    """Why there is no price, or what was left out."""


def price(kept: Point, unconstrained: Sequence[Point], n_kept: int, attribution_share: float | None = None) -> Price:
    """Return the price of a core, from the SAE that carries it and unconstrained ones at other L0.

    Their FVE is interpolated linearly in L0, never extrapolated; an L0 that misses the outermost point by at most half
    a percent is taken for that point's. FVE grows more slowly the larger L0 is, so between distant points the
    interpolated value, and with it the price, is too low: train neighbours close by on both sides.
    """
    usable = [point for point in unconstrained if point.finite]
    fve, fve_prefix0, loss, note = None, None, None, _obstacle(kept, usable)
    if not note:
        fve, fve_prefix0 = interpolated(kept.l0, [point[:3] for point in usable])
        losses = [(point.l0, point.loss) for point in usable if point.loss is not None]
        if kept.loss is not None and len(losses) == len(usable):
            (loss,) = interpolated(kept.l0, losses)
        note = _left_out(len(unconstrained) - len(usable), len(unconstrained))
    return Price(
        n_kept=n_kept,
        attribution_share=attribution_share,
        l0=kept.l0,
        fve=kept.fve,
        fve_unconstrained=fve,
        price=None if fve is None else fve - kept.fve,
        fve_prefix0=kept.fve_prefix0,
        fve_prefix0_unconstrained=fve_prefix0,
        price_prefix0=None if fve_prefix0 is None else fve_prefix0 - kept.fve_prefix0,
        loss=kept.loss,
        loss_unconstrained=loss,
        price_loss=None if loss is None or kept.loss is None else kept.loss - loss,
        note=note,
    )


def interpolated(l0: float, points: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Return what points (L0, figures …) give at an L0 between theirs: on the lines through neighbouring points.

    Points of equal L0 count as their mean.
    """
    l0s = sorted({point[0] for point in points})
    means = [np.mean([point[1:] for point in points if point[0] == one], axis=0) for one in l0s]
    return tuple(float(np.interp(l0, l0s, values)) for values in zip(*means, strict=True))


def attribution_share(core: Core, attribution: Attribution) -> float:
    """Return the share of a pool's attribution that a core selected from it holds.

    It is 0 for a core without scores, such as a random one.
    """
    if not core.scores_C.any():
        return 0.0
    scores = dict(zip(attribution.latents_P.tolist(), attribution.scores_P.double().tolist(), strict=True))
    for latent, score in zip(core.slots_C.tolist(), core.scores_C.tolist(), strict=True):
        if scores.get(latent) != score:
            there = f"has the score {scores[latent]}" if latent in scores else "was not scored"
            raise AttributionError(
                f"The core was not selected from these scores: its latent {latent} has the score {score} in the core "
                f"and {there} here. Give the attribution of cycle {core.cycle} of its run."
            )
    return float(core.scores_C.sum() / attribution.scores_P.sum(dtype=torch.float64))


def require_matched(kept: SAEConfig, unconstrained: SAEConfig) -> None:
    """Raise unless an SAE may set the price of another: no core, equal width, equal core + prefix-0."""
    remedy = "Train an unconstrained SAE of the same shape as the one that carries the core."
    require(unconstrained.core is None, "core", unconstrained.core, "be left out", remedy)
    for name in ("d_model", "width"):
        theirs, ours = getattr(unconstrained, name), getattr(kept, name)
        require(theirs == ours, name, theirs, f"be {ours}", remedy)
    smallest = kept.prefixes[0]
    require(unconstrained.prefixes[0] == smallest, "prefixes[0]", unconstrained.prefixes[0], f"be {smallest}", remedy)


def _obstacle(kept: Point, unconstrained: Sequence[Point]) -> str:
    """Return why a price cannot be given, or nothing."""
    if not kept.finite:
        return "The figures of the SAE that carries the core are not finite: it collapsed."
    if not unconstrained:
        return "There is no unconstrained SAE to compare with. Train some without a core, at an L0 on either side."
    low, high = (extreme(point.l0 for point in unconstrained) for extreme in (min, max))
    if low * (1 - NEAR) <= kept.l0 <= high * (1 + NEAR):
        return ""
    return (
        f"L0 {kept.l0:.1f} lies outside {low:.1f} … {high:.1f}, that of the unconstrained SAEs. Train one at "
        f"{'a lower' if kept.l0 < low else 'a higher'} k."
    )


def _left_out(n: int, n_all: int) -> str:
    verb, whose = ("is", "its") if n == 1 else ("are", "their")
    return f"{n} of {n_all} unconstrained SAEs {verb} left out: {whose} figures are not finite." if n else ""
