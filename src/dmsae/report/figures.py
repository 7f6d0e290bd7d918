"""The figures of experiments, one function each; all that they read is the JSON of the parts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from dmsae.config import Json
from dmsae.experiments.results import read_results
from dmsae.report.style import COLOURS, GREY, band, panels, save, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(results: Path, directory: Path) -> list[Path]:
    """Draw every figure for which there are results, and return the files."""
    read = read_results(results)
    files: list[Path] = []
    with styled():
        for name, (part, function) in FIGURES.items():
            if of_part := [one["figures"] for one in read if one["part"] == part]:
                files += save(function(of_part), directory, name)
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
    return _with_legend(figure, axes, "first selected in cycle")


def sparsity(figures: Sequence[Json]) -> "Figure":
    """Return the same for distillations at several k; one that failed is marked."""
    ks = sorted({cycle["k"] for one in figures for cycle in one["cycles"]})
    failed = sorted({int(k) for one in figures for k in one["failures"]})
    figure, axes = panels(max(len(ks) + len(failed), 1), columns=2)
    for axis, k in zip(axes, ks, strict=False):
        _origins(axis, [[c for c in one["cycles"] if c["k"] == k] for one in figures])
        lost = sum(str(k) in one["failures"] for one in figures)
        axis.set_title(f"k = {k}" + (f" ({lost} of {len(figures)} seeds failed)" if lost else ""))
        axis.set_xlabel("cycle")
        axis.set_ylabel("core latents")
    for axis, k in zip(axes[len(ks) :], [k for k in failed if k not in ks], strict=False):
        axis.set_title(f"k = {k}: every seed failed")
    return _with_legend(figure, axes, "first selected in cycle")


def _with_legend(figure: "Figure", axes: "Sequence[Axes]", title: str = "") -> "Figure":
    """Put one legend for all panels below them, with what any of them shows."""
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(), handles, title=title or None, loc="outside lower center", ncols=min(len(handles), 6)
    )
    return figure


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
            band(axis, curves[0]["step"], [one[name] for one in curves], COLOURS[i % len(COLOURS)], f"τ = {tau}")
        axis.set_xlabel("training step")
        axis.set_ylabel(f"{label} (training batch)")
    axes[0].set_yscale("log")
    axes[1].legend()
    return figure


def random_core(figures: Sequence[Json]) -> "Figure":
    """Return the share of core latents that fire through training: the first core and random rows, by norm and k."""
    rows = [row for row in figures[0]["rows"] if "detector" not in row["sae"]]
    places = list(dict.fromkeys((row["k"], str(row["norm"])) for row in rows))
    columns = len({norm for _, norm in places})
    figure, axes = panels(len(places), columns, width=2.6, height=2.3)
    names = {"dense": "first core", "random-norm": "random", "random-covariance": "random, covariance-matched"}
    for axis, (k, norm) in zip(axes, places, strict=True):
        for row in rows:
            if (row["k"], str(row["norm"])) != (k, norm):
                continue
            i, label = next((i, name) for i, (begin, name) in enumerate(names.items()) if row["sae"].startswith(begin))
            curves = [one["curves"][row["sae"]] for one in figures if row["sae"] in one["curves"]]
            shares = [[value / one["n_core"] for value in c["l0_core"]] for one, c in zip(figures, curves, strict=True)]
            band(axis, curves[0]["step"], shares, COLOURS[i], label)
        axis.set_title(f"k = {k}, norm {norm if norm in ('found', 'unit') else f'× {norm}'}")
        axis.set_ylim(0, 1)
        axis.set_xlabel("training step")
        axis.set_ylabel("share of the core that fires")
    return _with_legend(figure, axes)


def price(figures: Sequence[Json]) -> "Figure":
    """Return what it costs to keep latents: price against their number, for detectors of every rule."""
    figure, (axis,) = panels(1, columns=1, width=5.2, height=3.4)
    names = dict.fromkeys(row["sae"] for one in figures for row in one["rows"] if row["price"] is not None)
    for i, name in enumerate(names):
        rows = [row for one in figures for row in one["rows"] if row["sae"] == name and row["price"] is not None]
        random = name.startswith("random-")
        axis.scatter(
            [row["n_core"] for row in rows],
            [row["price"] for row in rows],
            color=GREY if random else COLOURS[i % (len(COLOURS) - 1)],
            marker="x" if random else "o",
            s=28,
            label=name.rpartition("-k")[0],
        )
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xlabel("latents kept")
    axis.set_ylabel("price: variance explained that is lost\nat the same measured L0")
    axis.legend(ncols=2)
    return figure


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


FIGURES: dict[str, tuple[str, "Callable[[Sequence[Json]], Figure]"]] = {
    "core-evolution": ("cycles", core_evolution),
    "coverage": ("tau", coverage),
    "sparsity": ("sparsity", sparsity),
    "random-core": ("random-core", random_core),
    "price": ("capped", price),
    "selection": ("selection", selection),
}
"""Every figure: the part whose figures it shows, and the function that draws it."""

CAPTIONS = {
    "core-evolution": "Core size by cycle, coloured by the cycle in which latents were first selected; whiskers: "
    "standard deviation over seeds.",
    "coverage": "Reconstruction through training with the first core at each coverage τ; bands: range over seeds.",
    "sparsity": "Core size by cycle at several k, coloured by origin.",
    "random-core": "Share of core latents that fire, through training; bands: range over seeds.",
    "price": "What it costs to keep latents, for detectors of every rule; a point for each seed, crosses are random.",
    "selection": "How much of the effect of ablation the half of the latents accounts for that a rule prefers; a point "
    "for each seed.",
}
"""What each figure shows, in a sentence."""
