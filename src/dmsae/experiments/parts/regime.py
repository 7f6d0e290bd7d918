"""Where does a first core beat every control, at matched L0 on held-out text? A small designed search.

`regime` tries some settings with the seeds that it is given. `confirmation` takes the one with the largest mean margin
in what those found, and repeats it with seeds that took no part in the choice. A core of a handful of latents that hold
next to none of the attribution can win by a hair and mean nothing, so it is not chosen.
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
from dmsae.experiments.parts.capped import by_rules, detectors, first_selected, fitting
from dmsae.experiments.results import part_results
from dmsae.sae.config import CoreMode, matryoshka_nesting

FRESH = 1000
"""Added to a seed for a confirmation."""
MIN_SHARE = 0.1
"""Of the attribution of cycle 0: what a core must hold, in every seed, for its regime to be chosen."""
_RULES = (Rule.FIRING_RATE, Rule.RANDOM_SUBSET)


def run(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return the margin of every regime for one seed."""
    return {"rows": [], "regimes": [_tried(lab, grid, regime, seed) for regime in grid.regimes]}


def confirm(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return the margin of the regime that the search found best, with a fresh seed."""
    best = chosen(lab)
    others = {one["figures"]["chosen"] for one in part_results(lab.results, "confirmation")} - {best}
    if others:
        raise ConfigError(
            f"The search now finds {best!r} best, but {others.pop()!r} was confirmed. Remove confirmation-seed-*.json "
            f"in {lab.results}, and run the same command again."
        )
    regime = next(one for one in grid.regimes if one.name == best)
    return {"rows": [], "chosen": best, "regimes": [_tried(lab, grid, regime, seed + FRESH)]}


def chosen(lab: Lab) -> str:
    """Return the regime with the largest mean margin over the seeds of the search.

    One that failed in a seed does not count, nor does one whose core holds too little of the attribution.
    """
    tried: dict[str, list[Json]] = {}
    for result in part_results(lab.results, "regime"):
        for one in result["figures"]["regimes"]:
            tried.setdefault(one["regime"], []).append(one)
    usable = {
        name: fmean(one["margin"] for one in of_seeds)
        for name, of_seeds in tried.items()
        if all(one["margin"] is not None and _share(one) >= MIN_SHARE for one in of_seeds)
    }
    if not usable:
        raise ConfigError(
            "There is nothing to confirm: run the part regime first. No regime of it has both a margin and a core that "
            f"holds {MIN_SHARE:.0%} of the attribution."
        )
    return max(usable, key=lambda name: usable[name])


def _share(one: Json) -> float:
    """Return the share of the attribution that the core of a regime holds."""
    own = (row for row in one["rows"] if row["sae"].rpartition("-k")[0] in tuple(CoreMode))
    return float(next(own)["attribution_share"] or 0)


def _tried(lab: Lab, grid: Grid, regime: Regime, seed: int) -> Json:
    config = settings(lab.base, grid, regime, seed)
    try:
        first = first_selected(lab, config)
    except AttributionError as error:
        return {"regime": regime.name, "seed": seed, "margin": None, "price": None, "note": str(error)}
    transfer = replace(detectors(lab, config, "regime"), core_modes=(regime.core_mode,))
    others, unable = by_rules(lab, config, _RULES, first)
    beside, without_room = fitting(lab, transfer, others)
    left_out = unable | without_room
    try:
        results = lab.transfer(transfer, first.core, beside)
    except ConfigError as error:  # a core that leaves no room in the budget
        return {"regime": regime.name, "seed": seed, "margin": None, "price": None, "note": str(error)}
    rows = lab.rows(results, config, [lab.held(first.core, config)], losses=False)  # a margin is one of variance
    prices = {row["sae"].rpartition("-k")[0]: row["price"] for row in rows if row["n_core"]}
    own = prices.pop(str(regime.core_mode), None)
    # A control without a price, or that does not fit the budget, might be the best: then there is no margin.
    known = [price for price in (own, *prices.values()) if price is not None]
    complete = len(known) == 1 + len(prices) and prices and not left_out
    margin = min(known[1:]) - known[0] if complete else None
    facts = {"n_core": len(first.core), "left_out": left_out, "rows": rows}
    return {"regime": regime.name, "seed": seed, "margin": margin, "price": own, "prices": prices, **facts}


def settings(base: DistillConfig, grid: Grid, regime: Regime, seed: int) -> DistillConfig:
    """Return the distillation of a regime."""
    width = round(base.width * regime.width_factor)
    nesting = base.nesting or matryoshka_nesting(base.width)
    first = min(round(nesting[0] * regime.prefix0_factor), base.width // 2)
    nesting = (first, *(size for size in nesting[:-1] if size > first), width)
    tokens = round(base.train.tokens * regime.token_factor)
    return replace(
        base,
        seed=seed,
        width=width,
        k=scaled(base.k, regime.k_factor),
        nesting=nesting,
        coverage=regime.coverage,
        max_rate=grid.max_rate,
        train=replace(base.train, tokens=tokens),
        attribution=replace(base.attribution, quantile_over=QuantileOver(regime.over)),
    )
