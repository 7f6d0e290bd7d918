"""Facts about cities: the country, continent, language and time zone of each, and the model's own idea of them.

The facts are GeoNames' (`dmsae assets fetch cities`). What the model knows is read from the activation of a city's last
token by a linear probe for each attribute: a small model completes few such sentences, but represents much of this.
"""

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.activations.base_model import BaseModel
from dmsae.config import require, require_whole
from dmsae.errors import CorpusError
from dmsae.evaluation import logistic
from dmsae.evaluation.prompts import last_token_activations
from dmsae.progress import SILENT, Progress
from dmsae.seeds import derive_seed
from dmsae.text import assets

UNKNOWN = -1
"""Stands for a value that too few cities share."""
_MAX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class CitiesConfig:
    """Which cities, and how their attributes are read."""

    n_cities: int = 1200
    """The most populous ones are taken."""
    max_per_country: int = 60
    """Cities of one country, so that few countries do not make up most."""
    min_per_value: int = 25
    """A country, language or time zone with fewer cities is left out."""
    template: str = "People who live in the city of {city}"
    """A sentence up to and with the city."""
    train_share: float = 0.6
    """Share of cities that probes and masks are trained on; the others are for scoring."""
    probe_c: float = 10.0
    """How little the attribute probes are penalised, relative to the variance of activations."""
    seed: int = 0
    """Decides which cities are trained on."""

    def __post_init__(self) -> None:
        for name in ("n_cities", "max_per_country", "min_per_value"):
            require_whole(f"cities.{name}", getattr(self, name), 2)
        require(self.template.endswith("{city}"), "cities.template", self.template, "end in {city}")
        require(0 < self.train_share < 1, "cities.train_share", self.train_share, "lie between 0 and 1")
        require(self.probe_c > 0, "cities.probe_c", self.probe_c, "be positive")


class City(NamedTuple):
    """A city and what GeoNames says about it."""

    name: str
    country: str
    continent: str
    language: str
    """The first language that GeoNames lists for the country."""
    timezone: str


ATTRIBUTES = City._fields[1:]


class Attribute(NamedTuple):
    """One attribute of all cities, and a probe that reads it."""

    name: str
    values: list[str]
    of_city: Tensor
    """Index of each city's value, or UNKNOWN."""
    probe: logistic.Logistic
    """A regression for each value against all others; the one with the largest logit is the answer."""

    def answers(self, x_BD: Tensor) -> Tensor:
        """Return the index of the value that the probe reads from each activation."""
        return self.probe.logits(x_BD).argmax(0)


class Cities(NamedTuple):
    """Cities as activations, their attributes, and which of them are for training."""

    names: list[str]
    x: Tensor
    is_train: Tensor
    attributes: list[Attribute]


def read_cities(config: CitiesConfig, progress: Progress = SILENT) -> list[City]:
    """Return the most populous cities, at most so many of each country; of equal names the larger city."""
    folder = assets.fetch("cities", progress)
    cities, countries = (json.loads((folder / f"{name}.json").read_text("utf8")) for name in ("cities", "countries"))
    taken: dict[str, City] = {}
    of_country: Counter[str] = Counter()
    for city in sorted(cities.values(), key=lambda city: (-city["population"], city["geonameid"])):
        country = countries[city["countrycode"]]
        if city["name"] in taken or of_country[country["name"]] == config.max_per_country:
            continue
        of_country[country["name"]] += 1
        language = country["languages"].split(",")[0].split("-")[0]
        facts = country["name"], country["continentcode"], language, city["timezone"]
        taken[city["name"]] = City(city["name"], *facts)
        if len(taken) == config.n_cities:
            return list(taken.values())
    raise CorpusError(
        f"There are {len(taken):,} cities with at most {config.max_per_country} of a country, but cities.n_cities = "
        f"{config.n_cities:,}. Ask for fewer."
    )


def known_cities(
    model: BaseModel, config: CitiesConfig, cache: Path | None = None, progress: Progress = SILENT
) -> Cities:
    """Return the cities with the activations of their last tokens, and a probe for each attribute."""
    cities = read_cities(config, progress)
    prompts = [config.template.format(city=city.name) for city in cities]
    x_BD = last_token_activations(model, prompts, _MAX_TOKENS, cache, progress)
    order = list(range(len(cities)))
    random.Random(derive_seed(config.seed, "cities")).shuffle(order)
    is_train_B = torch.zeros(len(cities), dtype=torch.bool)
    is_train_B[order[: int(config.train_share * len(cities))]] = True
    attributes = [
        attribute(name, [getattr(city, name) for city in cities], x_BD, is_train_B, config, cache, progress)
        for name in ATTRIBUTES
    ]
    return Cities([city.name for city in cities], x_BD, is_train_B, attributes)


def attribute(
    name: str,
    value_of: Sequence[str],
    x_BD: Tensor,
    is_train_B: Tensor,
    config: CitiesConfig,
    cache: Path | None = None,
    progress: Progress = SILENT,
) -> Attribute:
    """Return one attribute: the values that enough cities share, and the probe trained on the training cities."""
    counts = Counter(value_of)
    values = sorted(value for value, count in counts.items() if count >= config.min_per_value)
    if len(values) < 2:
        raise CorpusError(
            f"Fewer than two values of {name} are shared by {config.min_per_value} of {len(value_of)} cities. Raise "
            "cities.n_cities, or lower cities.min_per_value."
        )
    of_city = torch.tensor([values.index(value) if value in values else UNKNOWN for value in value_of])
    fit_on = is_train_B & (of_city != UNKNOWN)
    is_value_VB = torch.arange(len(values))[:, None] == of_city[fit_on]
    probe = logistic.fit_each(x_BD[fit_on], is_value_VB, config.probe_c, cache, progress)
    return Attribute(name, values, of_city, probe)
