"""The figures of the planted benchmark as tables of text: means over seeds, beside their nulls."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from dmsae.evaluation.recovery import CoreRecovery, Recovery
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
    """Return mean ± standard deviation; with the number of seeds when not all of them have the figure."""
    spread = Spread.of(values)
    return text(spread, digits) + (f" ({spread.n} of {len(values)})" if spread and spread.n < len(values) else "")


def _mean(values: Sequence[float | None], digits: int = 2) -> str:
    spread = Spread.of(values)
    return text(spread and spread._replace(sd=None), digits)


def _beside(values: Sequence[float | None], nulls: Sequence[float | None]) -> str:
    """Return a figure with that of its null in brackets."""
    return f"{_spread(values)} ({_mean(nulls)})"


def _recovery(title: str, groups: dict[str, list[ScoredSAE]]) -> TextTable:
    rows = []
    for name, saes in groups.items():
        found, nulls = [one.recovery for one in saes], [one.untrained for one in saes]
        figures = [_beside(*([getattr(one, f) for one in some] for some in (found, nulls))) for f in Recovery._fields]
        sizes, l0 = _spread([one.n_core for one in saes], 0), _spread([one.l0 for one in saes], 1)
        rows.append([name, sizes, l0, _spread([one.fve for one in saes]), *figures])
    return TextTable(title, ["SAE", "core", "L0", "FVE", *(one.replace("_", " ") for one in Recovery._fields)], rows)


def _rankings(title: str, groups: dict[str, list[ScoredSAE]]) -> TextTable:
    scores = list(next(iter(groups.values()))[0].attribution)
    rows = []
    for name, saes in groups.items():
        over_all = [one.attribution["all"] for one in saes]
        counts = [_mean([getattr(one, figure) for one in over_all], 1) for figure in ("n_read", "n_unread")]
        aucs = [_spread([one.attribution[score].auc for one in saes]) for score in scores]
        random = f"{_mean([one.auc_random for one in over_all])} ({_mean([one.auc_random_high for one in over_all])})"
        untrained = _spread([one.attribution_untrained["all"].auc for one in saes])
        precision = _beside([one.precision for one in over_all], [one.precision_random for one in over_all])
        rows.append([name, *counts, *aucs, random, untrained, precision])
    names = ("random (97.5 %)", "all, untrained", "precision of all (random)")
    return TextTable(title, ["SAE", "read", "unread", *scores, *names], rows)


def _cores(title: str, groups: dict[str, list[ScoredCore]]) -> TextTable:
    rows = []
    for name, cores in groups.items():
        n_latents = _spread([one.recovery.n_latents for one in cores], 1)
        figures = [_spread([getattr(one.recovery, figure) for one in cores]) for figure in _CORE]
        rows.append([name, n_latents, *figures, _spread([one.chance for one in cores])])
    return TextTable(title, ["core", "latents", *(one.replace("_", " ") for one in _CORE), "precision by chance"], rows)
