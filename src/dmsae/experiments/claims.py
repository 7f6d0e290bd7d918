"""The paper's claims and ours, each as a statistic of one seed's figures."""

from functools import partial
from statistics import fmean

import torch

from dmsae.config import Json
from dmsae.cores.ranking import spearman
from dmsae.evaluation.price import interpolated
from dmsae.experiments.verdicts import Claim


def _row(figures: Json, *beginnings: str) -> Json | None:
    """Return the first row whose SAE's name begins in one of some ways."""
    rows = (row for row in figures["rows"] for begin in beginnings if row["sae"].startswith(begin))
    return next(rows, None)


def _difference(figures: Json, figure: str, better: str, worse: str) -> float | None:
    one, other = _row(figures, better), _row(figures, worse)
    if one is None or other is None or one[figure] is None or other[figure] is None:
        return None
    return float(one[figure] - other[figure])


def _negative(row: Json | None, figure: str) -> float | None:
    """Return a figure of a row with its sign changed, if there is one."""
    return None if row is None or row.get(figure) is None else -float(row[figure])


def _price_saved(figures: Json, core: str, control: str) -> float | None:
    return _difference(figures, "price", control, core)


def _persists(figures: Json, mode: str) -> float | None:
    """Return the share of the first core in the last, from a selected start less from a random one."""
    shares = {}
    for start in ("selected", "random"):
        cycles = [cycle for cycle in figures["cycles"] if cycle["run"] == f"{mode}-{start}"]
        if not cycles or not cycles[0]["size"]:
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


def _stays_in_use(figures: Json, **at: int) -> float | None:
    """Return how much of its first activity a core keeps, less what a random one of equal norms keeps; or how much the
    random one loses, if that is less: the claim is also that it decays."""
    own, random = (_activity_kept(figures, source, "found", at) for source in ("dense", "random-norm_matched-dense"))
    return min(own - random, 1 - random) if own is not None and random is not None else None


def _stays_at_largest(figures: Json, setting: str) -> float | None:
    """Return the same at the largest value of a setting, if there are several."""
    values = sorted({row[setting] for row in figures["rows"]})
    return _stays_in_use(figures, **{setting: values[-1]}) if len(values) > 1 else None


def _longer_rows_decay(figures: Json, source: str) -> float | None:
    """Return how much of its first activity a core keeps, less what it keeps when its rows are twice as long."""
    found, longer = (_activity_kept(figures, source, norm, {}) for norm in ("found", 2.0))
    return found - longer if found is not None and longer is not None else None


def _carry_over(figures: Json) -> dict[int, float]:
    """Return, for each k, the share of the last core but one that the last core keeps."""
    last: dict[int, list[Json]] = {}
    for cycle in figures["cycles"]:
        last.setdefault(cycle["k"], []).append(cycle)
    return {k: ones[-1]["kept"] / ones[-2]["size"] for k, ones in last.items() if len(ones) > 1 and ones[-2]["size"]}


def _peaks_inside(figures: Json) -> float | None:
    carried = [share for _, share in sorted(_carry_over(figures).items())]
    return max(carried[1:-1]) - max(carried[0], carried[-1]) if len(carried) > 2 else None


def _rises(figures: Json) -> float | None:
    rows = [row for row in figures["rows"] if row["fve"] is not None]
    coverages, explained = (torch.tensor([row[name] for row in rows]) for name in ("coverage", "fve"))
    return spearman(coverages, explained) if len(rows) > 2 else None


def _close(figures: Json) -> float | None:
    at = {row["coverage"]: row["fve"] for row in figures["rows"] if row["fve"] is not None}
    return 0.01 - abs(at[1.0] - at[0.9]) if {0.9, 1.0} <= set(at) else None


def _effect(figures: Json) -> float | None:
    share = {one["rule"]: one["share_of_effect"] for one in figures["rules"]}
    return float(share["attribution"] - share["firing_rate"])


def _found_again(figures: Json, what: str, than: str) -> float | None:
    """Return the share of one kind of latents that two independent runs both have, less that of another kind, after the
    longest training that has both."""
    shares: dict[int, dict[str, float]] = {}
    for pair in figures["pairs"]:
        shares.setdefault(pair["tokens"], {})[pair["what"]] = pair["share_found"]
    both = [tokens for tokens, share in shares.items() if {what, than} <= set(share)]
    return shares[max(both)][what] - shares[max(both)][than] if both else None


def _over_msae(figures: Json, method: str, measure: str, figure: str) -> float | None:
    """Return how much better a score is than that of a Matryoshka SAE of the same measured L0, mean over sparsities."""
    ours, theirs = (_curve(figures, name, measure, figure) for name in (method, "msae"))
    named = [row for row in figures["scores"] if (row["measure"], row["figure"]) == (measure, figure)]
    better = -1 if any(row["ceiling"] == 0 for row in named) else 1
    gaps = [better * (score - at[0]) for l0, score in ours if (at := _at(theirs, l0))]
    return fmean(gaps) if gaps else None


def _sparse_follows(figures: Json) -> float | None:
    """Return 0.02 less how far the sparse core's variance explained is from the dense one's at equal measured L0."""
    dense, sparse = (_curve(figures, name, "fidelity", "fve") for name in ("dense", "sparse"))
    gaps = [abs(score - at[0]) for l0, score in sparse if (at := _at(dense, l0))]
    return 0.02 - fmean(gaps) if gaps else None


def _curve(figures: Json, method: str, measure: str, figure: str) -> list[tuple[float, float]]:
    """Return measured L0 and score of the SAEs of one method."""
    l0 = {row["sae"]: row["l0"] for row in figures["rows"]}
    found = [row for row in figures["scores"] if (row["measure"], row["figure"]) == (measure, figure)]
    of_method = [row for row in found if row["sae"].rpartition("-k")[0] == method and row["score"] is not None]
    return [(l0[row["sae"]], row["score"]) for row in of_method if l0.get(row["sae"]) is not None]


def _at(points: list[tuple[float, float]], l0: float) -> tuple[float, ...]:
    """Return what points give at an L0, or nothing outside their range."""
    inside = points and min(points)[0] <= l0 <= max(points)[0]
    return interpolated(l0, points) if inside else ()


PAPER, OURS = "the paper", "ours"

_SCORES = {
    ("fidelity", "fve"): "explains more variance",
    ("splice", "loss_recovered_zero"): "recovers more of the loss",
    ("probing", "accuracy.1"): "probes better with one latent",
    ("probing", "accuracy.5"): "probes better with five latents",
    ("absorption", "fraction"): "absorbs less",
    ("disentanglement", "score"): "disentangles better",
}
"""Scores by which the paper compares SAEs, as far as they are measured here."""

_AGAINST_MSAE = tuple(
    Claim(
        f"An SAE with {core} {does} than a Matryoshka SAE of the same measured L0.",
        whose,
        "benchmark",
        f"{measure}, {figure}: the difference (positive is better), mean over sparsities",
        partial(_over_msae, method=method, measure=measure, figure=figure),
    )
    for method, core, whose in (("dense", "the distilled dense core", PAPER), ("detector", "distilled detectors", OURS))
    for (measure, figure), does in _SCORES.items()
)

CLAIMS = (
    *_AGAINST_MSAE,
    Claim(
        "A sparse core follows the dense one.",
        PAPER,
        "benchmark",
        "0.02 less the difference in variance explained at equal measured L0",
        _sparse_follows,
    ),
    Claim(
        "A distilled core stays in use while a random one of equal norms decays.",
        PAPER,
        "random-core",
        "share of its initial L0 that the core keeps, minus what random rows keep; or what those lose, if smaller",
        _stays_in_use,
    ),
    Claim(
        "A distilled core stays in use while a random one of equal norms decays, at the largest k tried.",
        PAPER,
        "random-core",
        "share of its initial L0 that the core keeps, minus what random rows keep; or what those lose, if smaller",
        lambda figures: _stays_at_largest(figures, "k"),
    ),
    Claim(
        "A distilled core stays in use while a random one of equal norms decays, in the longest training tried.",
        PAPER,
        "random-core",
        "share of its initial L0 that the core keeps, minus what random rows keep; or what those lose, if smaller",
        lambda figures: _stays_at_largest(figures, "tokens"),
    ),
    Claim(
        "A random core decays more when its rows are twice as long.",
        OURS,
        "random-core",
        "share of its first L0 that a random core keeps, rows of the core's norms less rows twice as long",
        lambda figures: _longer_rows_decay(figures, "random-norm_matched-dense"),
    ),
    Claim(
        "The distilled core, too, decays more when its rows are twice as long.",
        OURS,
        "random-core",
        "share of its first L0 that the core keeps, rows as found less rows twice as long",
        lambda figures: _longer_rows_decay(figures, "dense"),
    ),
    Claim(
        "A subset of the first core persists across cycles, more than from a random start.",
        PAPER,
        "cycles",
        "share of the first core in the last core, selected start less random start",
        lambda figures: _persists(figures, "dense"),
    ),
    Claim(
        "Carry-over peaks at an intermediate k.",
        PAPER,
        "sparsity",
        "share of a core kept in the last cycle: the best k inside the range less the better end",
        _peaks_inside,
    ),
    Claim(
        "Variance explained rises with τ.",
        PAPER,
        "tau",
        "rank correlation of τ and held-out variance explained (L0 rises with τ too)",
        _rises,
    ),
    Claim(
        "A coverage of 0.9 explains as much as one of 1.0.",
        PAPER,
        "tau",
        "0.01 less the difference in variance explained",
        _close,
    ),
    Claim(
        "The first core, frozen as in the paper, costs less than random directions of equal norms.",
        OURS,
        "paper",
        "price of the random core less price of the core, each against SAEs of its own L0",
        lambda figures: _price_saved(figures, "dense", "random-norm_matched-dense"),
    ),
    Claim(
        "An SAE with the first core, frozen as in the paper, explains more than one that keeps nothing, at equal L0.",
        OURS,
        "paper",
        "variance explained by the core's SAE less that of an unconstrained one",
        lambda figures: _negative(_row(figures, "dense"), "price"),
    ),
    Claim(
        "With the first core, frozen as in the paper, the model predicts better than with an SAE that keeps nothing.",
        OURS,
        "paper",
        "next-token loss with the unconstrained SAE in place less that with the core's, in nats, at equal L0",
        lambda figures: _negative(_row(figures, "dense"), "price_loss"),
    ),
    Claim(
        "The first core, frozen as in the paper, costs less than random directions with the activations' covariance.",
        OURS,
        "paper",
        "price of the random core less price of the core, each against SAEs of its own L0",
        lambda figures: _price_saved(figures, "dense", "random-covariance_matched-dense"),
    ),
    Claim(
        "Detectors of the first core beat random detectors of equal rates and means.",
        OURS,
        "paper",
        "price of random detectors less price of the core",
        lambda figures: _price_saved(figures, "detector", "random-detector"),
    ),
    Claim(
        "An SAE with detectors of the first core explains as much as one that keeps nothing, at equal measured L0.",
        OURS,
        "paper",
        "0.005 less the variance explained that the detectors cost",
        lambda figures: None if (lost := _negative(_row(figures, "detector"), "price")) is None else 0.005 + lost,
    ),
    Claim(
        "With detectors of the first core the model predicts as well as with an SAE that keeps nothing, at equal L0.",
        OURS,
        "paper",
        "0.01 nats less what the detectors add to the next-token loss",
        lambda figures: None if (lost := _negative(_row(figures, "detector"), "price_loss")) is None else 0.01 + lost,
    ),
    Claim(
        "An SAE with detectors explains as much as one that keeps nothing and trains twice as long, at equal L0.",
        OURS,
        "longer",
        "0.005 less the variance explained that the detectors lack",
        lambda figures: None if figures.get("price") is None else 0.005 - figures["price"],
    ),
    Claim(
        "With detectors the model predicts as well as with an SAE that keeps nothing and trains twice as long.",
        OURS,
        "longer",
        "0.01 nats less what the detectors add to the next-token loss, at equal L0",
        lambda figures: None if figures.get("price_loss") is None else 0.01 - figures["price_loss"],
    ),
    Claim(
        "Detectors that fire seldom beat random detectors of equal rates and means.",
        OURS,
        "capped",
        "price of random detectors less price of the core",
        lambda figures: _price_saved(figures, "detector", "random-detector"),
    ),
    Claim(
        "Attribution chooses better detectors than firing rate.",
        OURS,
        "capped",
        "price of the core by firing rate less price of the core by attribution",
        lambda figures: _price_saved(figures, "detector", "firing_rate-detector"),
    ),
    Claim(
        "Attribution chooses better detectors than chance does from the same candidates.",
        OURS,
        "capped",
        "price of a random subset less price of the core by attribution",
        lambda figures: _price_saved(figures, "detector", "random_subset-detector"),
    ),
    Claim(
        "The latents that attribution prefers matter more to the loss than those that fire most.",
        OURS,
        "selection",
        "share of all ablation effect in the preferred half, attribution less firing rate",
        _effect,
    ),
    Claim(
        "Detectors persist across cycles, more than random detectors do.",
        OURS,
        "cycles",
        "share of the first core in the last core, selected start less random start",
        lambda figures: _persists(figures, "detector"),
    ),
    Claim(
        "In the regime that a search found best, the first core beats every control on seeds outside the search.",
        OURS,
        "confirmation",
        "smallest price among the controls less price of the core",
        lambda figures: figures["regimes"][0]["margin"],
    ),
    Claim(
        "Distilled detectors of independent runs agree more than the runs' prefix-0s.",
        OURS,
        "consistency",
        "share of latents that both runs have, distilled detectors less prefix-0",
        lambda figures: _found_again(figures, "distilled, detector", "prefix-0"),
    ),
    Claim(
        "Distilled detectors of independent runs agree more than first cores under the same cap on firing rates.",
        OURS,
        "consistency",
        "share of latents that both runs have, distilled detectors less first core",
        lambda figures: _found_again(figures, "distilled, detector", "first core, capped"),
    ),
    Claim(
        "Consensus cores of independent runs agree more than first cores under the same cap on firing rates.",
        OURS,
        "consistency",
        "share of latents that both runs have, consensus less first core",
        lambda figures: _found_again(figures, "consensus", "first core, capped"),
    ),
    Claim(
        "Consensus cores of independent runs agree more than the runs' prefix-0s.",
        OURS,
        "consistency",
        "share of latents that both runs have, consensus less prefix-0",
        lambda figures: _found_again(figures, "consensus", "prefix-0"),
    ),
    Claim(
        "The unfrozen latents of two SAEs agree more when the SAEs share a core than when they have none.",
        OURS,
        "consistency",
        "share of prefix-0 latents that both SAEs have, with a shared core less without",
        lambda figures: _found_again(figures, "the rest beside a shared core", "the same without a core"),
    ),
)
