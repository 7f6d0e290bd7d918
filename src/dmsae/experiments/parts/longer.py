"""Detectors have been trained before: what do SAEs reach that keep nothing and train for as long as both trainings?

The SAEs with detectors are those of the part `paper`. Their encoders were trained in cycle 0, and the rest afterwards
for as long again; the unconstrained SAEs there had only the second training.
"""

from collections.abc import Sequence
from dataclasses import replace

from dmsae.config import Json
from dmsae.errors import ConfigError
from dmsae.evaluation.price import interpolated
from dmsae.experiments.grid import Grid
from dmsae.experiments.lab import Lab
from dmsae.experiments.parts.paper import neighbours
from dmsae.experiments.results import part_results
from dmsae.sae.config import CoreMode

_TRAININGS = 2


def run(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return SAEs that keep nothing, at about the L0 of the detectors, and what these explain and predict less well."""
    config = replace(lab.base, seed=seed)
    carrying = _detectors(lab, seed)
    longer = replace(config, train=replace(config.train, tokens=_TRAININGS * config.train.tokens))
    free = neighbours(lab, longer, lab.first_core(config), round(carrying["l0"]))
    rows = lab.rows(free, config, losses=True)
    lacking, added = (_between(rows, carrying["l0"], name) for name in ("fve", "loss"))
    return {
        "rows": [carrying, *rows],
        "tokens": longer.train.tokens,
        "price": None if lacking is None else lacking - carrying["fve"],
        "price_loss": None if added is None or carrying["loss"] is None else carrying["loss"] - added,
    }


def _between(rows: Sequence[Json], l0: float, name: str) -> float | None:
    """Return a figure of SAEs at an L0 between theirs; None when it is outside, or not all have one."""
    points = [(row["l0"], row[name]) for row in rows]
    if not points or any(None in point for point in points):
        return None
    return interpolated(l0, points)[0] if min(points)[0] <= l0 <= max(points)[0] else None


def _detectors(lab: Lab, seed: int) -> Json:
    """Return the row of the SAE with detectors in the part `paper` of the same seed."""
    for result in part_results(lab.results, "paper"):
        for row in result["figures"]["rows"]:
            if result["seed"] == seed and row["sae"].startswith(str(CoreMode.DETECTOR)) and row["l0"] is not None:
                found: Json = row
                return found
    raise ConfigError(f"The part paper has no SAE with detectors for seed {seed}: run it first.")
