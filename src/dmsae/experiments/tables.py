"""The figures of an experiment as tables of text."""

from collections.abc import Sequence
from typing import NamedTuple

from dmsae.config import Json
from dmsae.experiments.results import Spread, over_seeds
from dmsae.experiments.verdicts import Verdict

COLUMNS = {
    "n_core": ("core", 0),
    "fve": ("FVE", 3),
    "fve_prefix0": ("core + prefix-0", 3),
    "l0_core": ("L0 of the core", 1),
    "l0": ("L0", 1),
    "median_rate": ("median rate", 3),
    "kept_all": ("selected again", 1),
    "kept_active": ("over active", 1),
    "attribution_share": ("attribution held", 3),
    "price": ("price", 4),
    "price_prefix0": ("price, prefix-0", 3),
}
"""The figures of an SAE that are shown: heading, and digits after the point."""


class TextTable(NamedTuple):
    """A table of text."""

    title: str
    header: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """Return the table in Markdown, its title above it."""
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return "\n".join([f"**{self.title}**", "", *("| " + " | ".join(line) + " |" for line in lines)])


def tables(results: Sequence[Json]) -> list[TextTable]:
    """Return the tables of all parts of an experiment."""
    made = []
    for part in dict.fromkeys(result["part"] for result in results):
        seeds = sorted(result["seed"] for result in results if result["part"] == part)
        title = f"{part} (seeds {', '.join(map(str, seeds))}; mean ± standard deviation)"
        spreads = over_seeds(results, part, list(COLUMNS))
        if spreads:
            rows = [
                [name, *(text(spread[figure], digits) for figure, (_, digits) in COLUMNS.items())]
                for name, spread in spreads.items()
            ]
            made.append(TextTable(title, ["SAE", *(heading for heading, _ in COLUMNS.values())], rows))
        if cycles := _cycles([result for result in results if result["part"] == part]):
            made.append(TextTable(f"{title}: cores by cycle", ["run", "cycle", "size", "kept", "of the first"], cycles))
    return made


def verdict_table(found: Sequence[Verdict]) -> TextTable:
    """Return what was found about each claim."""
    rows = []
    for one in found:
        span = "–" if one.low is None or one.high is None else f"{one.low:.3f} to {one.high:.3f}"
        estimate = "–" if one.estimate is None else f"{one.estimate:.3f}"
        rows.append([one.claim, one.whose, one.outcome, one.statistic, estimate, span, str(len(one.seeds))])
    header = ["claim", "whose", "verdict", "statistic; it holds above 0", "mean", "95 % interval", "seeds"]
    return TextTable("Verdicts", header, rows)


def text(spread: Spread | None, digits: int) -> str:
    """Return a figure as mean ± standard deviation; without a spread when all seeds agree or there is only one."""
    if spread is None:
        return "–"
    if not spread.sd:
        return f"{spread.mean:.{digits}f}"
    return f"{spread.mean:.{digits}f} ± {spread.sd:.{max(digits, 1)}f}"


def _cycles(results: Sequence[Json]) -> list[list[str]]:
    """Return a row for each cycle of each distillation: how large its core is, and how much of others is in it."""
    grouped: dict[tuple[str, int], list[Json]] = {}
    for result in results:
        for cycle in result["figures"].get("cycles", ()):
            grouped.setdefault((cycle["run"], cycle["cycle"]), []).append(cycle)
    return [
        [run, str(cycle), *(text(Spread.of([one[name] for one in ones]), 1) for name in ("size", "kept", "of_first"))]
        for (run, cycle), ones in grouped.items()
    ]
