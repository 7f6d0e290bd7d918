"""Many SAEs and seeds in one table: nulls, spread, paired differences with intervals, and curves against measured L0.

An SAE's seed is the number after `seed` or `s` in its name, or in that of its evaluation's directory. `k` is found in
the same way; where neither has it, it is the SAE's own. What is left of the name is the method: `msae-k40-s1` is seed 1
of the method `msae` at k = 40. Differences are taken seed by seed, so what seeds have in common cancels, and with the
baseline either at the same k or at the same *measured* L0, on the line through the baseline's neighbouring points.
Nothing is extrapolated. An SAE that several evaluations hold counts once.
"""

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Self

from dmsae.errors import ConfigError, nearest
from dmsae.evaluation.comparable import require_one_store, require_same_settings
from dmsae.evaluation.price import interpolated
from dmsae.evaluation.scores import Evaluation, look_up

_LEVEL = 0.95
_SEED = re.compile(r"(?:^|(?<=[-_/. ]))s(?:eed)?[-_=]?(\d+)(?=$|[-_/. ])")
_K = re.compile(r"(?:^|(?<=[-_/. ]))k[-_=]?(\d+)(?=$|[-_/. ])")
_L0 = (("fidelity", "l0"), ("activity", "l0.total"))
"""Where the measured L0 is, in order of preference."""


class Member(NamedTuple):
    """One SAE among those compared."""

    method: str
    k: int | None
    seed: int | None
    l0: float | None
    """Latents that fire per token, as measured."""
    scores: dict[str, float]
    """By measure and figure, such as `fidelity.fve`."""
    nulls: dict[str, float]
    """The null to beat, for each score that has one."""
    parts: dict[str, float]
    """Part of the way from null to ceiling, for each score that has both."""


class Spread(NamedTuple):
    """One score of SAEs that differ in their seed alone."""

    method: str
    k: int | None
    score: str
    n: int
    mean: float
    sd: float | None
    """Standard deviation over seeds; None for one seed."""
    low: float
    high: float
    l0: float | None
    """Mean measured L0."""
    null: float | None
    """Mean null to beat; None unless every seed has one."""
    part: float | None
    """Mean part of the way from null to ceiling; None unless every seed has one."""


class Difference(NamedTuple):
    """How much higher a score is than the baseline's, seed by seed."""

    method: str
    k: int | None
    score: str
    at: Literal["k", "L0"]
    """What is the same in both."""
    n: int
    """Seeds that both have."""
    mean: float
    low: float | None
    """Ends of the 95 % t interval of the mean over seeds; None for one seed."""
    high: float | None


class CurvePoint(NamedTuple):
    """A method's score at one L0, interpolated in each seed."""

    method: str
    score: str
    l0: float
    n: int
    mean: float
    sd: float | None


def members_of(evaluations: Mapping[str, Evaluation], scores: Sequence[str] = ()) -> list[Member]:
    """Return the SAEs of several evaluations, given by the names of their directories; nulls are left out.

    With `scores` given, only these are kept.
    """
    require_one_store(evaluations)
    found = [_found(place, sae, one) for place, one in evaluations.items() for sae in one.saes()]
    known = _scores([one.member for one in found])
    for score in scores:
        if score not in known:
            raise ConfigError(f"No evaluation holds the score {score!r}. {nearest(score, known)}")
    kept = scores or known
    require_same_settings(evaluations, list(dict.fromkeys(score.split(".")[0] for score in kept)))
    return [
        member._replace(
            scores=_only(kept, member.scores), nulls=_only(kept, member.nulls), parts=_only(kept, member.parts)
        )
        for member in _distinct(found)
    ]


def _only(scores: Sequence[str], values: Mapping[str, float]) -> dict[str, float]:
    return {score: values[score] for score in scores if score in values}


class _Found(NamedTuple):
    """An SAE in an evaluation."""

    where: str
    digest: str
    """Of its weights and config."""
    member: Member

    def beside(self, other: Self) -> Self:
        """Return the same SAE with what another evaluation of it holds too."""
        mine, theirs = self.member, other.member
        if mine.seed is not None and theirs.seed not in (None, mine.seed):
            raise ConfigError(
                f"{self.where} and {other.where} are the same SAE, but their names say seed {mine.seed} and seed "
                f"{theirs.seed}. Evaluate both seeds, or give one of them."
            )
        seed = theirs.seed if mine.seed is None else mine.seed
        l0 = theirs.l0 if mine.l0 is None else mine.l0
        figures = (theirs.scores | mine.scores, theirs.nulls | mine.nulls, theirs.parts | mine.parts)
        return self._replace(member=Member(mine.method, mine.k, seed, l0, *figures))


def _distinct(found: Sequence[_Found]) -> list[Member]:
    """Return each SAE once; two that differ must not have one method, k and seed."""
    saes: dict[tuple[str, int | None, str], _Found] = {}
    for one in found:
        key = (one.member.method, one.member.k, one.digest)
        saes[key] = saes[key].beside(one) if key in saes else one
    named: dict[tuple[str, int | None, int | None], _Found] = {}
    for one in saes.values():
        method, k, seed = one.member[:3]
        if (other := named.setdefault((method, k, seed), one)) is not one:
            raise ConfigError(
                f"{other.where} and {one.where} are two SAEs, but by their names both are {method} with k = {k} and "
                f"{'no seed' if seed is None else f'seed {seed}'}. Evaluate them under names, or in directories, that "
                "say their seeds, such as msae-k40-s1; or give one of them."
            )
    return [one.member for one in named.values()]


def _found(directory: str, sae: str, evaluation: Evaluation) -> _Found:
    rows = {f"{row.measure}.{row.figure}": row for row in evaluation.rows() if row.sae == sae and row.score is not None}
    l0s = (
        look_up(evaluation.measures[measure]["results"][sae], figure)
        for measure, figure in _L0
        if measure in evaluation.measures
    )
    method = re.sub(r"([-_/. ])[-_/. ]+", r"\1", _K.sub("", _SEED.sub("", sae))).strip("-_/. ")
    member = Member(
        method or sae,
        _number(_K, sae, directory) or evaluation.subjects[sae]["config"].get("k"),
        _number(_SEED, sae, directory),
        next((l0 for l0 in l0s if l0 is not None), None),
        {score: row.score for score, row in rows.items() if row.score is not None},
        {score: row.null for score, row in rows.items() if row.null is not None},
        {score: row.part for score, row in rows.items() if row.part is not None},
    )
    return _Found(f"{sae} in {directory}", evaluation.subjects[sae]["digest"], member)


def _number(pattern: re.Pattern[str], *names: str) -> int | None:
    """Return the number that a pattern finds in the first of some names that has it."""
    found = (match for name in names if (match := pattern.search(name)))
    return next((int(match[1]) for match in found), None)


def spreads(members: Sequence[Member]) -> list[Spread]:
    """Return the mean and spread of every score over seeds, beside its nulls."""
    groups: dict[tuple[str, int | None], list[Member]] = defaultdict(list)
    for member in members:
        groups[member.method, member.k].append(member)
    return [
        _spread(score, with_score, _mean_l0(group))
        for score in _scores(members)
        for group in groups.values()
        if (with_score := [member for member in group if score in member.scores])
    ]


def _spread(score: str, members: Sequence[Member], l0: float | None) -> Spread:
    method, k = members[0][:2]
    values = [member.scores[score] for member in members]
    null, part = (_mean_of_all(score, of) for of in ([one.nulls for one in members], [one.parts for one in members]))
    return Spread(method, k, score, len(values), *_mean_sd(values), min(values), max(values), l0, null, part)


def _mean_of_all(score: str, values: Sequence[Mapping[str, float]]) -> float | None:
    """Return the mean of what each member has for a score; None unless all of them have it."""
    return statistics.fmean(one[score] for one in values) if all(score in one for one in values) else None


def differences(members: Sequence[Member], baseline: str) -> list[Difference]:
    """Return how far every other method is above the baseline, at the same k and at the same measured L0."""
    methods = list(dict.fromkeys(member.method for member in members))
    if baseline not in methods:
        raise ConfigError(f"No SAE is of the method {baseline!r}. {nearest(baseline, methods)}")
    groups: dict[tuple[str, int | None], list[Member]] = defaultdict(list)
    for member in members:
        if member.method != baseline:
            groups[member.method, member.k].append(member)
    base = [member for member in members if member.method == baseline]
    found = []
    for score in _scores(members):
        for (method, k), group in groups.items():
            for at in ("k", "L0"):
                values = [d for one in group if (d := _difference(one, base, score, at)) is not None]
                if values:
                    found.append(Difference(method, k, score, at, len(values), *mean_interval(values)))
    return found


def _difference(member: Member, base: Sequence[Member], score: str, at: str) -> float | None:
    """Return a member's score less that of the baseline with the same seed; None where there is none to compare."""
    same_seed = [one for one in base if one.seed == member.seed and score in one.scores]
    if score not in member.scores:
        return None
    if at == "L0":
        there = _on_curve(same_seed, score, member.l0)
    else:
        values = [one.scores[score] for one in same_seed if one.k == member.k]
        there = statistics.fmean(values) if values else None
    return None if there is None else member.scores[score] - there


def curves(members: Sequence[Member], l0s: Sequence[float]) -> list[CurvePoint]:
    """Return every score of every method at given L0s, interpolated in each seed that reaches to both sides."""
    found = []
    for score in _scores(members):
        for method in dict.fromkeys(member.method for member in members):
            own = [member for member in members if member.method == method and score in member.scores]
            seeds = dict.fromkeys(member.seed for member in own)
            for l0 in l0s:
                each = (_on_curve([one for one in own if one.seed == seed], score, l0) for seed in seeds)
                if values := [value for value in each if value is not None]:
                    found.append(CurvePoint(method, score, l0, len(values), *_mean_sd(values)))
    return found


def _on_curve(members: Sequence[Member], score: str, l0: float | None) -> float | None:
    """Return a score at some L0 between those of members; None outside."""
    points = [(member.l0, member.scores[score]) for member in members if member.l0 is not None]
    if l0 is None or not points or not min(points)[0] <= l0 <= max(points)[0]:
        return None
    (value,) = interpolated(l0, points)
    return value


def mean_interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Return the mean, and the ends of its 95 % t interval; they are None for one value."""
    mean, sd = _mean_sd(values)
    if sd is None:
        return mean, None, None
    from scipy.stats import t

    reach = float(t.ppf((1 + _LEVEL) / 2, len(values) - 1)) * sd / math.sqrt(len(values))
    return mean, mean - reach, mean + reach


def _mean_sd(values: Sequence[float]) -> tuple[float, float | None]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def _mean_l0(members: Sequence[Member]) -> float | None:
    known = [member.l0 for member in members if member.l0 is not None]
    return statistics.fmean(known) if known else None


def _scores(members: Sequence[Member]) -> list[str]:
    """Return the names of all scores, in order of appearance."""
    return list(dict.fromkeys(score for member in members for score in member.scores))
