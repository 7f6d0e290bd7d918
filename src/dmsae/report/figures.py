"""The figures of experiments, one function each; all that they read is the JSON of the parts."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from dmsae.config import Json
from dmsae.experiments.catalog import current_results
from dmsae.experiments.results import aligned
from dmsae.report import comparisons, price
from dmsae.report.style import COLOURS, band, legend_below, panels, save, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(results: Path, directory: Path) -> list[Path]:
    """Draw every figure for which there are results, and return the files."""
    by_part: dict[str, list[Json]] = {}
    for result in current_results(results).current:
        by_part.setdefault(result["part"], []).append(result)
    read = [one for of_part in by_part.values() for one in aligned(of_part)]
    files: list[Path] = []
    with styled():
        for name, (parts, function) in FIGURES.items():
            if shown := [{**one["figures"], "part": one["part"]} for one in read if one["part"] in parts]:
                files += save(function(shown), directory, name)
    return files


def core_evolution(figures: Sequence[Json]) -> "Figure":
    """Return core size by cycle, coloured by the cycle in which latents were first selected, beside random starts."""
    names = list(dict.fromkeys(cycle["run"] for one in figures for cycle in one["cycles"]))
    figure, axes = panels(len(names), columns=2)
    for axis, name in zip(axes, names, strict=True):
        mode, start = name.split("-")
        _origins(axis, [[c for c in one["cycles"] if c["run"] == name] for one in figures])
        axis.set_title(f"{mode} core, {start} start")
        axis.set_xlabel("cycle")
        axis.set_ylabel("core latents")
    for one, other in pairwise(axes):  # the same kind of core from both starts: one scale
        if one.get_title().split()[0] == other.get_title().split()[0]:
            one.sharey(other)
    return legend_below(figure, axes, 6, "first selected in cycle")


def sparsity(figures: Sequence[Json]) -> "Figure":
    """Return the same for distillations at several k; one that failed is marked."""
    ks = sorted({cycle["k"] for one in figures for cycle in one["cycles"]})
    empty = sorted({int(k) for one in figures for k in one["failures"]} - set(ks))
    figure, axes = panels(max(len(ks) + len(empty), 1), columns=2)
    for axis, k in zip(axes, ks, strict=False):
        _origins(axis, [[c for c in one["cycles"] if c["k"] == k] for one in figures])
        lost = sum(str(k) in one["failures"] for one in figures)
        axis.set_title(f"k = {k}" + (f" ({lost} of {len(figures)} seeds failed)" if lost else ""))
        axis.set_xlabel("cycle")
        axis.set_ylabel("core latents")
    for axis, k in zip(axes[len(ks) :], empty, strict=False):
        axis.set_title(f"k = {k}: no cycle ended")
    return legend_below(figure, axes, 6, "first selected in cycle")


def _origins(axis: "Axes", runs: Sequence[Sequence[Json]]) -> None:
    """Draw stacked bars: mean births over seeds, with the standard deviation of the total."""
    runs = [run for run in runs if run]
    n_cycles = max((len(run) for run in runs), default=0)
    axis.set_xticks(range(n_cycles))
    for cycle in range(n_cycles):
        there = [run[cycle] for run in runs if len(run) > cycle]
        bottom = 0.0
        for birth in range(cycle + 1):
            height = fmean(one["births"].get(str(birth), 0) for one in there)
            label = str(birth) if birth == cycle else None
            axis.bar(cycle, height, bottom=bottom, color=COLOURS[birth % len(COLOURS)], width=0.7, label=label)
            bottom += height
        if len(there) > 1:
            axis.errorbar(cycle, bottom, stdev(one["size"] for one in there), color="black", capsize=2, linewidth=1)


def coverage(figures: Sequence[Json]) -> "Figure":
    """Return reconstruction loss and variance explained through training, a curve for each coverage τ."""
    figure, axes = panels(2, columns=2, width=3.6, height=2.8)
    values = list(figures[0]["curves"])
    for axis, name, label in zip(axes, ("loss", "fve"), ("reconstruction loss", "variance explained"), strict=True):
        for i, tau in enumerate(values):
            curves = [one["curves"][tau] for one in figures]
            band(
                axis,
                max((one["step"] for one in curves), key=len),
                [one[name] for one in curves],
                COLOURS[i % len(COLOURS)],
                f"τ = {tau}",
            )
        axis.set_xlabel("training step")
        axis.set_ylabel(f"{label} (training batch)")
    axes[0].set_yscale("log")
    axes[0].yaxis.set_major_formatter("{x:g}")
    axes[0].yaxis.set_minor_formatter("{x:g}")
    later = [one["curves"][tau]["fve"] for one in figures for tau in values]
    axes[1].set_ylim(bottom=min(curve[len(curve) // 4] for curve in later if curve))  # the start would flatten the rest
    axes[1].legend()
    return figure


def random_core(figures: Sequence[Json]) -> "Figure":
    """Return the share of core latents that fire through training: distilled and random rows, by norm, k and length."""
    rows = [row for row in figures[0]["rows"] if "detector" not in row["sae"]]
    places = list(dict.fromkeys((row["k"], str(row["norm"]), row["tokens"]) for row in rows))
    figure, axes = panels(len(places), columns=min(3, len(places)), width=2.6, height=2.3)
    names = {"dense": "distilled core", "random-norm": "random", "random-covariance": "random, covariance-matched"}
    for axis, (k, norm, tokens) in zip(axes, places, strict=True):
        for row in rows:
            if (row["k"], str(row["norm"]), row["tokens"]) != (k, norm, tokens):
                continue
            i, label = next((i, name) for i, (begin, name) in enumerate(names.items()) if row["sae"].startswith(begin))
            trained = [one for one in figures if row["sae"] in one["curves"]]
            shares = [[n / one["n_core"] for n in one["curves"][row["sae"]]["l0_core"]] for one in trained]
            steps = max((one["curves"][row["sae"]]["step"] for one in trained), key=len)
            band(axis, steps, shares, COLOURS[i], label)
        shown = norm if norm in ("found", "unit") else f"× {norm}"
        axis.set_title(f"k = {k}, norm {shown}\n{tokens:,} activations")
        axis.set_ylim(0, 1)
        axis.set_xlabel("training step")
        axis.set_ylabel("share of the core that fires")
    return legend_below(figure, axes, 6)


def selection(figures: Sequence[Json]) -> "Figure":
    """Return the share of the effect of ablation that each rule's preferred half of the latents accounts for."""
    figure, (axis,) = panels(1, columns=1, width=4.6, height=2.8)
    rules = [one["rule"] for one in figures[0]["rules"]]
    for i, rule in enumerate(rules):
        values = [next(r["share_of_effect"] for r in one["rules"] if r["rule"] == rule) for one in figures]
        axis.scatter([i] * len(values), values, color=COLOURS[i], s=28, zorder=3)
    levels = (("ceiling", "what ablation itself prefers", "-"), ("chance", "any half", ":"))
    for name, label, line in levels:
        axis.axhline(fmean(one[name] for one in figures), color="black", linestyle=line, linewidth=1, label=label)
    axis.set_xticks(range(len(rules)), [rule.replace("_", " ") for rule in rules])
    axis.set_ylim(0, 1.02)
    axis.set_ylabel("share of the loss change\nby ablation")
    axis.legend(loc="lower right")
    return figure


FIGURES: dict[str, tuple[tuple[str, ...], "Callable[[Sequence[Json]], Figure]"]] = {
    "frontier": (("paper", "longer"), comparisons.frontier),
    "price": (("capped", "uncapped", "consensus", "prices", "every-cycle"), price.price),
    "core-evolution": (("cycles",), core_evolution),
    "benchmark": (("benchmark",), comparisons.benchmark),
    "coverage": (("tau",), coverage),
    "sparsity": (("sparsity",), sparsity),
    "random-core": (("random-core",), random_core),
    "selection": (("selection",), selection),
    "consistency": (("consistency",), comparisons.consistency),
    "regime": (("regime", "confirmation"), comparisons.regime),
}
"""Every figure: the parts whose figures it shows, and the function that draws it."""

CAPTIONS = {
    "core-evolution": "Core size by cycle, coloured by the cycle in which latents were first selected; whiskers: "
    "standard deviation over seeds.",
    "coverage": "Reconstruction through training with the first core at each coverage τ; bands: range over seeds.",
    "sparsity": "Core size by cycle at several k, coloured by the cycle in which latents were first selected; "
    "whiskers: standard deviation over seeds.",
    "random-core": "Share of core latents that fire, through training; bands: range over seeds.",
    "frontier": "SAEs with the first core against measured L0, a point for each seed, beside Matryoshka SAEs that keep "
    "nothing (means over seeds). What lies on the line costs nothing to keep. Dashed: SAEs that train twice as long, "
    "as detectors have if their own training counts.",
    "price": "What it costs to keep latents; a point for each SAE of each seed. Columns: how the core is frozen. "
    "Markers: what chose it. Colours: after how many cycles. Random controls (grey) and principal components hold "
    "no attribution.",
    "benchmark": "Every score against the measured L0; a point for each seed, lines through their means. Stars: "
    "nulls of MSAE, random encoders.",
    "consistency": "Latents that two independent runs both have (encoder and decoder cosine above 0.7), how alike "
    "matched latents are, and how alike they fire; a point for each seed. Bars: what independent firing at "
    "the same rates gives. Among more latents each finds a closer partner.",
    "regime": "Where a distilled core costs less than others: as many candidates chosen in other ways, random rows, "
    "and for rows that are not detectors principal components; a point for each seed. Fresh seeds took no part in the "
    "choice, and are measured on the other half of the held-out text.",
    "selection": "Share of the ablation effect that falls on the half of the latents that a rule prefers; a point for "
    "each seed.",
}
"""What each figure shows, in a sentence."""
