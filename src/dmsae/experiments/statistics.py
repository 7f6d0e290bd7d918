"""What claims are judged by: each a number that one seed's figures give, or None when they do not give it."""

from statistics import fmean
from typing import NamedTuple

import torch

from dmsae.config import Json
from dmsae.cores.ranking import spearman
from dmsae.evaluation.price import NEAR, interpolated

_ALIKE = 0.05
"""By what share of it the measured L0 of a control may differ from that of the core that it is compared with."""
LAST = "after-last-"
"""How the name of an SAE begins that carries a core from after the largest number of cycles, whatever that is."""


def row_of(figures: Json, *beginnings: str) -> Json | None:
    """Return the first row whose SAE's name begins in one of some ways."""
    if cycles := figures.get("priced_cycles"):
        beginnings = tuple(begin.replace(LAST, f"after-{max(cycles)}-") for begin in beginnings)
    rows = (row for row in figures["rows"] for begin in beginnings if row["sae"].startswith(begin))
    return next(rows, None)


def _difference(figures: Json, figure: str, better: str, worse: str) -> float | None:
    one, other = row_of(figures, better), row_of(figures, worse)
    if one is None or other is None or one[figure] is None or other[figure] is None:
        return None
    return float(one[figure] - other[figure])


def negative(row: Json | None, figure: str) -> float | None:
    """Return a figure of a row with its sign changed, if there is one."""
    return None if row is None or row.get(figure) is None else -float(row[figure])


def price_saved(figures: Json, core: str, control: str) -> float | None:
    """Return how much more a control costs than a core, each against SAEs of its own L0."""
    return _difference(figures, "price", control, core)


def persists(figures: Json, mode: str) -> float | None:
    """Return the share of the first core in the last, from a selected start less from a random one.

    None if either did not run all of its cycles: the fewer cycles, the more of the first core is left.
    """
    shares = {}
    for start in ("selected", "random"):
        cycles = [cycle for cycle in figures["cycles"] if cycle["run"] == f"{mode}-{start}"]
        if not cycles or not cycles[0]["size"] or f"{mode}-{start}" in figures.get("failures", ()):
            return None
        shares[start] = cycles[-1]["of_first"] / cycles[0]["size"]
    return float(shares["selected"] - shares["random"])


def _activity_kept(figures: Json, source: str, norm: object, at: Json) -> float | None:
    """Return the share of its first L0 that a core keeps to the end of training; the first row with these settings."""
    asked = at | {"norm": norm}
    rows = (row for row in figures["rows"] if row["sae"].startswith(source))
    row = next((row for row in rows if all(row[name] == value for name, value in asked.items())), None)
    activity = figures["curves"][row["sae"]]["l0_core"] if row else []
    return activity[-1] / activity[0] if len(activity) > 1 and activity[0] else None


def stays_in_use(figures: Json, random_norm: object = "found", kind: str = "norm_matched", **at: int) -> float | None:
    """Return how much of its first activity a core keeps, less what a random one keeps, by default of equal norms; or
    what the random one loses, or what the core keeps beyond a half, if that is less: one decays, the other stays."""
    own = _activity_kept(figures, "dense", "found", at)
    random = _activity_kept(figures, f"random-{kind}-dense", random_norm, at)
    return min(own - random, 1 - random, own - 0.5) if own is not None and random is not None else None


def stays_at_largest(figures: Json, setting: str, kind: str = "norm_matched") -> float | None:
    """Return the same at the largest value of a setting, if there are several."""
    values = sorted({row[setting] for row in figures["rows"]})
    return stays_in_use(figures, kind=kind, **{setting: values[-1]}) if len(values) > 1 else None


def longer_rows_decay(figures: Json, source: str) -> float | None:
    """Return how much of its first activity a core keeps, less what it keeps when its rows are twice as long; or what
    it loses then, if that is less."""
    found, longer = (_activity_kept(figures, source, norm, {}) for norm in ("found", 2.0))
    return min(found - longer, 1 - longer) if found is not None and longer is not None else None


def _carry_over(figures: Json) -> dict[int, float]:
    """Return, for each k, the share of the last core but one that the last core keeps; a collapse keeps nothing."""
    last: dict[int, list[Json]] = {}
    for cycle in figures["cycles"]:
        last.setdefault(cycle["k"], []).append(cycle)
    kept = {k: ones[-1]["kept"] / ones[-2]["size"] for k, ones in last.items() if len(ones) > 1 and ones[-2]["size"]}
    return kept | dict.fromkeys(map(int, figures.get("failures", ())), 0.0)


def peaks_inside(figures: Json) -> float | None:
    carried = [share for _, share in sorted(_carry_over(figures).items())]
    return fmean(carried[1:-1]) - max(carried[0], carried[-1]) if len(carried) > 2 else None


def rises(figures: Json) -> float | None:
    rows = [row for row in figures["rows"] if row["fve"] is not None]
    coverages, explained = (torch.tensor([row[name] for row in rows]) for name in ("coverage", "fve"))
    return spearman(coverages, explained) if len(rows) > 2 else None


def loss_falls(figures: Json) -> float | None:
    """Return minus the rank correlation of τ and reconstruction loss, mean over the steps that were kept."""
    curves = {float(tau): curve["loss"] for tau, curve in figures["curves"].items()}
    length = min(map(len, curves.values()), default=0)
    if len(curves) < 3 or not length:
        return None
    coverages = torch.tensor(list(curves))
    losses = [torch.tensor([curve[i] for curve in curves.values()]) for i in range(length)]
    falls = [-rank for at_step in losses if (rank := spearman(coverages, at_step)) is not None]
    return fmean(falls) if falls else None


def close(figures: Json) -> float | None:
    at = {row["coverage"]: row["fve"] for row in figures["rows"] if row["fve"] is not None}
    return 0.01 - abs(at[1.0] - at[0.9]) if {0.9, 1.0} <= set(at) else None


def effect(figures: Json, than: str) -> float | None:
    """Return the share of all ablation effect in the half that attribution prefers, less that of another rule."""
    share = {one["rule"]: one["share_of_effect"] for one in figures["rules"]}
    return float(share["attribution"] - share[than])


def found_again(figures: Json, what: str, than: str) -> float | None:
    """Return the share of one kind of latents that two independent runs both have, less that of another kind."""
    pairs = _after_longest(figures, what, than)
    return pairs[0]["share_found"] - pairs[1]["share_found"] if pairs else None


def more_alike(figures: Json, what: str, than: str) -> float | None:
    """Return the mean cosine of matched latents of two independent runs, less that of another kind of equal number."""
    pairs = _after_longest(figures, what, than)
    if pairs is None or pairs[0]["sizes"] != pairs[1]["sizes"]:  # among more, each finds a closer partner
        return None
    one, other = (fmean((pair["encoder_cosine"], pair["decoder_cosine"])) for pair in pairs)
    return one - other


def grows(figures: Json, what: str, than: str = "") -> float | None:
    """Return the mean cosine of matched latents of two independent runs after the longest training, less that after
    the shortest; each beyond that of as many random rows, if their number may differ."""
    cosines, chance = (_cosines(figures, kind) for kind in (what, than))
    if len(cosines) < 2 or (than and not set(cosines) <= set(chance)):
        return None
    longest, shortest = (cosines[tokens] - chance.get(tokens, 0.0) for tokens in (max(cosines), min(cosines)))
    return longest - shortest


def _cosines(figures: Json, what: str) -> dict[int, float]:
    """Return the mean cosine of matched latents of one kind, by length of training."""
    pairs = [pair for pair in figures["pairs"] if pair["what"] == what]
    return {pair["tokens"]: fmean((pair["encoder_cosine"], pair["decoder_cosine"])) for pair in pairs}


def confirmed_margin(figures: Json, what: str, controls: tuple[str, ...]) -> float | None:
    """Return how much more a control costs than the core, in the regime that a search found best of some; the first of
    some controls that the regime has."""
    margins = (_confirmed(figures, what) or {}).get("margins", {})
    return next((float(margins[control]) for control in controls if control in margins), None)


def confirmed_gain(figures: Json, what: str) -> float | None:
    """Return what the SAE with the core explains beyond one that keeps nothing, in that regime."""
    return negative(_confirmed(figures, what), "price")


def _confirmed(figures: Json, what: str) -> Json | None:
    name = figures["chosen"].get(what)
    return next((one for one in figures["regimes"] if one["regime"] == name), None)


def _after_longest(figures: Json, what: str, than: str) -> tuple[Json, Json] | None:
    """Return the pairs of two kinds after the longest training that has both."""
    pairs: dict[int, dict[str, Json]] = {}
    for pair in figures["pairs"]:
        pairs.setdefault(pair["tokens"], {})[pair["what"]] = pair
    both = [tokens for tokens, of_kind in pairs.items() if {what, than} <= set(of_kind)]
    return (pairs[max(both)][what], pairs[max(both)][than]) if both else None


def over_msae(figures: Json, method: str, measure: str, figure: str) -> float | None:
    """Return how much better a score is than that of a Matryoshka SAE of the same measured L0, mean over sparsities.

    At the smallest and largest k of Matryoshka SAEs nothing is compared: which of two SAEs has the larger L0 is chance
    there. None unless all others can be compared: seeds must not differ in which.
    """
    ours, theirs = (_curve(figures, name, measure, figure) for name in (method, "msae"))
    ends = (min(theirs).k, max(theirs).k) if theirs else ()
    inside = [point for point in ours if point.k not in ends]
    gaps = [point.score - at[0] for point in inside if (at := _at(theirs, point.l0))]
    return _sign(figures, measure, figure) * fmean(gaps) if gaps and len(gaps) == len(inside) else None


def over_msae_at_smallest(figures: Json, method: str, measure: str, figure: str) -> float | None:
    """Return the same at the smallest sparsity of a method alone."""
    smallest = min((point.k for point in _curve(figures, method, measure, figure)), default=0)
    others = {f"{method}-k{point.k}" for point in _curve(figures, method, measure, figure) if point.k != smallest}
    scores = [row for row in figures["scores"] if row["sae"] not in others]
    return over_msae({**figures, "scores": scores}, method, measure, figure)


def over_control(figures: Json, core: str, control: str, measure: str, figure: str) -> float | None:
    """Return how much better a score of a core's SAE is than that of its control; None unless their measured L0s are
    nearly equal."""
    ours, theirs = (_curve(figures, name, measure, figure) for name in (core, control))
    if not ours or not theirs or abs(ours[0].l0 - theirs[0].l0) > _ALIKE * ours[0].l0:
        return None
    return _sign(figures, measure, figure) * (ours[0].score - theirs[0].score)


def over_random(figures: Json, method: str, control: str, measure: str, figure: str) -> float | None:
    """Return how much better a score of a core's SAEs is than that of its control's, each less that of Matryoshka SAEs
    of its own measured L0, mean over the sparsities that the control has. None unless all of these can be compared."""
    ours, theirs, free = (_curve(figures, name, measure, figure) for name in (method, control, "msae"))
    others = {point.k: point for point in theirs}
    pairs = [(point, others[point.k]) for point in ours if point.k in others]
    gaps = [
        (one.score - at_one[0]) - (other.score - at_other[0])
        for one, other in pairs
        if (at_one := _at(free, one.l0)) and (at_other := _at(free, other.l0))
    ]
    return _sign(figures, measure, figure) * fmean(gaps) if gaps and len(gaps) == len(others) else None


def _sign(figures: Json, measure: str, figure: str) -> int:
    """Return -1 for a score that is better the lower it is."""
    named = [row for row in figures["scores"] if (row["measure"], row["figure"]) == (measure, figure)]
    return -1 if any(row["ceiling"] == 0 for row in named) else 1


def sparse_follows(figures: Json) -> float | None:
    """Return 0.02 less how far the sparse core's variance explained is from the dense one's at equal measured L0."""
    dense, sparse = (_curve(figures, name, "fidelity", "fve") for name in ("dense", "sparse"))
    gaps = [abs(point.score - at[0]) for point in dense if (at := _at(sparse, point.l0))]
    return 0.02 - fmean(gaps) if gaps and len(gaps) == len(dense) else None


class _Point(NamedTuple):
    """An SAE of a method: its measured L0, its score, and the k that it was trained for."""

    l0: float
    score: float
    k: int


def _curve(figures: Json, method: str, measure: str, figure: str) -> list[_Point]:
    """Return the SAEs of one method that have a score and an L0."""
    l0 = {row["sae"]: row["l0"] for row in figures["rows"]}
    points = []
    for row in figures["scores"]:
        name, _, k = row["sae"].rpartition("-k")
        asked = (name, row["measure"], row["figure"]) == (method, measure, figure)
        if asked and row["score"] is not None and l0.get(row["sae"]) is not None:
            points.append(_Point(l0[row["sae"]], row["score"], int(k)))
    return points


def _at(points: list[_Point], l0: float) -> tuple[float, ...]:
    """Return what points give at an L0, or nothing outside their range."""
    inside = points and min(points).l0 * (1 - NEAR) <= l0 <= max(points).l0 * (1 + NEAR)
    return interpolated(l0, points) if inside else ()
