"""Whether evaluations can be put together: there are some, of one store, with the same settings of what is compared."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from dmsae.config import Json
from dmsae.errors import ConfigError
from dmsae.evaluation.scores import Evaluation

NO_MATTER = frozenset(
    {
        "activity.bins_per_decade",
        "splice.batch_contexts",
        "detection.judge.key_variable",
        "detection.judge.timeout_seconds",
        "detection.judge.tries",
        "detection.judge.pause_seconds",
        "detection.judge.workers",
    }
)
"""Settings that change no score: bins of a histogram, how much is done at once, how a judge is reached."""


def require_one_store(evaluations: Mapping[str, Evaluation]) -> None:
    """Raise unless evaluations, by the names of their directories, are of one store."""
    if not evaluations:
        raise ConfigError("No evaluations were given. Give the --out directories of one or more 'dmsae evaluate'.")
    if len(stores := sorted({one.store for one in evaluations.values()})) != 1:
        raise ConfigError(
            f"The evaluations are of {len(stores)} stores ({', '.join(stores)}): their scores cannot be compared. "
            "Evaluate all SAEs on one, with --store."
        )


def require_same_settings(evaluations: Mapping[str, Evaluation], measures: Collection[str]) -> None:
    """Raise unless these measures ran in one version and with the same settings in every evaluation that has them."""
    for measure in measures:
        (first, expected), *others = (
            (place, dict(_flat(measure, _settings(one.measures[measure]))))
            for place, one in evaluations.items()
            if measure in one.measures
        )
        for place, settings in others:
            for name in dict.fromkeys([*expected, *settings]):
                here, there = (values.get(name, "not a setting") for values in (expected, settings))
                if here != there and name not in NO_MATTER:
                    raise ConfigError(
                        f"{name} is {here!r} in {first} and {there!r} in {place}: their scores cannot be compared. "
                        "Evaluate all SAEs again with the same settings, or name scores of other measures with "
                        "--scores."
                    )


def _settings(measured: Json) -> Json:
    """Return all that the scores of a measure depend on, besides SAEs and store; old evaluations have no version."""
    files = {"files": measured["files"]} if "files" in measured else {}
    return {"version": measured.get("version", "not known"), **measured["settings"], **files}


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every setting under its dotted name."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    else:
        yield name, value
