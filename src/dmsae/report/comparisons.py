"""Figures that compare SAEs and cores with controls; all that they read is the JSON of the parts."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from dmsae.config import Json
from dmsae.evaluation.measures import MEASURES
from dmsae.experiments.tables import CONTROLS, with_like_nulls
from dmsae.report.style import COLOURS, GREY, legend_below, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Series(NamedTuple):
    """SAEs that are drawn alike: those whose name, without its k, is this."""

    label: str
    sae: str
    colour: str
    marker: str


METHODS = {
    "dense": Series("DMSAE, dense core", "dense", COLOURS[0], "o"),
    "sparse": Series("DMSAE, sparse core", "sparse", COLOURS[3], "o"),
    "detector": Series("DMSAE, detectors", "detector", COLOURS[2], "o"),
    "msae": Series("MSAE", "msae", COLOURS[1], "s"),
    "batchtopk": Series("BatchTopK", "batchtopk", COLOURS[4], "^"),
    "random-norm_matched-dense": Series("random dense core", "", GREY, "x"),
    "random-norm_matched-sparse": Series("random sparse core", "", GREY, "+"),
    "random-detector": Series("random detectors", "", GREY, "v"),
}
"""SAEs of the benchmark, by their name without its k."""


FRONTIER = (
    Series("detectors of the first core", "detector", COLOURS[0], "o"),
    Series("the first core as the paper freezes it", "dense", COLOURS[1], "s"),
    Series("random directions", "random-norm_matched-dense", GREY, "s"),
    Series("random directions, covariance-matched", "random-covariance_matched-dense", GREY, "D"),
    Series("random detectors", "random-detector", GREY, "o"),
)
"""SAEs with a core that are drawn beside the curve of those that keep nothing."""


def frontier(figures: Sequence[Json]) -> "Figure":
    """Return variance explained and next-token loss against the measured L0: SAEs with a core, beside a curve of those
    that keep nothing."""
    figure, axes = panels(2, columns=2, width=4.2, height=3.7)
    labels = ("held-out variance explained", "next-token loss with the SAE\nin place (nats)")
    for axis, name, label in zip(axes, ("fve", "loss"), labels, strict=True):
        known = [row for row in _rows(figures, "paper") if row.get(name) is not None and row.get("l0") is not None]
        _free_curve(axis, known, name, "Matryoshka SAEs that keep nothing", "-")
        longer = [row for row in _rows(figures, "longer") if row.get(name) is not None]
        _free_curve(axis, longer, name, "the same, trained twice as long", "--")
        for series in FRONTIER:
            points = [(row["l0"], row[name]) for row in known if row["n_core"] and method(row) == series.sae]
            if points:
                x, y = zip(*points, strict=True)
                axis.scatter(x, y, color=series.colour, marker=series.marker, s=26, label=series.label, zorder=3)
        axis.set_xlabel("measured L0 (active latents per token, core included)")
        axis.set_ylabel(label)
    return legend_below(figure, axes, columns=2)


def _rows(figures: Sequence[Json], part: str) -> list[Json]:
    return [row for one in figures if one["part"] == part for row in one["rows"]]


def _free_curve(axis: "Axes", rows: Sequence[Json], name: str, label: str, line: str) -> None:
    """Draw a figure of SAEs without a core against their L0, as a line through the means over seeds."""
    free: dict[str, list[Json]] = {}
    for row in rows:
        if not row["n_core"]:
            free.setdefault(row["sae"], []).append(row)
    means = sorted((fmean(row["l0"] for row in some), fmean(row[name] for row in some)) for some in free.values())
    if means:
        axis.plot(*zip(*means, strict=True), color="black", linewidth=1.2, linestyle=line, label=label)


def method(row: Json) -> str:
    """Return the name of an SAE without its k."""
    return str(row["sae"]).rpartition("-k")[0]


def benchmark(figures: Sequence[Json]) -> "Figure":
    """Return every score against the measured L0: DMSAEs, MSAE and BatchTopK, with random cores and the nulls."""
    scores = list(dict.fromkeys((row["measure"], row["figure"]) for one in figures for row in one["scores"]))
    shown = [score for score in scores if score not in (("fidelity", "l0"), ("activity", "l0_batchtopk.total"))]
    figure, axes = panels(len(shown), columns=3, width=3.0, height=2.4)
    for axis, score in zip(axes, shown, strict=True):
        for name, series in METHODS.items():
            _curve(axis, figures, name, score, series)
        _nulls(axis, figures, score)
        axis.set_title(score[0].replace("_", " "))
        axis.set_ylabel(axis_label(*score))
        axis.set_xlabel("measured L0 (per token)")
    return legend_below(figure, axes, columns=3)


def axis_label(measure: str, figure: str) -> str:
    """Return what a score is called, and whether it is better the lower it is."""
    known = MEASURES[measure].scores if measure in MEASURES else ()
    score = next((one for one in known if one.figure == figure), None)
    if score is None:
        return figure.replace("_", " ")
    return score.label + ("\n(lower is better)" if score.lower_is_better else "")


def _nulls(axis: "Axes", figures: Sequence[Json], score: tuple[str, str]) -> None:
    """Draw the nulls that there are, each at the L0 of its SAE."""
    points = []
    for one in figures:
        l0 = {row["sae"]: row["l0"] for row in one["rows"]}
        rows = with_like_nulls([row for row in one["scores"] if (row["measure"], row["figure"]) == score])
        points += [(l0[row["sae"]], row["null"]) for row in rows if None not in (row["null"], l0.get(row["sae"]))]
    if points:
        x, y = zip(*points, strict=True)
        axis.scatter(x, y, color="black", marker="*", s=22, linewidths=0.5, label="null of MSAE")


def _curve(axis: "Axes", figures: Sequence[Json], name: str, score: tuple[str, str], series: Series) -> None:
    """Draw one method: a point for each seed and k, and a line through the means of the seeds."""
    by_k: dict[str, list[tuple[float, float]]] = {}
    for one in figures:
        l0 = {row["sae"]: row["l0"] for row in one["rows"]}
        for row in one["scores"]:
            found = (row["measure"], row["figure"]) == score and method(row) == name
            if found and row["score"] is not None and l0.get(row["sae"]) is not None:
                by_k.setdefault(row["sae"], []).append((l0[row["sae"]], row["score"]))
    if not by_k:
        return
    means = sorted(tuple(fmean(values) for values in zip(*points, strict=True)) for points in by_k.values())
    axis.plot(*zip(*means, strict=True), color=series.colour, linewidth=1.2)
    points = [point for some in by_k.values() for point in some]
    x, y = zip(*points, strict=True)
    axis.scatter(x, y, color=series.colour, marker=series.marker, s=16, label=series.label, linewidths=1)


def consistency(figures: Sequence[Json]) -> "Figure":
    """Return how alike the latents of two independent runs are, by how they were chosen and how long they trained."""
    pairs = [pair for one in figures for pair in one["pairs"]]
    names = list(dict.fromkeys(pair["what"] for pair in pairs))
    lengths = {tokens: COLOURS[i] for i, tokens in enumerate(sorted({pair["tokens"] for pair in pairs}))}
    figure, axes = panels(3, columns=3, width=3.2, height=0.32 * len(names) + 1.4)
    for axis, (label, value, chance) in zip(axes, _ALIKE, strict=True):
        for tokens, colour in lengths.items():
            known = [(pair, x) for pair in pairs if pair["tokens"] == tokens and (x := value(pair)) is not None]
            places = [names.index(pair["what"]) for pair, _ in known]
            axis.scatter([x for _, x in known], places, color=colour, s=24, label=f"{tokens:,} activations")
            if chance:
                axis.scatter([pair[chance] for pair, _ in known], places, color=colour, s=40, marker="|")
        axis.set_yticks(range(len(names)), names if axis is axes[0] else [""] * len(names))
        axis.invert_yaxis()
        axis.axvline(0, color="black", linewidth=0.5)
        axis.set_xlabel(label)
    for axis in axes:
        axis.set_ylabel("latents compared" if axis is axes[0] else "as on the left")
    return legend_below(figure, axes, columns=len(lengths))


def _cosine(pair: Json) -> float:
    return fmean((pair["encoder_cosine"], pair["decoder_cosine"]))


_ALIKE: tuple[tuple[str, Callable[[Json], float | None], str], ...] = (
    ("share that both runs have", lambda pair: pair["share_found"], ""),
    ("cosine of partners,\nmean of encoder and decoder", _cosine, ""),
    ("Jaccard of firing", lambda pair: pair.get("jaccard"), "jaccard_chance"),
)
"""How alike latents are: what it is called, and where the figure and its value by chance are."""


def regime(figures: Sequence[Json]) -> "Figure":
    """Return how much more each control costs than the core in every regime, in the search and when confirmed."""
    all_tried = [one for found in figures for one in found["regimes"]]
    names = list(dict.fromkeys(one["regime"] for one in all_tried))
    controls = list(dict.fromkeys(control for one in all_tried for control in one["margins"]))
    figure, (axis,) = panels(1, columns=1, width=7.2, height=0.75 * len(names) + 1.6)
    for i, control in enumerate(controls):
        axis.plot([], [], "s", color=COLOURS[i % len(COLOURS)], label=CONTROLS.get(control, control))
        offset = 0.8 * ((i + 0.5) / len(controls) - 0.5)
        for part, marker in _TRIED.items():
            tried = [one for found in figures if found["part"] == part for one in found["regimes"]]
            having = [one for one in tried if control in one["margins"]]
            places = [names.index(one["regime"]) + offset for one in having]
            margins = [one["margins"][control] for one in having]
            axis.scatter(margins, places, color=COLOURS[i % len(COLOURS)], marker=marker, s=24)
    for label, marker in zip(("search", "fresh seeds, other text"), _TRIED.values(), strict=True):
        axis.plot([], [], marker, color=GREY, label=label)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_xscale("symlog", linthresh=0.01, linscale=2)
    ticks = (-0.01, -0.005, 0, 0.005, 0.01, 0.03, 0.1)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.set_yticks(range(len(names)), [f"{name}{_sizes(name, all_tried)}" for name in names])
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set_xlabel("price of the other core less that of the core (above 0 the core wins)")
    axis.set_ylabel("regime")
    return legend_below(figure, [axis], columns=3)


_TRIED = {"regime": "o", "confirmation": "D"}
"""Markers of the search and of its confirmation."""


def _sizes(name: str, tried: Sequence[Json]) -> str:
    """Return how many latents the cores of a regime have."""
    sizes = sorted({one["n_core"] for one in tried if one["regime"] == name and one.get("n_core")})
    return f" ({'–'.join(map(str, sorted({sizes[0], sizes[-1]})))} latents)" if sizes else ""
