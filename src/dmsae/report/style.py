"""How all figures look: one size of text, colours that colour-blind readers can tell apart, nothing superfluous."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A8A8A")
"""Okabe and Ito's palette, darkest contrasts first, and a grey."""
GREY = COLOURS[-1]
_SETTINGS: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.dpi": 110,
    "svg.fonttype": "none",
    "svg.hashsalt": "dmsae",
}


@contextmanager
def styled() -> Iterator[None]:
    """Draw inside this block in the house style, without a display."""
    import matplotlib as mpl

    mpl.use("Agg", force=False)
    with mpl.rc_context(_SETTINGS):
        yield


def panels(n: int, columns: int, width: float = 3.2, height: float = 2.5) -> "tuple[Figure, list[Axes]]":
    """Return a figure of n panels in rows of `columns`; places that are left over stay empty."""
    import matplotlib.pyplot as plt

    rows = -(-n // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained"
    )
    flat = list(axes.flat)
    for unused in flat[n:]:
        unused.set_axis_off()
    return figure, flat[:n]


def band(axes: "Axes", x: Sequence[float], curves: Sequence[Sequence[float]], colour: str, label: str) -> None:
    """Draw the mean of several seeds' curves, with a band from the smallest to the largest.

    A seed whose training ended early counts as far as it goes.
    """
    values = np.full((len(curves), len(x)), np.nan)
    for row, curve in zip(values, curves, strict=True):
        row[: len(curve)] = curve
    axes.plot(x, np.nanmean(values, 0), color=colour, label=label, linewidth=1.4)
    if len(values) > 1:
        axes.fill_between(x, np.nanmin(values, 0), np.nanmax(values, 0), color=colour, alpha=0.15, linewidth=0)


def legend_below(figure: "Figure", axes: "Sequence[Axes]", columns: int, title: str = "") -> "Figure":
    """Put one legend for all panels below them, with what any of them shows."""
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    columns = max(1, min(len(handles), columns))
    figure.legend(handles.values(), handles, title=title or None, loc="outside lower center", ncols=columns)
    return figure


def save(figure: "Figure", directory: Path, name: str) -> list[Path]:
    """Write a figure as SVG and PNG, and return both files. The same figure gives the same bytes."""
    import matplotlib.pyplot as plt
    from PIL import Image

    directory.mkdir(parents=True, exist_ok=True)
    vector, picture = (directory / f"{name}.{kind}" for kind in ("svg", "png"))
    figure.savefig(vector, metadata={"Date": None})
    figure.savefig(picture, dpi=160, metadata={"Software": None})
    plt.close(figure)
    with Image.open(picture) as drawn:  # few colours are used: a palette of them takes a third of the space
        drawn.convert("RGB").quantize(256).save(picture, optimize=True)
    return [vector, picture]
