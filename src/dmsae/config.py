"""Configs are frozen dataclasses; this is how they are validated, become JSON, and come back from TOML.

Reading is strict: an unknown key or a value of another type is an error that names the field.
"""

import dataclasses
import tomllib
import types
from collections.abc import Mapping
from enum import Enum
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dmsae.errors import ConfigError, first_line, nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


Json = dict[str, Any]
"""A JSON object whose shape is checked by whoever reads it."""
_LARGEST = 2**64
"""No count, size or seed is larger."""
_RECIPE_BYTES = 1 << 20


def require(holds: bool, name: str, value: object, must: str, remedy: str = "") -> None:
    """Raise a `ConfigError` in the one form that all of them have, unless a setting is as it must be."""
    if not holds:
        shown = value.value if isinstance(value, Enum) else value
        raise ConfigError(f"{name} = {shown!r}; it must {must}.{' ' if remedy else ''}{remedy}")


def require_whole(name: str, value: object, low: int) -> None:
    """Raise unless a setting is a whole number that is large enough, and not so large that no arithmetic holds it."""
    if type(value) is int and value > _LARGEST:
        raise ConfigError(f"{name} is larger than {_LARGEST:.0e}; it must be a whole number that can be counted to.")
    require(type(value) is int and value >= low, name, value, f"be a whole number of at least {low}")


def take_choice(config: object, name: str, choices: type[Enum]) -> None:
    """Make a setting of a frozen config, given as a member of an enum or as its value, the member; raise if it is none.

    A setting that is a tuple has several.
    """
    value = getattr(config, name)
    known = [one.value for one in choices]
    for one in value if isinstance(value, tuple) else (value,):
        require(one in known, name, value, f"be one of {', '.join(map(str, known))}")
    chosen = tuple(map(choices, value)) if isinstance(value, tuple) else choices(value)
    object.__setattr__(config, name, chosen)


def to_dict(config: Any) -> Any:
    """Return a config as plain JSON values."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: to_dict(getattr(config, field.name)) for field in dataclasses.fields(config)}
    if isinstance(config, Enum):
        return config.value
    if isinstance(config, Path):
        return str(config)
    if isinstance(config, tuple | list):
        return [to_dict(item) for item in config]
    if isinstance(config, Mapping):
        return {key: to_dict(value) for key, value in config.items()}
    return config


def from_dict(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Build a config dataclass from plain values; keys that are left out take the defaults."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where.rstrip('.')} = {values!r} is not a table of settings for {cls.__name__}.")
    hints = get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls) if field.init]
    for key in values:
        if key not in known:
            raise ConfigError(f"Unknown setting {where}{key}. {nearest(key, known)}")
    built = {key: _convert(hints[key], value, f"{where}{key}") for key, value in values.items()}
    try:
        return cls(**built)
    except TypeError as error:
        missing = [
            field.name
            for field in dataclasses.fields(cls)
            if field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
            and field.name not in built
        ]
        raise ConfigError(f"{cls.__name__} needs {where}{', '.join(missing)}.") from error


def _convert(hint: Any, value: Any, name: str) -> Any:
    """Return `value` as the type that `hint` asks for, or raise a `ConfigError` that names the field."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        for option in get_args(hint):
            try:
                return _convert(option, value, name)
            except ConfigError:
                continue
        raise ConfigError(f"{name} = {value!r} is not one of {hint}.")
    if origin is Literal:
        if value in get_args(hint):
            return value
        raise ConfigError(f"{name} = {value!r} is not allowed. {nearest(str(value), map(str, get_args(hint)))}")
    if origin in (tuple, list) and isinstance(value, list | tuple):
        inner = get_args(hint)[0]
        return origin(_convert(inner, item, f"{name}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, Mapping):
        of_key, of_value = get_args(hint)
        return {_convert(of_key, key, name): _convert(of_value, item, f"{name}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
        return from_dict(hint, value, f"{name}.")
    return _convert_scalar(hint, value, name)


def _convert_scalar(hint: Any, value: Any, name: str) -> Any:
    if hint is Any or (hint is type(None) and value is None):
        return value
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(value)
        except ValueError:
            known = nearest(str(value), (str(member.value) for member in hint))
            raise ConfigError(f"{name} = {value!r} is not allowed. {known}") from None
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{name} is too large a number.") from None
    if isinstance(hint, type) and isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool):
        return value
    raise ConfigError(
        f"{name} = {value!r} is of type {type(value).__name__}; expected {getattr(hint, '__name__', hint)}."
    )


def recipe_names() -> list[str]:
    """Return the names of the recipes that ship with the package."""
    folder = resources.files("dmsae") / "recipes"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read_recipe(recipe: str) -> dict[str, Any]:
    """Return the settings in a TOML recipe: the name of one that ships with the package, or a path."""
    path = Path(recipe)
    if path.suffix == ".toml":
        if not path.is_file():
            raise ConfigError(f"There is no recipe file {path}. Shipped recipes: {', '.join(recipe_names())}.")
        text = _read_text(path)
    elif recipe in recipe_names():
        text = (resources.files("dmsae") / "recipes" / f"{recipe}.toml").read_text(encoding="utf8")
    else:
        raise ConfigError(
            f"Unknown recipe {recipe!r}. {nearest(recipe, recipe_names())} A recipe of your own is given by its "
            "path, ending in .toml."
        )
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ConfigError(f"Recipe {recipe} is nested too deeply.") from error
    except ValueError as error:  # of which TOMLDecodeError is one, and a number of too many digits another
        raise ConfigError(f"Recipe {recipe} is not valid TOML: {first_line(error)}.") from error


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > _RECIPE_BYTES:
            raise ConfigError(f"Recipe {path} has more than {_RECIPE_BYTES:,} bytes: it is not a recipe.")
        return path.read_text(encoding="utf8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Recipe {path} cannot be read as UTF-8 text: {first_line(error)}.") from error
