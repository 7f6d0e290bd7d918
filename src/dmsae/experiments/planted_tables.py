"""The figures of the planted benchmark as tables of text: means over seeds, beside their nulls."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from dmsae.evaluation.recovery import CoreRecovery, Ranking, Recovery
from dmsae.experiments.planted_benchmark import PlantedResult, ScoredCore, ScoredSAE
from dmsae.experiments.results import Spread
from dmsae.experiments.tables import TextTable, text

_T = TypeVar("_T")
_CORE = CoreRecovery._fields[1:]


def planted_tables(result: PlantedResult) -> list[TextTable]:
    """Return what SAEs found, how well scores rank what the loss reads, and which features cores hold."""
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(one.seed for one in result.saes))
    over = f"(seeds {seeds}; mean ± standard deviation)"
    saes = _grouped(result.saes, lambda one: one.sae)
    return [
        _recovery(f"What SAEs found; in brackets, an untrained SAE of the same shape and L0 {over}", saes),
        _rankings(f"AUC of scores: latents of read features above those of unread ones {over}", saes),
        _cores(f"Which features cores hold {over}", _grouped(result.cores, lambda one: one.core)),
    ]


def _grouped(rows: Sequence[_T], name: Callable[[_T], str]) -> dict[str, list[_T]]:
    """Return the rows by name, in the order of the first seed."""
    groups: dict[str, list[_T]] = {}
    for row in rows:
        groups.setdefault(name(row), []).append(row)
    return groups


def _spread(values: Sequence[float | None], digits: int = 2) -> str:
    return text(Spread.of(values), digits)


def _recovery(title: str, groups: dict[str, list[ScoredSAE]]) -> TextTable:
    rows = []
    for name, saes in groups.items():
        figures = [
            f"{_spread([getattr(one.recovery, figure) for one in saes])} "
            f"({_spread([getattr(one.untrained, figure) for one in saes])})"
            for figure in Recovery._fields
        ]
        l0, fve, n_core = _spread([one.l0 for one in saes], 1), _spread([one.fve for one in saes]), _sizes(saes)
        rows.append([name, n_core, l0, fve, *figures])
    return TextTable(title, ["SAE", "core", "L0", "FVE", *(one.replace("_", " ") for one in Recovery._fields)], rows)


def _sizes(saes: Sequence[ScoredSAE]) -> str:
    return _spread([one.n_core for one in saes], 0)


def _rankings(title: str, groups: dict[str, list[ScoredSAE]]) -> TextTable:
    scores = list(next(iter(groups.values()))[0].attribution)
    nulls = ("auc_random", "auc_random_high")
    precisions = ("precision", "precision_random")

    def column(saes: list[ScoredSAE], score: str, figure: str) -> str:
        return _spread([getattr(one.attribution[score], figure) for one in saes])

    rows = []
    for name, saes in groups.items():
        aucs = [column(saes, score, "auc") for score in scores]
        beside = [column(saes, "all", figure) for figure in (*nulls, *precisions)]
        untrained = _spread([one.attribution_untrained["all"].auc for one in saes])
        rows.append([name, _spread([_n_latents(one.attribution["all"]) for one in saes], 0), *aucs, *beside, untrained])
    header = ["SAE", "latents", *scores, "random", "97.5 % of random", "precision of all", "random", "untrained, all"]
    return TextTable(title, header, rows)


def _n_latents(ranking: Ranking) -> int:
    return ranking.n_read + ranking.n_unread


def _cores(title: str, groups: dict[str, list[ScoredCore]]) -> TextTable:
    rows = []
    for name, cores in groups.items():
        n_latents = _spread([one.recovery.n_latents for one in cores], 1)
        figures = [_spread([getattr(one.recovery, figure) for one in cores]) for figure in _CORE]
        rows.append([name, n_latents, *figures, _spread([one.chance for one in cores])])
    return TextTable(title, ["core", "latents", *(one.replace("_", " ") for one in _CORE), "precision by chance"], rows)
