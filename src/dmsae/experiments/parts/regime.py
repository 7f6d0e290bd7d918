"""Where does a distilled core beat its controls, at matched L0 on held-out text? A small designed search.

`regime` tries some settings with the seeds that it is given. `confirmation` takes two of them by what those found, and
repeats them with seeds that took no part in the choice: the one with the largest mean margin of all, and the one with
the largest among those whose core holds a share of the attribution that is worth the name. A core of a handful of
latents that hold next to none can win by a hair and mean nothing.
"""

from dataclasses import replace
from statistics import fmean

from dmsae.config import Json
from dmsae.cores.attribution import QuantileOver
from dmsae.cores.controls import Rule
from dmsae.distillation.config import DistillConfig
from dmsae.errors import AttributionError, ConfigError
from dmsae.experiments.grid import Grid, Regime, scaled
from dmsae.experiments.lab import Lab
from dmsae.experiments.pricing import priced, selected_after
from dmsae.experiments.results import part_results
from dmsae.sae.config import CoreMode, matryoshka_nesting

FRESH = 1000
"""Added to a seed for a confirmation."""
MIN_SHARE = 0.1
"""Of the attribution of the last cycle: what a core must hold, in every seed, to be more than a handful of latents."""
_RULES = (Rule.FIRING_RATE, Rule.RANDOM_SUBSET)
ANY, HOLDING = "of all", "of those that hold enough"
"""Which regime was the best: of all, or of those whose cores hold `MIN_SHARE`."""


def run(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return the margin of every regime for one seed."""
    return {"rows": [], "regimes": [_tried(lab, grid, regime, seed) for regime in grid.regimes]}


def confirm(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return the margins of the regimes that the search found best, with a fresh seed; none if nothing qualified."""
    best = chosen(lab)
    if any(one["figures"]["chosen"] != best for one in part_results(lab.results, "confirmation")):
        raise ConfigError(
            f"The search now finds other regimes best than those that were confirmed: {best}. Remove "
            f"confirmation-seed-*.json in {lab.results}, and run the same command again."
        )
    by_name = {regime.name: regime for regime in grid.regimes}
    tried = [_tried(lab, grid, by_name[name], seed + FRESH) for name in dict.fromkeys(best.values())]
    return {"rows": [], "chosen": best, "regimes": tried}


def chosen(lab: Lab) -> dict[str, str]:
    """Return the regimes with the largest mean margin over the seeds of the search, by what they are the best of.

    One without a margin in a seed, because it failed or a control is missing, does not count.
    """
    tried: dict[str, list[Json]] = {}
    for result in part_results(lab.results, "regime"):
        for one in result["figures"]["regimes"]:
            tried.setdefault(one["regime"], []).append(one)
    if not tried:
        raise ConfigError("There is nothing to confirm: run the part regime first.")
    known = {name: ones for name, ones in tried.items() if all(one["margin"] is not None for one in ones)}
    holding = {name: ones for name, ones in known.items() if all(_share(one) >= MIN_SHARE for one in ones)}
    return {what: _best(ones) for what, ones in ((ANY, known), (HOLDING, holding)) if ones}


def _best(tried: dict[str, list[Json]]) -> str:
    return max(tried, key=lambda name: fmean(one["margin"] for one in tried[name]))


def _share(one: Json) -> float:
    """Return the share of the attribution that the core of a regime holds."""
    own = (row for row in one["rows"] if row["sae"].rpartition("-k")[0] in tuple(CoreMode))
    return float(next(own)["attribution_share"] or 0)


def _tried(lab: Lab, grid: Grid, regime: Regime, seed: int) -> Json:
    """Return what the distilled core of a regime costs and its margin: how much more the best control costs."""
    config = settings(lab.base, grid, regime, seed)
    facts: Json = {"regime": regime.name, "seed": seed, "margin": None, "price": None}
    try:
        found = lab.follow(config)
    except AttributionError as error:
        return facts | {"note": str(error)}
    selected = selected_after(found, config.cycles)
    if selected is None:
        return facts | {"note": found.failure or "No latent was selected in both of the last two cycles."}
    rows, left_out = priced(lab, config, regime.core_mode, selected, _RULES)
    facts |= {"n_core": len(selected.core), "left_out": left_out, "rows": rows}
    prices = {row["sae"].rpartition("-k")[0]: row["price"] for row in rows if row["n_core"]}
    own = prices.pop(str(regime.core_mode), None)
    # A control without a price, or that does not fit the budget, might be the best: then there is no margin.
    known = [price for price in (own, *prices.values()) if price is not None]
    complete = len(known) == 1 + len(prices) and prices and not left_out
    return facts | {"margin": min(known[1:]) - known[0] if complete else None, "price": own, "prices": prices}


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
