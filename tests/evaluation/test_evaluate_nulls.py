"""A null that cannot be made costs an evaluation that null alone, and is tried again when the evaluation is resumed."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from dictionaries import random_sae
from dmsae.activations.importing import import_store
from dmsae.activations.store import Store
from dmsae.commands.evaluate import print_scores
from dmsae.disk import layout
from dmsae.disk.artifact import read_sealed, write_sealed
from dmsae.evaluation.beside import ScoreRow
from dmsae.evaluation.evaluate import EvaluateConfig, evaluate
from dmsae.evaluation.measures import MEASURES
from dmsae.evaluation.nulls import NullKind
from dmsae.evaluation.scores import Evaluation
from dmsae.sae.config import SAEConfig
from planted import planted_store

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = SAEConfig(32, 64, 4, (16, 64))
TOO_WIDE = "A decoder for 64 latents cannot be fitted"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return planted_store(tmp_path / "store", n_rows=512).store


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """No decoder can be fitted for an SAE as wide as those here."""
    monkeypatch.setattr("dmsae.evaluation.ridge._MAX_WIDTH", 32)


def run(store: Store, out: Path, *names: str, share_nulls: float = 0.1) -> Evaluation:
    saes = {name: random_sae(CONFIG, seed, 0.2) for seed, name in enumerate(names)}
    return evaluate(saes, store, out, EvaluateConfig(("fidelity", "activity"), share_nulls=share_nulls))


def fve(evaluation: Evaluation) -> ScoreRow:
    return next(row for row in evaluation.rows() if row.figure == "fve")


@pytest.mark.usefixtures("narrow")
def test_the_other_nulls_and_the_sae_are_measured(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = run(store, tmp_path / "out", "a")
    assert not made.not_run
    row = fve(made)
    assert set(row.nulls) == {"untrained", "permuted_decoder", "random_firing"}
    assert row.null is not None
    assert row.part is not None
    assert "a / random_encoder" not in made.measures["fidelity"]["results"]
    written = json.loads((tmp_path / "out" / layout.EVALUATION).read_text())
    assert list(written["nulls_not_made"]) == ["a / random_encoder"]
    assert Evaluation.load(tmp_path / "out") == made
    print_scores(made)
    shown = capsys.readouterr().out
    assert f"The null random_encoder of a could not be made. {TOO_WIDE}" in shown
    assert shown.count(TOO_WIDE) == 1, "once, not once a measure"


def test_it_is_tried_again_when_the_evaluation_is_resumed(store: Store, tmp_path: Path) -> None:
    whole = run(store, tmp_path / "whole", "a")
    with patch("dmsae.evaluation.ridge._MAX_WIDTH", 32):
        run(store, tmp_path / "out", "a")
    again = run(store, tmp_path / "out", "a")
    assert not again.nulls_not_made
    assert again.rows() == whole.rows()
    assert again.notes() == whole.notes() == []


@pytest.mark.usefixtures("narrow")
def test_what_is_kept_is_not_measured_again_for_its_sake(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anything prepared for it, such as the base model."""
    first = run(store, tmp_path / "out", "a")
    for name in ("fidelity", "activity"):
        untouched = MEASURES[name]._replace(function=lambda *_, **__: pytest.fail("measured"), takes=("store", "model"))
        monkeypatch.setitem(MEASURES, name, untouched)
    assert run(store, tmp_path / "out", "a") == first


def test_one_that_was_measured_before_is_still_compared_with(store: Store, tmp_path: Path) -> None:
    first = run(store, tmp_path / "out", "a")
    with patch("dmsae.evaluation.ridge._MAX_WIDTH", 32):
        assert run(store, tmp_path / "out", "a") == first


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("share_nulls", [0.0, 0.1])
def test_all_that_are_compared_with_it_are_named(share_nulls: float, store: Store, tmp_path: Path) -> None:
    (note,) = run(store, tmp_path / "out", "a", "b", share_nulls=share_nulls).notes()
    assert note.startswith("The null random_encoder of a, b could not be made.")


@pytest.mark.usefixtures("narrow")
def test_one_sae_under_two_names_lacks_it_under_both(store: Store, tmp_path: Path) -> None:
    sae = random_sae(CONFIG, 0, 0.2)
    config = EvaluateConfig(("fidelity",), (NullKind.RANDOM_ENCODER,), share_nulls=0.0)
    made = evaluate({"a": sae, "b": sae}, store, tmp_path, config)
    assert set(made.nulls_not_made) == {"a / random_encoder", "b / random_encoder"}
    assert all(row.null is None and row.score is not None for row in made.rows())


def test_a_store_that_nulls_cannot_be_sampled_from_leaves_the_others(store: Store, tmp_path: Path) -> None:
    x = store.heldout()
    constant = import_store("constant", torch.ones(64, 32), heldout=x, root=tmp_path, dtype="float32")
    made = run(constant, tmp_path / "out", "a")
    assert set(fve(made).nulls) == {"permuted_decoder", "random_firing"}
    assert [note.split(" of ")[0] for note in made.notes()] == ["The null untrained", "The null random_encoder"]
    assert all("do not vary" in note for note in made.notes())


def test_an_evaluation_from_before_there_were_reasons_can_be_read(store: Store, tmp_path: Path) -> None:
    made, path = run(store, tmp_path / "out", "a"), tmp_path / "out" / layout.EVALUATION
    values = read_sealed(path)
    del values["nulls_not_made"]
    write_sealed(path, values)
    assert Evaluation.load(tmp_path / "out") == made
