"""Settings come back as they were written, and a wrong one is named."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsae.activations.base_model import ModelConfig
from dmsae.activations.request import HarvestConfig
from dmsae.commands.recipes import read_sections
from dmsae.config import from_dict, read_recipe, recipe_names, require_whole, take_choice, to_dict
from dmsae.errors import ConfigError
from dmsae.sae.config import DenseCore, SAEConfig, SparseCore
from dmsae.text.corpus import HubText, TextConfig
from dmsae.text.tokens import TokenConfig
from dmsae.training.config import TrainConfig


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner:
    needed: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer:
    inner: Inner
    rate: float = 0.5
    colour: Colour = Colour.RED
    mode: Literal["fast", "slow"] = "fast"
    where: Path | None = None
    flag: bool = False
    many: tuple[Inner, ...] = field(default=())


harvest_configs = st.builds(
    HarvestConfig,
    model=st.builds(ModelConfig, name=st.text(max_size=5), hook=st.one_of(st.integers(0, 99), st.text(max_size=5))),
    text=st.builds(
        TextConfig,
        exclude=st.lists(st.text(max_size=4), max_size=3).map(tuple),
        hub=st.builds(HubText, subset=st.text(max_size=4)),
    ),
    tokens=st.builds(TokenConfig, context_length=st.integers(2, 64), prepend_bos=st.sampled_from([None, True, False])),
    train_tokens=st.integers(1, 10**12),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    max_norm_ratio=st.one_of(st.none(), st.floats(1.5, 1e6)),
)


@given(harvest_configs)
def test_harvest_config_round_trips(config: HarvestConfig) -> None:
    assert from_dict(HarvestConfig, to_dict(config)) == config


@pytest.mark.parametrize("core", [None, DenseCore(4, k_noncore=2), SparseCore(4)])
def test_either_kind_of_core_round_trips(core: DenseCore | SparseCore | None) -> None:
    config = SAEConfig(d_model=8, width=32, k=3, prefixes=(8, 32), core=core)
    assert from_dict(SAEConfig, to_dict(config)) == config


def test_nested_enum_path_and_tuples_round_trip() -> None:
    config = Outer(Inner(1, ("a",)), 1.5, Colour.BLUE, "slow", Path("x"), True, (Inner(2), Inner(3)))
    plain = to_dict(config)
    assert plain["colour"] == "blue"
    assert plain["where"] == "x"
    assert from_dict(Outer, plain) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"inner": {"needed": 1}, "rat": 1.0}, r"Unknown setting rat\. Did you mean 'rate'"),
        ({"inner": {"needed": 1, "nmes": []}}, r"inner\.nmes.*Did you mean 'names'"),
        ({"inner": {}}, r"Inner needs inner\.needed"),
        ({}, r"Outer needs inner"),
        ({"inner": 3}, r"inner = 3 is of type int"),
        ({"inner": {"needed": "1"}}, r"inner\.needed = '1' is of type str"),
        ({"inner": {"needed": True}}, r"inner\.needed = True is of type bool"),
        ({"inner": {"needed": 1, "names": "ab"}}, r"inner\.names = 'ab' is of type str"),
        ({"inner": {"needed": 1, "names": ["a", 1]}}, r"inner\.names\[1\] = 1 is of type int"),
        ({"inner": {"needed": 1}, "rate": "x"}, r"rate = 'x' is of type str"),
        ({"inner": {"needed": 1}, "flag": 1}, r"flag = 1 is of type int"),
        ({"inner": {"needed": 1}, "colour": "bleu"}, r"colour = 'bleu' is not allowed\. Did you mean 'blue'"),
        ({"inner": {"needed": 1}, "mode": "fsat"}, r"mode = 'fsat' is not allowed\. Did you mean 'fast'"),
        ({"inner": {"needed": 1}, "where": 3}, r"where = 3 is not one of"),
        ({"inner": {"needed": 1}, "many": [{"needed": 1}, {"need": 2}]}, r"many\[1\]\.need\b"),
    ],
)
def test_wrong_settings_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_dict(Outer, values)


def test_a_value_where_a_table_belongs_is_named() -> None:
    with pytest.raises(ConfigError, match="harvest = 3 is not a table"):
        from_dict(HarvestConfig, cast(Mapping[str, Any], 3), "harvest.")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_tokens": -1}, "train_tokens = -1"),
        (
            {"train_tokens": 0, "heldout_tokens": 0, "pair_tokens": 0},
            r"train_tokens \+ heldout_tokens \+ pair_tokens = 0",
        ),
        ({"batch_contexts": 0}, "batch_contexts = 0"),
        ({"shard_tokens": 100}, "shard_tokens = 100"),
        ({"max_norm_ratio": 1.0}, "max_norm_ratio = 1.0"),
        ({"tokens": {"context_length": 1}}, "context_length = 1"),
        ({"text": {"heldout_fraction": 0.0}}, "heldout_fraction = 0.0"),
        ({"text": {"shuffle_chars": 0}}, "shuffle_chars = 0"),
    ],
)
def test_impossible_harvests_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_dict(HarvestConfig, settings)


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_parse(name: str) -> None:
    settings = read_recipe(name)
    configs = read_sections(name)._asdict()
    assert settings
    for section, values in settings.items():
        plain = to_dict(configs[section])
        assert from_dict(type(configs[section]), plain) == configs[section]
        assert_holds(plain, values)


def assert_holds(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Check that every setting in `part` has the same value in `whole`."""
    for key, value in part.items():
        if isinstance(value, dict):
            assert_holds(whole[key], value)
        else:
            assert whole[key] == value


def test_an_unknown_section_of_a_recipe_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("[harvset]\ntrain_tokens = 5\n")
    with pytest.raises(ConfigError, match=r"unknown section 'harvset'\. Did you mean 'harvest'"):
        read_sections(str(tmp_path / "own.toml"))


def test_recipes_are_found_by_name_or_path(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text("[harvest]\ntrain_tokens = 5\n")
    assert read_recipe(str(own)) == {"harvest": {"train_tokens": 5}}
    with pytest.raises(ConfigError, match="Did you mean 'demo'"):
        read_recipe("dmeo")
    with pytest.raises(ConfigError, match=r"no recipe file .*absent\.toml"):
        read_recipe(str(tmp_path / "absent.toml"))
    own.write_text("[harvest\n")
    with pytest.raises(ConfigError, match=r"own\.toml is not valid TOML"):
        read_recipe(str(own))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = '\xff'", "cannot be read as UTF-8"),
        (b"a = " + b"[" * 100_000, "nested too deeply"),
        (b"a = " + b"9" * 10_000, "not valid TOML"),
        (b"#" * 2_000_000, "not a recipe"),
    ],
)
def test_hostile_recipes_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "mine.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"mine\.toml .*{message}"):
        read_recipe(str(tmp_path / "mine.toml"))


def test_numbers_that_cannot_be_counted_to_are_refused() -> None:
    with pytest.raises(ConfigError, match="n is larger than"):
        require_whole("n", 10**400, 1)
    with pytest.raises(ConfigError, match="lr is too large"):
        from_dict(TrainConfig, {"lr": 10**400})


@dataclass(frozen=True, slots=True)
class Painted:
    one: Any = Colour.RED
    several: Any = ()

    def __post_init__(self) -> None:
        for name in ("one", "several"):
            take_choice(self, name, Colour)


def test_a_choice_may_be_given_as_its_value() -> None:
    painted = Painted("blue", ("red", Colour.BLUE))
    assert painted == Painted(Colour.BLUE, (Colour.RED, Colour.BLUE))
    assert isinstance(painted.one, Colour)
    assert all(isinstance(one, Colour) for one in painted.several)


@pytest.mark.parametrize("settings", [{"one": "green"}, {"several": ("red", "green")}, {"one": ["red"]}])
def test_what_is_no_choice_is_refused_with_those_there_are(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="it must be one of red, blue"):
        Painted(**settings)
