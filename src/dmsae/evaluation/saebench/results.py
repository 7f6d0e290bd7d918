"""What SAEBench found, read back from the files that its plotting reads."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dmsae.config import Json, to_dict
from dmsae.disk import layout
from dmsae.disk.files import write_json
from dmsae.errors import BenchmarkError
from dmsae.evaluation.beside import ScoreRow
from dmsae.evaluation.saebench.evals import EVALS, Figure
from dmsae.evaluation.saebench.job import Job, JobSAE

_REQUIRED = (
    "eval_type_id",
    "eval_config",
    "eval_id",
    "datetime_epoch_millis",
    "eval_result_metrics",
    "eval_result_details",
    "sae_bench_commit_hash",
    "sae_lens_id",
    "sae_lens_release_id",
    "sae_lens_version",
    "sae_cfg_dict",
)
"""What the package's schema asks of every result."""

State = Literal["done", "kept", "failed", "not run"]


class Outcome(NamedTuple):
    """How one eval of one SAE ended."""

    eval: str
    sae: str
    state: State
    figures: dict[str, float]
    """Headline figures by name; empty unless there is a result."""
    seconds: float
    reason: str = ""
    """Why there is no result."""


@dataclass(frozen=True, slots=True)
class Summary:
    """All outcomes of a run, as `summary.json` holds them."""

    model: Json
    settings: Json
    """The settings of each eval that was asked for."""
    outcomes: list[Outcome] = field(default_factory=list)
    nulls: dict[str, dict[str, str]] = field(default_factory=dict)
    """For each SAE that has nulls beside it, the name of that of each kind."""
    nulls_not_made: dict[str, str] = field(default_factory=dict)
    """Why a null could not be made, by its name."""

    def figures(self, eval_name: str, sae: str) -> dict[str, float]:
        """Return the headline figures of an SAE or null; empty unless there is a result."""
        found = (one.figures for one in self.outcomes if (one.eval, one.sae) == (eval_name, sae))
        return next(found, {})

    def of_saes(self) -> list[Outcome]:
        """Return the outcomes of all SAEs that are not nulls."""
        nulls = {name for beside in self.nulls.values() for name in beside.values()}
        return [outcome for outcome in self.outcomes if outcome.sae not in nulls]

    def rows(self) -> list[ScoreRow]:
        """Return every headline figure of every SAE beside its nulls."""
        return [self._row(outcome, name) for outcome in self.of_saes() for name in outcome.figures]

    def _row(self, outcome: Outcome, name: str) -> ScoreRow:
        figure = EVALS[outcome.eval].figures.get(name, Figure())
        beside = self.nulls.get(outcome.sae, {})
        nulls = {kind: self.figures(outcome.eval, null).get(name) for kind, null in beside.items()}
        ceiling = outcome.figures.get(figure.ceiling) if isinstance(figure.ceiling, str) else figure.ceiling
        return ScoreRow.of(outcome.sae, outcome.eval, name, outcome.figures[name], nulls, ceiling, figure.better)

    def not_run(self) -> dict[str, str]:
        """Return, for each eval without any result, why."""
        ended: dict[str, str] = {}
        for outcome in self.outcomes:
            if outcome.state in ("failed", "not run"):
                ended.setdefault(outcome.eval, outcome.reason)
        with_result = {outcome.eval for outcome in self.outcomes if outcome.figures}
        return {name: reason for name, reason in ended.items() if name not in with_result}

    def has_results(self) -> bool:
        """Return whether any eval gave a result."""
        return any(outcome.state in ("done", "kept") for outcome in self.outcomes)

    def save(self, out: Path) -> None:
        """Write `summary.json`."""
        outcomes, scores = ([one._asdict() for one in of] for of in (self.outcomes, self.rows()))
        facts = {**to_dict(self), "outcomes": outcomes, "scores": scores, "not_run": self.not_run()}
        write_json(out / layout.SUMMARY, facts)


def read_figures(job: Job, sae: JobSAE) -> dict[str, float]:
    """Return the headline figures of a result, after checking that it is one of this eval and SAE."""
    path = job.result(sae)
    result, record = _read(path), _read(job.record(sae))
    if missing := [key for key in _REQUIRED if key not in result]:
        raise BenchmarkError(f"{path} is not a result of SAEBench: it lacks {', '.join(missing)}. Remove it.")
    if result["sae_lens_release_id"] != sae.name:
        raise BenchmarkError(f"{path} is the result of {result['sae_lens_release_id']!r}, not of {sae.name!r}.")
    metrics, known = result["eval_result_metrics"], EVALS[job.eval].figures
    figures = {name: _number(metrics, figure.place) for name, figure in known.items() if figure.place}
    figures |= record.get("figures", {})
    return {name: value for name, value in figures.items() if value is not None}


def is_kept(job: Job, sae: JobSAE) -> bool:
    """Return whether there is a result that was made from the same SAE, model and settings."""
    if job.how.force or not (job.result(sae).is_file() and job.record(sae).is_file()):
        return False
    return bool(_read(job.record(sae)).get("key") == job.key(sae))


def _read(path: Path) -> Json:
    try:
        values: Json = json.loads(path.read_text(encoding="utf8"))
        values.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise BenchmarkError(f"{path} cannot be read: {error}. Remove it and run the same command again.") from error
    return values


def _number(metrics: Json, place: str) -> float | None:
    """Return the number at a dotted place; None where the package has put none."""
    value: Any = metrics
    for part in place.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable else None
