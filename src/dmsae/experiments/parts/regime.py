"""Where does a first core beat every control, at matched L0 on held-out text? A small designed search.

`regime` tries some settings with the seeds that it is given. `confirmation` takes the one with the largest mean margin
in what those found, and repeats it with seeds that took no part in the choice.
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
from dmsae.experiments.parts.capped import by_rules, detectors, fitting
from dmsae.experiments.results import part_results
from dmsae.sae.config import matryoshka_nesting

FRESH = 1000
"""Added to a seed for a confirmation."""
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
    """Return the regime with the largest mean margin over the seeds of the search; one that failed does not count."""
    margins: dict[str, list[float | None]] = {}
    for result in part_results(lab.results, "regime"):
        for one in result["figures"]["regimes"]:
            margins.setdefault(one["regime"], []).append(one["margin"])
    usable = {name: fmean(m for m in found if m is not None) for name, found in margins.items() if None not in found}
    if not usable:
        raise ConfigError("There is nothing to confirm: run the part regime first; no regime of it has a margin yet.")
    return max(usable, key=lambda name: usable[name])


def _tried(lab: Lab, grid: Grid, regime: Regime, seed: int) -> Json:
    config = settings(lab.base, grid, regime, seed)
    try:
        core = lab.first_core(config)
    except AttributionError as error:
        return {"regime": regime.name, "seed": seed, "margin": None, "price": None, "note": str(error)}
    transfer = replace(detectors(lab, config, "regime"), core_modes=(regime.core_mode,))
    beside, left_out = fitting(lab, transfer, by_rules(lab, config, _RULES, len(core)))
    try:
        results = lab.transfer(transfer, core, beside)
    except ConfigError as error:  # a core that leaves no room in the budget
        return {"regime": regime.name, "seed": seed, "margin": None, "price": None, "note": str(error)}
    rows = lab.rows(results, config, [lab.held(core, config)], losses=False)  # a margin is one of variance
    prices = {row["sae"].rpartition("-k")[0]: row["price"] for row in rows if row["n_core"]}
    own = prices.pop(str(regime.core_mode), None)
    # A control without a price, or that does not fit the budget, might be the best: then there is no margin.
    known = [price for price in (own, *prices.values()) if price is not None]
    complete = len(known) == 1 + len(prices) and prices and not left_out
    margin = min(known[1:]) - known[0] if complete else None
    facts = {"n_core": len(core), "left_out": left_out, "rows": rows}
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
