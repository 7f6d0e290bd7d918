"""Attributes that have latents of their own can be exchanged one by one; entangled ones cannot."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dmsae.activations.base_model import BaseModel, ModelConfig
from dmsae.disk.layout import ASSET_MANIFEST
from dmsae.errors import AssetError, ConfigError, CorpusError, ModelError
from dmsae.evaluation.cities import ATTRIBUTES, Attribute, Cities, CitiesConfig, known_cities, read_cities
from dmsae.evaluation.disentanglement import DisentanglementConfig, measure, score_cities
from dmsae.evaluation.logistic import Logistic
from dmsae.evaluation.subject import Subject
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE
from dmsae.text import assets

N_VALUES = 3
CONFIG = DisentanglementConfig(steps=60, batch_pairs=64, n_test_pairs=200)


def sae_of(rows_KD: Tensor, bias: float = 0.0) -> SAE:
    """An SAE that encodes and decodes with these rows."""
    width, d_model = rows_KD.shape
    sae = SAE(SAEConfig(d_model=d_model, width=width, k=1, prefixes=(width,)))
    with torch.no_grad():
        sae.W_enc_noncore.copy_(rows_KD)
        sae.W_dec.copy_(rows_KD)
        sae.b_enc.fill_(bias)
    return sae


@pytest.fixture
def cities() -> Cities:
    """Two attributes of three values, each value a dimension of its own."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randint(N_VALUES, (2, 120), generator=draw)
    x = torch.cat([F.one_hot(values[0], N_VALUES), F.one_hot(values[1], N_VALUES)], dim=1).float()
    x = x + 0.01 * torch.randn(x.shape, generator=draw)
    attributes = []
    for i in (0, 1):
        w = torch.zeros(N_VALUES, 2 * N_VALUES, dtype=torch.float64)
        w[:, i * N_VALUES : (i + 1) * N_VALUES] = 4 * torch.eye(N_VALUES)
        probe = Logistic(w, torch.zeros(N_VALUES, dtype=torch.float64))
        attributes.append(Attribute(f"attribute {i}", ["a", "b", "c"], values[i], probe))
    return Cities([str(i) for i in range(120)], x, torch.arange(120) < 70, attributes)


def test_a_latent_for_each_value_disentangles_attributes(cities: Cities) -> None:
    result = score_cities(sae_of(torch.eye(6)), cities, CONFIG)
    assert result.cause == result.isolation == result.score == 1
    for attribute in result.attributes:
        assert attribute.n_latents == N_VALUES
        assert attribute.probe_accuracy == attribute.untouched == 1


def test_a_latent_for_each_combination_cannot_disentangle(cities: Cities) -> None:
    """Whatever is exchanged carries both attributes: what is gained in cause is lost in isolation."""
    combinations = torch.stack(
        [F.one_hot(torch.tensor([a, N_VALUES + b]), 6).sum(0) for a in range(3) for b in range(3)]
    )
    result = score_cities(sae_of(combinations.float() / 2**0.5, bias=-1.0), cities, CONFIG)
    assert result.score < 0.75
    assert result.cause + result.isolation < 1.5


def test_exchanging_nothing_keeps_everything_and_causes_nothing(cities: Cities) -> None:
    """A mask that never moves from where it begins exchanges no latent of a perfect reconstruction."""
    result = score_cities(sae_of(torch.eye(6)), cities, replace(CONFIG, lr=1e-300))
    assert (result.cause, result.isolation, result.score) == (0, 1, 0.5)
    assert all(attribute.n_latents == 0 for attribute in result.attributes)


def test_latents_that_never_fire_are_not_exchanged(cities: Cities) -> None:
    result = score_cities(sae_of(torch.eye(6), bias=-100.0), cities, CONFIG)
    for attribute in result.attributes:
        assert attribute.n_latents == 0
        assert attribute.isolation == attribute.untouched < 0.6, "reconstructions are all alike"


def test_an_attribute_that_no_probe_reads_is_an_error(cities: Cities) -> None:
    blind = cities.attributes[0]._replace(probe=Logistic(*(torch.zeros_like(t) for t in cities.attributes[0].probe)))
    with pytest.raises(ModelError, match="A probe reads the attribute 0 of"):
        score_cities(sae_of(torch.eye(6)), cities._replace(attributes=[blind, cities.attributes[1]]), CONFIG)


@pytest.fixture
def world() -> None:
    """An asset of 60 cities in four countries of two continents, where the tests keep assets."""
    folder = assets.location(assets.find("cities"))
    folder.mkdir(parents=True)
    countries = {
        code: {"name": name, "continentcode": continent, "languages": languages}
        for code, name, continent, languages in (
            ("AA", "Aland", "EU", "aa-AA,bb"),
            ("BB", "Bland", "EU", "bb"),
            ("CC", "Cland", "AS", "aa"),
            ("DD", "Dland", "AS", "cc-DD"),
        )
    }
    cities = {
        str(i): {
            "geonameid": i,
            "name": f"w{i}",
            "countrycode": "ABCD"[i % 4] * 2,
            "population": 1000 - i,
            "timezone": f"Zone/{i % 2}",
        }
        for i in range(60)
    }
    cities["60"] = {**cities["0"], "geonameid": 60, "population": 1, "countrycode": "BB"}
    for name, content in (("cities", cities), ("countries", countries), (ASSET_MANIFEST[:-5], {})):
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf8")


@pytest.mark.usefixtures("world")
def test_the_most_populous_cities_are_taken_and_the_larger_of_a_name() -> None:
    cities = read_cities(CitiesConfig(n_cities=6, max_per_country=2))
    assert [city.name for city in cities] == ["w0", "w1", "w2", "w3", "w4", "w5"]
    assert cities[0] == ("w0", "Aland", "EU", "aa", "Zone/0")
    assert read_cities(CitiesConfig(n_cities=60))[0].country == "Aland"
    with pytest.raises(CorpusError, match=r"There are 8 cities with at most 2 of a country"):
        read_cities(CitiesConfig(n_cities=60, max_per_country=2))


@pytest.mark.usefixtures("world")
def test_measure_is_the_same_with_and_without_a_cache(tiny_model: Path, tmp_path: Path) -> None:
    model = BaseModel.load(ModelConfig(name=str(tiny_model), hook=0, device="cpu"))
    cities = CitiesConfig(n_cities=60, min_per_value=5, template="w1 {city}", probe_c=1e4)
    config = DisentanglementConfig(cities=cities, steps=5, batch_pairs=16, n_test_pairs=30)
    subjects = [
        Subject(f"seed {seed}", SAE.init(SAEConfig(16, 32, 4, (32,)), torch.Generator().manual_seed(seed)))
        for seed in (0, 1)
    ]
    without = measure(subjects, model, config)
    cold = measure(subjects, model, config, tmp_path / "cache2")
    warm = measure(subjects, model, config, tmp_path / "cache2")
    assert without == cold == warm
    assert tuple(attribute.attribute for attribute in without[0].attributes) == ATTRIBUTES
    assert "probes" in without[0].read_by
    (alone,) = measure(subjects[1:], model, config)
    assert alone == without[1]


@pytest.mark.usefixtures("world")
def test_values_that_few_cities_share_are_left_out(tiny_model: Path) -> None:
    model = BaseModel.load(ModelConfig(name=str(tiny_model), hook=0, device="cpu"))
    config = CitiesConfig(n_cities=60, min_per_value=16, template="w1 {city}")
    with pytest.raises(CorpusError, match="Fewer than two values of country"):
        known_cities(model, config)


def test_the_asset_is_asked_for_by_name() -> None:
    with pytest.raises(AssetError, match="The facts 'cities' is not in"):
        read_cities(CitiesConfig())


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"end in \{city\}"):
        CitiesConfig(template="{city} is nice")
    with pytest.raises(ConfigError, match=r"disentanglement\.steps"):
        DisentanglementConfig(steps=0)


@pytest.mark.real
def test_the_bundled_facts_hold_the_largest_cities() -> None:
    cities = {city.name: city for city in read_cities(CitiesConfig())}
    assert cities["Tokyo"][1:] == ("Japan", "AS", "ja", "Asia/Tokyo")
    assert cities["São Paulo"].country == "Brazil"
