"""`dmsae core select`: another core from stored scores."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from dmsae.commands.output import number, out, plain_table
from dmsae.commands.terminal import TERMINAL
from dmsae.errors import ConfigError

if TYPE_CHECKING:  # `--help` does not wait for torch
    from dmsae.cores.selection import SelectionReport


def core_select(
    run: Annotated[Path, tyro.conf.Positional],
    cycle: int | None = None,
    coverage: float | None = None,
    over: Literal["all", "active"] | None = None,
    max_rate: float | None = None,
    save_to: Path | None = None,
) -> None:
    """Select a core again from the scores of one cycle, without retraining.

    Args:
        run: Directory of a distillation.
        cycle: Which cycle's scores. Default: the last one's.
        coverage: Share τ of the attribution that the core has to hold. Default: as in the run.
        over: Take the quantile over all positions, or over those where a latent fires. Default: as in the run.
        max_rate: Keep latents out that fire on a larger share of positions. Default: as in the run.
        save_to: Directory to write the core to; `core show` and `transfer --core` take it. Default: only show it.
    """
    from dmsae.cores.attribution import QuantileOver
    from dmsae.distillation.reselect import reselect

    selection = reselect(run, cycle, coverage, QuantileOver(over) if over else None, max_rate)
    show_selection(selection.report)
    if save_to is not None:
        if save_to.exists() and (not save_to.is_dir() or any(save_to.iterdir())):
            raise ConfigError(f"save_to = {save_to}; it must be a new or empty directory. Nothing has been changed.")
        selection.core.save(save_to)
        command = f"dmsae transfer --core {save_to} --root {selection.root} --out …"
        out.print(f"The core is in {save_to}. Look at it: dmsae core show {save_to}")
        out.print(f"Train SAEs from it: {command}")


def show_selection(report: "SelectionReport") -> None:
    """Print what a selection did to the pool, and warn when it hardly selects or the core is nearly always on."""
    table = plain_table(
        "pool", "core", "share", "attribution", "median rate", "rank correlation of score and rate", "stability"
    )
    table.add_row(
        str(report.n_pool),
        str(report.n_selected),
        f"{100 * report.share_selected:.0f} %",
        f"{100 * report.attribution_held:.0f} %",
        number(report.median_rate),
        number(report.score_rate_correlation, 2),
        number(report.stability, 2),
    )
    out.print(table)
    out.print(
        "Share: of the pool. Attribution: what the core holds of that of the whole pool, also of what max_rate leaves "
        "out.\nMedian rate: on the pairs. Stability: how often a member is selected again when contexts are resampled."
    )
    for warning in report.warnings():
        TERMINAL.warn(warning)
