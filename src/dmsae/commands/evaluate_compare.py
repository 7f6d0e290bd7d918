"""`dmsae evaluate compare`: many SAEs and seeds in one table."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from dmsae.commands.output import number, plain_table
from dmsae.commands.output import out as printed

if TYPE_CHECKING:  # `--help` does not wait for torch
    from dmsae.evaluation.comparison import CurvePoint, Difference, Spread


def evaluate_compare(
    places: Annotated[tuple[Path, ...], tyro.conf.Positional],
    baseline: str = "",
    scores: tuple[str, ...] = (),
    l0: tuple[float, ...] = (),
    json: Path | None = None,
) -> None:
    """Put evaluations together: spread over seeds beside nulls, paired differences, scores at the same L0.

    An SAE's seed and k are read from its name, or that of its evaluation's directory: msae-k40-s1 is seed 1 of the
    method msae at k = 40. Differences from the baseline are taken seed by seed, once at the same k and once at the same
    measured L0, interpolated between the baseline's SAEs and never beyond them. An SAE that several evaluations hold
    counts once; two SAEs must not have one method, k and seed.

    Args:
        places: Directories of evaluations, as `dmsae evaluate --out` makes them, all on one store and with the same
            settings of each measure compared.
        baseline: The method that the others are compared with. Empty: the first.
        scores: Only these, such as fidelity.fve. Empty: all.
        l0: Show every method at these L0s too.
        json: Write everything to this file.
    """
    from dmsae.disk.files import write_json
    from dmsae.evaluation.comparison import curves, differences, members_of, spreads
    from dmsae.evaluation.scores import Evaluation, as_json

    evaluations = {str(place): Evaluation.load(place) for place in places}
    members = members_of(evaluations, scores)
    over_seeds = spreads(members)
    methods = list(dict.fromkeys(member.method for member in members))
    baseline = baseline or methods[0]
    apart = differences(members, baseline)
    points = curves(members, l0)
    _print_spreads(over_seeds)
    if apart:
        printed.print(f"\nDifference from {baseline}, seed by seed:", style="bold")
        _print_differences(apart)
    elif len(methods) > 1:
        printed.print(f"\nNo seed of another method is also one of {baseline}: no differences seed by seed.")
    if l0:
        printed.print("\nAt the same measured L0:", style="bold")
        _print_curves(points)
    shown = {score.split(".")[0] for score in scores}
    for note in dict.fromkeys(note for one in evaluations.values() for note in one.notes(shown)):
        printed.print(note)
    if json is not None:
        everything = {"members": members, "spreads": over_seeds, "baseline": baseline, "differences": apart}
        write_json(json, as_json(everything | {"curves": points}))


def _print_spreads(rows: "Sequence[Spread]") -> None:
    table = plain_table("score", "method", "k", "seeds", "L0", "mean", "null", "part", "sd", "lowest", "highest")
    for row in rows:
        figures = (row.mean, row.null, row.part, row.sd, row.low, row.high)
        table.add_row(row.score, row.method, _whole(row.k), str(row.n), number(row.l0, 1), *map(number, figures))
    printed.print(table)
    printed.print("null: the one to beat. part: of the way from it to the ceiling. Both: means, if every seed has one.")


def _print_differences(rows: "Sequence[Difference]") -> None:
    table = plain_table("score", "method", "k", "at the same", "seeds", "difference", "95 % interval")
    for row in rows:
        interval = "–" if row.low is None or row.high is None else f"{row.low:+.3f} … {row.high:+.3f}"
        table.add_row(row.score, row.method, _whole(row.k), row.at, str(row.n), f"{row.mean:+.3f}", interval)
    printed.print(table)
    printed.print("The interval is that of the mean over seeds (t). One seed has none.")


def _print_curves(rows: "Sequence[CurvePoint]") -> None:
    table = plain_table("score", "method", "L0", "seeds", "mean", "sd")
    for row in rows:
        table.add_row(row.score, row.method, number(row.l0, 1), str(row.n), number(row.mean), number(row.sd))
    printed.print(table)
    printed.print("Between a method's SAEs of the same seed; there is no line where they do not reach to both sides.")


def _whole(value: int | None) -> str:
    return "–" if value is None else str(value)
