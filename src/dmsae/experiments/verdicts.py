"""Claims, each as a check on the figures of experiments: a statistic for every seed, an interval, and what it says.

Nothing here is written by hand: a claim holds when the whole 95 % interval of its statistic lies on the right side of
the null, and does not hold when it lies on the wrong one. With fewer than three seeds nothing can be told, nor if the
figures of a seed do not give the statistic.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

from scipy import stats

from dmsae.config import Json

_MIN_SEEDS = 3
PAPER, OURS = "the paper", "ours"
"""Whose claim it is."""


class Outcome(StrEnum):
    """What the figures say about a claim."""

    HOLDS = "holds"
    FAILS = "does not hold"
    OPEN = "cannot be told"
    UNTESTED = "not tested here"


class Verdict(NamedTuple):
    """A claim and what was found."""

    claim: str
    whose: str
    """The paper's, or ours."""
    part: str
    """Of an experiment, whose figures it is judged by."""
    outcome: Outcome
    statistic: str
    """What was measured for each seed; the claim says that it exceeds the null."""
    null: float
    estimate: float | None
    low: float | None
    """The 95 % interval of the mean over seeds, Student's t."""
    high: float | None
    seeds: list[int]
    values: list[float]
    """The statistic of each seed."""
    n_run: int
    """Seeds whose part ran, with or without figures that give the statistic."""


class Claim(NamedTuple):
    """Something that figures can confirm or contradict."""

    text: str
    whose: str
    part: str
    statistic: str
    measure: Callable[[Json], float | None]
    """The statistic of one seed's figures; None when they do not give it."""
    null: float = 0.0


def verdicts(results: Sequence[Json], claims: Sequence[Claim]) -> list[Verdict]:
    """Return the verdict on every claim, from the results of all parts and seeds: the paper's claims first, those that
    were not tested last."""
    found = [judge(claim, [result for result in results if result["part"] == claim.part]) for claim in claims]
    return sorted(found, key=lambda one: (one.outcome is Outcome.UNTESTED, one.whose != PAPER))


def judge(claim: Claim, results: Sequence[Json]) -> Verdict:
    """Return the verdict on a claim from the results of its part."""
    measured = {result["seed"]: claim.measure(result["figures"]) for result in results}
    known = {seed: value for seed, value in sorted(measured.items()) if value is not None and math.isfinite(value)}
    values = list(known.values())
    estimate, low, high = interval(values)
    if not values:
        outcome = Outcome.UNTESTED
    elif len(values) < max(_MIN_SEEDS, len(measured)) or low is None or high is None:
        outcome = Outcome.OPEN  # seeds that did not give the statistic may be those that it failed in
    else:
        outcome = Outcome.HOLDS if low > claim.null else Outcome.FAILS if high < claim.null else Outcome.OPEN
    about = (claim.text, claim.whose, claim.part, outcome, claim.statistic, claim.null)
    return Verdict(*about, estimate, low, high, list(known), values, len(measured))


def interval(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Return the mean of independent values and its 95 % interval, which a single value does not have."""
    if not values:
        return None, None, None
    mean = statistics.fmean(values)
    if len(values) == 1:
        return mean, None, None
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half
