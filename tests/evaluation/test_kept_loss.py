"""Losses of trained SAEs are measured once, kept beside them, and never taken for those of another."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dictionaries import random_sae
from dmsae.activations.harvest import harvest
from dmsae.activations.request import HarvestConfig
from dmsae.activations.store import Store
from dmsae.disk.artifact import bound, read_sealed, write_sealed
from dmsae.distillation.prices import next_token_losses
from dmsae.errors import CheckpointError
from dmsae.evaluation import kept_loss
from dmsae.evaluation.evaluate import load_model
from dmsae.evaluation.kept_loss import kept_losses
from dmsae.evaluation.splice import SpliceConfig, splice
from dmsae.evaluation.subject import Subject
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE
from dmsae.training.result import TrainResult, TrainState
from planted import planted_store

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def store(tiny_config: Callable[..., HarvestConfig], tmp_path: Path) -> Store:
    return harvest(tiny_config(), tmp_path / "stores")


@pytest.fixture
def saes(store: Store, tmp_path: Path) -> list[Path]:
    places = [tmp_path / name for name in ("one", "other")]
    for seed, place in enumerate(places):
        random_sae(SAEConfig(store.d_model, 32, 4, (8, 32)), threshold=0.3, seed=seed).save(place)
    return places


def test_the_loss_is_that_of_the_spliced_model_and_is_kept(
    store: Store, saes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = kept_losses(saes, store, "cpu")
    subjects = [Subject(place.name, SAE.load(place)) for place in saes]
    assert list(first.values()) == splice(subjects, load_model(store, device="cpu"), store, SpliceConfig())
    assert first[saes[0]].ce != first[saes[1]].ce
    monkeypatch.setattr(kept_loss, "load_model", None)
    assert kept_losses(saes, store, "cpu") == first, "it was measured again"


def test_a_loss_of_other_settings_or_an_earlier_version_is_measured_again(
    store: Store, saes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = kept_losses(saes, store, "cpu")
    file = saes[0] / "loss.json"
    kept = read_sealed(file)
    with monkeypatch.context() as changed:
        changed.setattr(kept_loss, "SpliceConfig", partial(SpliceConfig, tokens=16))
        assert kept_losses(saes, store, "cpu")[saes[0]].n_tokens < first[saes[0]].n_tokens
    figures = {"figures": kept["figures"] | {"ce": -1.0}}
    earlier = [kept | {"version": kept["version"] - 1}, {"store": store.key}]
    for facts in earlier:
        write_sealed(file, facts | figures, bound(file.parent, file.parent / "sae.json"))
        assert kept_losses(saes, store, "cpu") == first
    write_sealed(file, kept | figures, bound(file.parent, file.parent / "sae.json"))
    assert kept_losses(saes, store, "cpu")[saes[0]].ce == -1, "what is as it should be is kept"


def test_a_loss_of_another_sae_is_refused(store: Store, saes: list[Path]) -> None:
    kept_losses(saes, store, "cpu")
    (saes[1] / "loss.json").replace(saes[0] / "loss.json")
    with pytest.raises(CheckpointError, match="was made for another"):
        kept_losses(saes, store, "cpu")


def test_without_text_there_is_no_loss_but_a_reason(tmp_path: Path) -> None:
    store = planted_store(tmp_path / "store").store
    random_sae(SAEConfig(store.d_model, 32, 4, (8, 32)), threshold=0.3).save(tmp_path / "sae")
    result = TrainResult("sae", tmp_path / "sae", TrainState.FINISHED, 1, "", None)
    assert next_token_losses([result], store) == {}
