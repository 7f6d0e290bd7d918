"""A score beside its nulls: which of them is to be beaten, and how far the score gets from it towards the ceiling."""

from collections.abc import Mapping
from typing import Literal, NamedTuple, Self

Better = Literal["higher", "lower", ""]
"""Which way is better where there is no ceiling. Empty: neither, and no null is to beat."""


class ScoreRow(NamedTuple):
    """One score of one SAE, beside its nulls."""

    sae: str
    measure: str
    figure: str
    score: float | None
    nulls: dict[str, float | None]
    """What each null gets, by kind; the figure's own, if it has one, as `own`."""
    null: float | None
    """The one to beat: the best of them."""
    ceiling: float | None
    part: float | None
    """Part of the way from null to ceiling: (score − null) / (ceiling − null)."""

    @classmethod
    def of(
        cls,
        sae: str,
        measure: str,
        figure: str,
        score: float | None,
        nulls: dict[str, float | None],
        ceiling: float | None,
        better: Better = "",
    ) -> Self:
        """Return a score with the null to beat and the part of the way."""
        null = strongest(nulls, ceiling, better)
        return cls(sae, measure, figure, score, nulls, null, ceiling, part_of_the_way(score, null, ceiling))


def part_of_the_way(score: float | None, null: float | None, ceiling: float | None) -> float | None:
    """Return (score − null) / (ceiling − null): 0 for a null, 1 at the ceiling. None where it has no meaning."""
    if score is None or null is None or ceiling is None or ceiling == null:
        return None
    return (score - null) / (ceiling - null)


def strongest(nulls: Mapping[str, float | None], ceiling: float | None, better: Better = "") -> float | None:
    """Return the null that is hardest to beat; None if no score is better than another.

    Unless it is said, lower is better where the ceiling is 0. A null may lie above a ceiling that is itself measured.
    """
    known = [null for null in nulls.values() if null is not None]
    if not known or (ceiling is None and not better):
        return None
    return min(known) if better == "lower" or (not better and ceiling == 0) else max(known)
