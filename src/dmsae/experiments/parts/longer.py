"""Detectors have been trained before: what do SAEs reach that keep nothing and train for as long as both trainings?

The SAEs with detectors are those of the part `paper`. Their encoders were trained in cycle 0, and the rest afterwards
for as long again; the unconstrained SAEs there had only the second training.
"""

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
    """Return SAEs that keep nothing, at about the L0 of the detectors, and what these explain less than they do."""
    config = replace(lab.base, seed=seed)
    carrying = _detectors(lab, seed)
    longer = replace(config, train=replace(config.train, tokens=_TRAININGS * config.train.tokens))
    rows = lab.rows(neighbours(lab, longer, lab.first_core(config), round(carrying["l0"])), config)
    points = [(row["l0"], row["fve"]) for row in rows if row["l0"] is not None]
    inside = bool(points) and min(points)[0] <= carrying["l0"] <= max(points)[0]
    price = interpolated(carrying["l0"], points)[0] - carrying["fve"] if inside else None
    return {"rows": [carrying, *rows], "tokens": longer.train.tokens, "price": price}


def _detectors(lab: Lab, seed: int) -> Json:
    """Return the row of the SAE with detectors in the part `paper` of the same seed."""
    for result in part_results(lab.results, "paper"):
        for row in result["figures"]["rows"]:
            if result["seed"] == seed and row["sae"].startswith(str(CoreMode.DETECTOR)) and row["l0"] is not None:
                found: Json = row
                return found
    raise ConfigError(f"The part paper has no SAE with detectors for seed {seed}: run it first.")
