"""The figure of prices: what it costs to keep latents, for every rule, freeze mode and number of cycles."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from dmsae.config import Json
from dmsae.cores.controls import RandomKind
from dmsae.report.comparisons import method
from dmsae.report.style import COLOURS, GREY, legend_below, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MODES = {"dense": "dense core", "sparse": "sparse core", "detector": "detectors"}
"""Freeze modes, and what their panels are called."""

RULES = {
    "": ("attribution", "o"),
    "firing_rate": ("firing rate", "v"),
    "mean_activation": ("mean activation", "^"),
    "random_subset": ("any of the candidates", "P"),
    "principal_components": ("principal components", "X"),
    "consensus": ("consensus", "*"),
    "random": ("random control", "s"),
    "covariance": ("random, covariance-matched", "D"),
}
"""What chose a core, by how the names of its SAEs begin: its label and its marker."""

_RANDOM = ("random", "covariance")
"""Those of random rows, which are grey and hold no attribution."""
_AFTER = {0: "before any cycle", 1: "after 1 cycle"}


class Priced(NamedTuple):
    """A core that has a price."""

    mode: str
    rule: str
    cycles: int
    n_kept: int
    attribution_held: float | None
    price: float


def priced(figures: Sequence[Json]) -> list[Priced]:
    """Return all cores of some parts that have a price."""
    found = []
    for one in figures:
        for row in one["rows"]:
            if row["n_core"] and row.get("price") is not None:
                rule, mode = _chosen(one["part"], row)
                held = row.get("attribution_share") or None
                found.append(Priced(mode, rule, row.get("cycles", 0), row["n_core"], held, row["price"]))
    return found


def _chosen(part: str, row: Json) -> tuple[str, str]:
    """Return what chose the core of an SAE, and how it is frozen, from the SAE's name."""
    name = method(row).removeprefix(f"after-{row.get('cycles')}-")
    rule, _, mode = name.rpartition("-")
    rule = "covariance" if RandomKind.COVARIANCE_MATCHED in rule else rule.split("-")[0]
    return rule or ("consensus" if part == "consensus" else ""), mode


def price(figures: Sequence[Json]) -> "Figure":
    """Return the price of cores against their size and the attribution that they hold: a column for each freeze mode,
    a marker for each rule, a colour for each number of cycles."""
    cores = priced(figures)
    modes = [mode for mode in MODES if any(one.mode == mode for one in cores)] or list(MODES)
    columns = max(2, len(modes))
    figure, axes = panels(2 * len(modes), columns, width=3.1, height=2.7)
    cycles = sorted({one.cycles for one in cores})
    colours = {n: COLOURS[i] for i, n in enumerate(cycles)}
    for i, axis in enumerate(axes):
        mode = modes[i % len(modes)]
        of_size = i < len(modes)
        _draw(axis, [one for one in cores if one.mode == mode], of_size, colours)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_title(MODES[mode] if of_size else "")
        axis.set_xlabel("latents kept" if of_size else "share of the attribution held")
        axis.locator_params(axis="x", integer=of_size)
        axis.set_ylabel("price: variance explained\nlost at the same L0")
    _explain(axes[0], cores, colours)
    return legend_below(figure, axes, columns + 1)


def _draw(axis: "Axes", cores: Sequence[Priced], of_size: bool, colours: dict[int, str]) -> None:
    """Draw cores where their price is; random rows and principal components hold no attribution."""
    for one in cores:
        x = one.n_kept if of_size else one.attribution_held
        if x is not None:
            colour = GREY if one.rule in _RANDOM else colours[one.cycles]
            axis.scatter([x], [one.price], color=colour, marker=RULES[one.rule][1], s=24, linewidths=0.5, alpha=0.8)


def _explain(axis: "Axes", cores: Sequence[Priced], colours: dict[int, str]) -> None:
    """Name what is drawn, once for all panels."""
    for rule, (label, marker) in RULES.items():
        if any(one.rule == rule for one in cores):
            axis.scatter([], [], color=GREY if rule in _RANDOM else "black", marker=marker, s=24, label=label)
    for cycles, colour in colours.items():
        axis.plot([], [], color=colour, linewidth=4, label=_AFTER.get(cycles, f"after {cycles} cycles"))
