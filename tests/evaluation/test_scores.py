"""Scores: what tables show of a result, the null to beat, the part of the way, and what a reader has to know."""

from pathlib import Path
from typing import NamedTuple

import pytest

from dmsae.config import Json, to_dict
from dmsae.evaluation.beside import Better, part_of_the_way, strongest
from dmsae.evaluation.concept_removal import ConceptRemovalConfig
from dmsae.evaluation.measures import MEASURES
from dmsae.evaluation.probing import ProbingConfig
from dmsae.evaluation.scores import Evaluation, as_json, look_up


class Toy(NamedTuple):
    size: float
    best: float


@pytest.mark.parametrize(
    ("nulls", "ceiling", "better", "expected"),
    [
        ((0.91, 0.87), 0.88, "", 0.91),
        ((0.3, 0.2), 1.0, "", 0.3),
        ((0.3, 0.2), 0.0, "", 0.2),
        ((0.3, 0.2), None, "lower", 0.2),
        ((0.3, 0.2), None, "higher", 0.3),
        ((0.3, 0.2), None, "", None),
        ((None, 0.2), 1.0, "", 0.2),
        ((None,), 1.0, "", None),
    ],
)
def test_the_null_to_beat_is_the_best_even_above_a_measured_ceiling(
    nulls: tuple[float | None, ...], ceiling: float | None, better: Better, expected: float | None
) -> None:
    assert strongest({str(i): null for i, null in enumerate(nulls)}, ceiling, better) == expected


@pytest.mark.parametrize(
    ("measure", "settings", "figures"),
    [
        ("probing", {}, ["accuracy.1", "accuracy.2", "accuracy.5", "accuracy.20"]),
        ("probing", to_dict(ProbingConfig(k=(10, 1, 10))), ["accuracy.10", "accuracy.1"]),
        ("concept_removal", to_dict(ConceptRemovalConfig()), ["scr.20", "tpp.20"]),
        ("concept_removal", to_dict(ConceptRemovalConfig(n_ablated=(5, 50))), ["scr.5", "scr.50", "tpp.5", "tpp.50"]),
    ],
)
def test_tables_show_the_figures_that_were_asked_for(measure: str, settings: Json, figures: list[str]) -> None:
    result = {
        name: {"5": 0.5, "10": 0.6, "20": 0.7, "50": 0.8, "1": 0.3, "2": 0.4} for name in ("accuracy", "scr", "tpp")
    }
    facts = {"digest": "", "config": {}, "null_of": "", "null_kind": ""}
    measured = {"settings": settings, "seconds": 1.0, "results": {"a": result}}
    rows = Evaluation("abc", {}, {"a": facts}, {measure: measured}, {}).rows()
    assert [row.figure for row in rows] == figures
    assert all(row.score is not None for row in rows)


def test_scores_come_with_caveats_and_with_reasons_why_there_are_none() -> None:
    facts = {"digest": "", "config": {}, "null_of": "", "null_kind": ""}
    letters = {"a": {"n_letters": 0}, "b": {"n_letters": 3}, "c": {"n_letters": 0}}
    measures = {
        "fidelity": {"settings": {}, "results": {name: {} for name in letters}},
        "absorption": {"settings": to_dict(MEASURES["absorption"].config()), "results": letters},
        "concept_removal": {"settings": {}, "results": {name: {} for name in letters}},
    }
    made = Evaluation("abc", {}, dict.fromkeys(letters, facts), measures, {})
    absorption, without, removal = made.notes()
    assert absorption.startswith("absorption: meant for models of at least 1B parameters")
    assert without.startswith("absorption has no score of a, c: no letter's dense probe")
    assert removal == "concept_removal: unreliable, as SAEBench's audit found (arXiv 2605.18229)."
    assert made.notes(["concept_removal"]) == [removal]
    assert made.notes(["fidelity"]) == []


def test_the_scores_of_a_measure_are_those_under_its_defaults() -> None:
    assert all(measure.shown(to_dict(measure.config())) == measure.scores for measure in MEASURES.values())


def test_results_become_json() -> None:
    result = Toy(float("nan"), 2.0)
    assert as_json({"a": (result, [1, None]), 5: Path("x")}) == {
        "a": [{"size": None, "best": 2.0}, [1, None]],
        "5": "x",
    }


def test_figures_are_found_in_results() -> None:
    result = {"fve": 0.5, "by_k": {"1": {"accuracy": [0.1, 0.2]}}, "none": None, "text": "x"}
    assert look_up(result, "fve") == 0.5
    assert look_up(result, "by_k.1.accuracy.1") == 0.2
    for place in ("by_k.1.accuracy.2", "by_k.2.accuracy.0", "none", "nothing.here", "text", "fve.0"):
        assert look_up(result, place) is None


def test_the_part_of_the_way() -> None:
    assert part_of_the_way(0.75, 0.5, 1.0) == 0.5
    assert part_of_the_way(0.25, 0.5, 0.0) == 0.5, "where lower is better, the ceiling is low"
    assert part_of_the_way(0.4, 0.5, 1.0) == pytest.approx(-0.2), "worse than the null"
    assert part_of_the_way(0.5, 1.0, 1.0) is None
    assert part_of_the_way(None, 0.5, 1.0) is None
