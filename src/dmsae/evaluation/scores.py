"""What an evaluation found: results by measure and subject, and every score held against its nulls."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from dmsae import __version__
from dmsae.config import Json, from_dict, to_dict
from dmsae.disk import layout
from dmsae.disk.artifact import read_sealed, write_sealed
from dmsae.errors import CheckpointError, ConfigError
from dmsae.evaluation.beside import ScoreRow
from dmsae.evaluation.measures import MEASURES, Score


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was measured, as `evaluation.json` holds it."""

    store: str
    """Key of the store."""
    model: Json
    subjects: dict[str, Json]
    """By name: `digest`, `config`, for a null `null_of` and `null_kind`, for an SAE `nulls_from`: the SAE whose nulls
    it is compared with."""
    measures: dict[str, Json]
    """By name: `version`, `settings`, `seconds`, `results` by subject, and `files` if it read any of the user's: the
    SHA-256 of each."""
    not_run: dict[str, str]
    """Why a measure did not run."""
    nulls_not_made: dict[str, str] = field(default_factory=dict)
    """Why a null could not be made, by its name among the subjects."""
    version: str = __version__

    def saes(self) -> list[str]:
        """Return the names of the subjects that are no nulls."""
        return [name for name, subject in self.subjects.items() if not subject["null_of"]]

    def rows(self) -> list[ScoreRow]:
        """Return every score of every SAE beside its nulls."""
        return [
            self._row(sae, measure, score)
            for measure, measured in self.measures.items()
            if measure in MEASURES
            for score in MEASURES[measure].shown(measured["settings"])
            for sae in self.saes()
        ]

    def notes(self, measures: Collection[str] = ()) -> list[str]:
        """Return what a reader of the scores has to know: why nulls could not be made, caveats, and why an SAE has no
        score; of all measures, or only of those named."""
        notes = self._without_null()
        for name in self.measures:
            if name in MEASURES and (not measures or name in measures):
                notes += [f"{name}: {caveat}." for caveat in [MEASURES[name].caveat] if caveat]
                notes += self._without_score(name)
        return notes

    def _without_null(self) -> list[str]:
        """Return a sentence for each kind of null that could not be made and each reason, which names the SAEs that
        are compared with it."""
        without: dict[tuple[str, str], list[str]] = {}
        for name, reason in self.nulls_not_made.items():
            null = self.subjects[name]
            without.setdefault((null["null_kind"], reason), []).extend(self._compared_with(null["null_of"]))
        return [
            f"The null {kind} of {', '.join(saes)} could not be made. {reason}"
            for (kind, reason), saes in without.items()
        ]

    def _compared_with(self, owner: str) -> list[str]:
        """Return the SAEs that are compared with the nulls of one of them."""
        return [sae for sae in self.saes() if self._owner(sae) == owner]

    def _owner(self, sae: str) -> str:
        return str(self.subjects[sae].get("nulls_from", sae))

    def _without_score(self, measure: str) -> list[str]:
        """Return a sentence for each reason why SAEs have no score, which names them."""
        measured = self.measures[measure]
        without: dict[str, list[str]] = {}
        for sae in self.saes():
            reason = MEASURES[measure].why_no_score(measured["results"][sae], measured["settings"])
            without.setdefault(reason, []).append(sae)
        return [f"{measure} has no score of {', '.join(saes)}: {reason}." for reason, saes in without.items() if reason]

    def _row(self, sae: str, measure: str, score: Score) -> ScoreRow:
        results = self.measures[measure]["results"]
        nulls = {
            str(subject["null_kind"]): look_up(results[name], score.figure)
            for name, subject in self.subjects.items()
            if subject["null_of"] == self._owner(sae) and name in results
        }
        if score.null:
            nulls["own"] = look_up(results[sae], score.null)
        value, ceiling = look_up(results[sae], score.figure), _ceiling(score, results[sae])
        return ScoreRow.of(sae, measure, score.figure, value, nulls, ceiling, score.better)

    def save(self, directory: Path) -> None:
        """Write `evaluation.json`."""
        scores = [row._asdict() for row in self.rows()]
        write_sealed(directory / layout.EVALUATION, {**to_dict(self), "scores": scores})

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Return the evaluation in a directory."""
        path = directory / layout.EVALUATION
        if not path.is_file():
            raise CheckpointError(f"{directory} holds no evaluation. Give the --out directory of a 'dmsae evaluate'.")
        values = read_sealed(path, "Run 'dmsae evaluate' again.")
        values.pop("scores", None)
        try:
            return from_dict(cls, values)
        except ConfigError as error:
            raise CheckpointError(f"{path} is not an evaluation: {error} Run 'dmsae evaluate' again.") from error


def as_json(result: Any) -> Any:
    """Return a result as JSON values: NamedTuples by field, and None for what is not a finite number."""
    if isinstance(result, tuple) and hasattr(result, "_asdict"):
        return {name: as_json(value) for name, value in result._asdict().items()}
    if isinstance(result, Mapping):
        return {str(name): as_json(value) for name, value in result.items()}
    if isinstance(result, list | tuple):
        return [as_json(value) for value in result]
    if isinstance(result, float) and not math.isfinite(result):
        return None
    return to_dict(result)


def look_up(result: Json, place: str) -> float | None:
    """Return the number in a result at a place such as `fve` or `accuracy.5`; None where there is none."""
    value: Any = result
    for part in place.split("."):
        if isinstance(value, list):
            value = value[int(part)] if int(part) < len(value) else None
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) else None


def _ceiling(score: Score, result: Json) -> float | None:
    return look_up(result, score.ceiling) if isinstance(score.ceiling, str) else score.ceiling
