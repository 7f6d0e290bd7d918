"""The figures of an experiment as tables of text."""

from collections.abc import Sequence
from typing import NamedTuple

from dmsae.config import Json
from dmsae.evaluation.measures import MEASURES
from dmsae.experiments.results import Spread, aligned, over_seeds
from dmsae.experiments.verdicts import Verdict

COLUMNS = {
    "n_core": ("core", 0),
    "l0": ("L0", 1),
    "fve": ("FVE", 3),
    "price": ("price", 4),
    "loss": ("loss", 3),
    "price_loss": ("price, nats", 4),
    "l0_core": ("L0 of the core", 1),
    "median_rate": ("median rate", 3),
    "attribution_share": ("attribution held", 3),
    "kept_all": ("selected again", 1),
    "kept_active": ("over active", 1),
    "fve_prefix0": ("core + prefix-0", 3),
    "price_prefix0": ("price, prefix-0", 3),
}
"""The figures of an SAE that are shown: heading, and digits after the point. What a reader asks first comes first."""

CONTROLS = {
    "firing_rate": "by firing rate",
    "mean_activation": "by mean activation",
    "random_subset": "by chance",
    "principal_components": "principal components",
    "random": "random detectors",
    "random-norm_matched": "random rows",
    "random-covariance_matched": "random rows, covariance-matched",
}
"""What the controls of a regime are called."""


_SMALL = 0.01
"""A statistic below this is shown with four digits after the point, any other with three."""


class TextTable(NamedTuple):
    """A table of text."""

    title: str
    header: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """Return the table in Markdown, its title above it."""
        rows = [[cell.replace(" ± ", "\u00a0±\u00a0") for cell in row] for row in self.rows]
        lines = [self.header, ["---"] * len(self.header), *rows]
        return "\n".join([f"**{self.title}**", "", *("| " + " | ".join(line) + " |" for line in lines)])


def tables(results: Sequence[Json]) -> list[TextTable]:
    """Return the tables of all parts of an experiment."""
    made = []
    for part in dict.fromkeys(result["part"] for result in results):
        alike = aligned([result for result in results if result["part"] == part])
        seeds = sorted(result["seed"] for result in alike)
        title = f"{part} (seeds {', '.join(map(str, seeds))}; mean ± standard deviation)"
        spreads = over_seeds(alike, part, list(COLUMNS))
        if spreads:
            rows = [
                [
                    f"{name}{_in_some(spread, len(seeds))}",
                    *(text(spread[figure], digits) for figure, (_, digits) in COLUMNS.items()),
                ]
                for name, spread in spreads.items()
            ]
            made.append(TextTable(title, ["SAE", *(heading for heading, _ in COLUMNS.values())], rows))
        of_part = [result["figures"] for result in alike]
        shown = (_cycles(of_part), _rules(of_part), _regimes(of_part), _pairs(of_part), *_scores(of_part))
        others = (*shown, _missing(alike))
        made += [table._replace(title=f"{title}{table.title}") for table in others if table.rows]
    return made


def _in_some(spread: dict[str, Spread | None], n_seeds: int) -> str:
    """Return in how many seeds there is an SAE, if not in all of them."""
    n = max((one.n for one in spread.values() if one), default=0)
    return f" ({n} of {n_seeds} seeds)" if n < n_seeds else ""


def verdict_table(found: Sequence[Verdict]) -> TextTable:
    """Return what was found about each claim."""
    rows = []
    for one in found:
        digits = 4 if one.estimate is not None and abs(one.estimate) < _SMALL else 3
        span = "–" if one.low is None or one.high is None else f"{one.low:.{digits}f} to {one.high:.{digits}f}"
        estimate = "–" if one.estimate is None else f"{one.estimate:.{digits}f}"
        rows.append([one.claim, one.whose, one.outcome, one.statistic, estimate, span, of_seeds(one)])
    header = ["claim", "whose", "verdict", "statistic; it holds above 0", "mean", "95 % interval", "seeds"]
    return TextTable("Verdicts", header, rows)


def of_seeds(verdict: Verdict) -> str:
    """Return how many seeds gave the statistic of a claim, and of how many if others ran without giving it."""
    n, n_run = len(verdict.seeds), verdict.n_run
    return str(n) if n == n_run else f"{n} of {n_run}"


def text(spread: Spread | None, digits: int) -> str:
    """Return a figure as mean ± standard deviation; without a spread when all seeds agree or there is only one."""
    if spread is None:
        return "–"
    if not spread.sd:
        return f"{spread.mean:.{digits}f}"
    return f"{spread.mean:.{digits}f} ± {spread.sd:.{max(digits, 1)}f}"


def _cycles(figures: Sequence[Json]) -> TextTable:
    """Return a row for each cycle of each distillation: how large its core is, and how much of others is in it."""
    columns = {"size": 1, "kept": 1, "of_first": 1, "median_rate": 3}
    rows = _grouped([one for found in figures for one in found.get("cycles", ())], ("run", "cycle"), columns)
    return TextTable(": cores by cycle", ["run", "cycle", "size", "kept", "of the first", "median rate"], rows)


def _rules(figures: Sequence[Json]) -> TextTable:
    """Return a row for each rule: how its ranking agrees with ablation."""
    columns = {"spearman": 2, "share_of_effect": 3}
    rows = _grouped([one for found in figures for one in found.get("rules", ())], ("rule",), columns)
    return TextTable(": rules", ["rule", "rank correlation with ablation", "share of its effect"], rows)


def _regimes(figures: Sequence[Json]) -> TextTable:
    """Return a row for each regime: what its core costs, and how much more each control does."""
    tried = [one | one["margins"] for found in figures for one in found.get("regimes", ())]
    controls = list(dict.fromkeys(control for one in tried for control in one["margins"]))
    rows = _grouped(tried, ("regime",), {"n_core": 0, "price": 4, **dict.fromkeys(controls, 4)})
    more = [f"{CONTROLS[control]} more" for control in controls]
    return TextTable(": regimes", ["regime", "core", "price", *more], rows)


def _pairs(figures: Sequence[Json]) -> TextTable:
    """Return a row for each kind of latents: how alike two independent sets of them are."""
    columns = {"encoder_cosine": 3, "decoder_cosine": 3, "share_found": 3, "jaccard": 3, "jaccard_chance": 3}
    rows = _grouped([one for found in figures for one in found.get("pairs", ())], ("what", "tokens"), columns)
    header = [
        "what",
        "activations",
        "encoder cosine",
        "decoder cosine",
        "found again",
        "Jaccard of firing",
        "by chance",
    ]
    return TextTable(": pairs of independent runs", header, rows)


def _scores(figures: Sequence[Json]) -> list[TextTable]:
    """Return a table for each measure: every score of every SAE, its null, and the part of the way to the ceiling."""
    entries = with_like_nulls([one for found in figures for one in found.get("scores", ())])
    return [_of_measure(measure, entries) for measure in dict.fromkeys(one["measure"] for one in entries)]


def with_like_nulls(entries: Sequence[Json]) -> list[Json]:
    """Return scores, without null where others of the same figure are compared with null dictionaries and this is not.

    It may have a null of its own all the same, but one that is easier to beat, or harder.
    """
    compared = {(one["measure"], one["figure"]) for one in entries if set(one["nulls"]) - {"own"}}
    return [
        one | {"null": None, "part": None}
        if (one["measure"], one["figure"]) in compared and not set(one["nulls"]) - {"own"}
        else one
        for one in entries
    ]


def _missing(results: Sequence[Json]) -> TextTable:
    """Return a row for each thing that a part could not do: why, in the first seed in which that was so, and in which
    seeds."""
    reasons: dict[str, dict[int, str]] = {}
    for result in results:
        figures = result["figures"]
        found = {f"distillation, {name}": why for name, why in figures.get("failures", {}).items()}
        found |= figures.get("left_out", {})
        for one in figures.get("regimes", ()):
            found |= {f"{one['regime']}, {name}": why for name, why in one.get("left_out", {}).items()}
            found |= {one["regime"]: one["note"]} if "note" in one else {}
        for what, why in found.items():
            reasons.setdefault(what, {})[result["seed"]] = why
    rows = [[what, ", ".join(map(str, sorted(why))), why[min(why)]] for what, why in reasons.items()]
    return TextTable(": left out or failed", ["what", "seeds", "why (in the first of them)"], rows)


_SHOWN = {"score": "", "null": "null", "part": "of the way"}
"""What is shown of a score, and its heading; the score itself has its own name."""


def _of_measure(measure: str, entries: Sequence[Json]) -> TextTable:
    mine = [one for one in entries if one["measure"] == measure]
    figures = dict.fromkeys(one["figure"] for one in mine)
    known = {(one["figure"], what) for one in mine for what in _SHOWN if one[what] is not None}
    columns = [(figure, what) for figure in figures for what in _SHOWN if (figure, what) in known]
    rows = []
    for sae in dict.fromkeys(one["sae"] for one in mine):
        of_sae = [one for one in mine if one["sae"] == sae]
        rows.append([sae, *(_cell([one[what] for one in of_sae if one["figure"] == f], what) for f, what in columns)])
    caveat = MEASURES[measure].caveat if measure in MEASURES else ""
    header = ["SAE", *(_SHOWN[what] or figure for figure, what in columns)]
    return TextTable(f": {measure} ({caveat})" if caveat else f": {measure}", header, rows)


def _cell(values: Sequence[float | None], what: str) -> str:
    spread = Spread.of(values)
    # Where a null is all but perfect, as that of absorption is, a share of the way from there means nothing.
    return "< −1" if what == "part" and spread is not None and spread.mean < -1 else text(spread, 3)


def _grouped(entries: Sequence[Json], keys: tuple[str, ...], columns: dict[str, int]) -> list[list[str]]:
    """Return a row of spreads for each group of entries that agree in some keys, in the order of their appearance."""
    groups: dict[tuple[str, ...], list[Json]] = {}
    for entry in entries:
        groups.setdefault(tuple(str(entry[key]) for key in keys), []).append(entry)
    return [
        [*group, *(text(Spread.of([one.get(name) for one in ones]), digits) for name, digits in columns.items())]
        for group, ones in groups.items()
    ]
