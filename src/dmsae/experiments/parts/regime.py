"""Where does a distilled core beat its controls, at matched L0 on held-out text? A small designed search.

`regime` tries some settings with the seeds that it is given, on the first half of the held-out activations.
`confirmation` takes two of them by what those found, and repeats them on the second half, with seeds that took no part
in the choice: the one with the largest margin of all, and the one with the largest among those whose core holds a share
of the attribution that is worth the name. A core of a handful of latents that hold next to none can win by a hair and
mean nothing.

The margin over a control is its price less that of the core. Each control has a margin of its own: the smallest of
several in one seed would be below 0 for a core that is as good as all of them, by noise alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from dmsae.config import Json
from dmsae.cores.attribution import QuantileOver
from dmsae.cores.controls import RandomKind, Rule
from dmsae.distillation.config import DistillConfig
from dmsae.errors import AttributionError, ConfigError
from dmsae.evaluation.fidelity import Half
from dmsae.experiments.grid import FRESH, Grid, Regime, scaled
from dmsae.experiments.lab import Lab
from dmsae.experiments.pricing import priced, selected_after
from dmsae.experiments.results import part_results
from dmsae.sae.config import CoreMode, matryoshka_nesting

MIN_SHARE = 0.1
"""Of the attribution of the last cycle: what a core must hold, in every seed, to be more than a handful of latents."""
ANY, HOLDING = "of all", "of those that hold enough"
"""Which regime was the best: of all, or of those whose cores hold `MIN_SHARE`."""


def run(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return the margins of every regime for one seed."""
    return {"rows": [], "regimes": [_tried(lab, grid, regime, seed, Half.FIRST) for regime in grid.regimes]}


def confirm(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return the margins of the regimes that the search found best, with a fresh seed; none if nothing qualified."""
    best = chosen(lab)
    if any(one["figures"]["chosen"] != best for one in part_results(lab.results, "confirmation")):
        raise ConfigError(
            f"The search now finds other regimes best than those that were confirmed: {best}. Remove "
            f"confirmation-seed-*.json in {lab.results}, and run the same command again."
        )
    by_name = {regime.name: regime for regime in grid.regimes}
    names = dict.fromkeys(best.values())
    tried = [_tried(lab, grid, by_name[name], seed + FRESH, Half.SECOND) for name in names]
    return {"rows": [], "chosen": best, "regimes": tried}


def chosen(lab: Lab) -> dict[str, str]:
    """Return the regimes with the largest margin over their best control, by what they are the best of.

    Margins are means over the seeds of the search. A regime without margins in a seed, because it failed or a control
    is missing, does not count.
    """
    tried: dict[str, list[Json]] = {}
    for result in part_results(lab.results, "regime"):
        for one in result["figures"]["regimes"]:
            tried.setdefault(one["regime"], []).append(one)
    if not tried:
        raise ConfigError("There is nothing to confirm: run the part regime first.")
    known = {name: ones for name, ones in tried.items() if all(one["margins"] for one in ones)}
    holding = {name: ones for name, ones in known.items() if all(_share(one) >= MIN_SHARE for one in ones)}
    return {what: _best(ones) for what, ones in ((ANY, known), (HOLDING, holding)) if ones}


def _best(tried: dict[str, list[Json]]) -> str:
    return max(tried, key=lambda name: margin(tried[name]))


def margin(tried: Sequence[Json]) -> float:
    """Return the margin of a regime over its best control: the smallest of the mean margins over seeds."""
    return min(fmean(one["margins"][control] for one in tried) for control in tried[0]["margins"])


def _share(one: Json) -> float:
    """Return the share of the attribution that the core of a regime holds."""
    own = (row for row in one["rows"] if row["sae"].rpartition("-k")[0] in tuple(CoreMode))
    return float(next(own)["attribution_share"] or 0)


def _tried(lab: Lab, grid: Grid, regime: Regime, seed: int, half: Half) -> Json:
    """Return what the distilled core of a regime costs on a half of the held-out activations, and its margins."""
    config = settings(lab.base, grid, regime, seed)
    facts: Json = {"regime": regime.name, "seed": seed, "margins": {}, "price": None}
    try:
        found = lab.follow(config)
    except AttributionError as error:
        return facts | {"note": str(error)}
    selected = selected_after(found, config.cycles)
    if selected is None:
        return facts | {"note": found.failure or "No latent was selected in both of the last two cycles."}
    rows, left_out = priced(lab, config, regime.core_mode, selected, *_controls(grid, regime.core_mode), half)
    facts |= {"n_core": len(selected.core), "left_out": left_out, "rows": rows}
    ending = f"-{regime.core_mode}"
    prices = {row["sae"].rpartition("-k")[0].removesuffix(ending): row["price"] for row in rows if row["n_core"]}
    own = prices.pop(str(regime.core_mode), None)
    # A control without a price, or that does not fit the budget, might be the best: then there are no margins.
    known = own is not None and None not in prices.values() and not left_out
    return facts | {"margins": {name: price - own for name, price in prices.items()} if known else {}, "price": own}


def _controls(grid: Grid, mode: CoreMode) -> tuple[Sequence[Rule], tuple[RandomKind, ...]]:
    """Return the rules and random rows that a core has to beat. Detectors of principal components fire half of the
    time, and cost several times as much as others, where there is room for them at all."""
    rules, random_rows = grid.rules, grid.random_cores
    if mode is CoreMode.DETECTOR:
        return [rule for rule in rules if rule is not Rule.PRINCIPAL_COMPONENTS], (RandomKind.NORM_MATCHED,)
    return rules, random_rows


def settings(base: DistillConfig, grid: Grid, regime: Regime, seed: int) -> DistillConfig:
    """Return the distillation of a regime. Detectors are of latents that do not fire often, as in the other parts."""
    width = round(base.width * regime.width_factor)
    nesting = base.nesting or matryoshka_nesting(base.width)
    first = min(round(nesting[0] * regime.prefix0_factor), base.width // 2)
    nesting = (first, *(size for size in nesting[:-1] if size > first), width)
    return replace(
        base,
        seed=seed,
        width=width,
        k=scaled(base.k, regime.k_factor),
        nesting=nesting,
        coverage=regime.coverage,
        core_mode=regime.core_mode,
        max_rate=grid.max_rate if regime.core_mode is CoreMode.DETECTOR else None,
        train=replace(base.train, tokens=round(base.train.tokens * regime.token_factor)),
        attribution=replace(base.attribution, quantile_over=QuantileOver(regime.over)),
    )
