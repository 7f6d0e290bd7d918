"""A harvest says how contexts start and what the loss is, and warns when a BOS token is missed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import Recorder, build_tokenizer
from dmsae.activations.base_model import BaseModel
from dmsae.activations.caveats import repeat_warnings
from dmsae.activations.contexts import Contexts
from dmsae.activations.harvest import Harvest, harvest
from dmsae.activations.importing import import_store
from dmsae.activations.journal import write_seal
from dmsae.activations.probe import probe, report
from dmsae.activations.request import HarvestConfig
from dmsae.activations.store import Store
from dmsae.text.tokens import TokenConfig

pytestmark = pytest.mark.usefixtures("one_thread")
MakeConfig = Callable[..., HarvestConfig]
BOS = 0


@pytest.fixture
def model(tiny_config: MakeConfig) -> BaseModel:
    return BaseModel.load(tiny_config().model)


@pytest.fixture
def contexts() -> Contexts:
    tokens = torch.randint(3, 63, (20, 12), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    return Contexts(tokens, torch.zeros(20, 12, dtype=torch.bool))


def losses_with_gain(gain: float) -> Any:
    """Losses of 5 nats, less by `gain` where a context starts with BOS."""

    def losses(_self: BaseModel, tokens_NL: Tensor, edit: None = None, counted_NL: Tensor | None = None) -> Tensor:
        assert counted_NL is not None
        return (5 - gain * (tokens_NL[:, :1] == BOS)) * counted_NL

    return losses


@pytest.mark.parametrize(("gain", "warned"), [(1.86, True), (0.31, True), (0.29, False), (-1.0, False)])
def test_a_bos_token_that_helps_is_warned_of(
    gain: float, warned: bool, model: BaseModel, contexts: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BaseModel, "losses", losses_with_gain(gain))
    recorder = Recorder()
    report(model, contexts, TokenConfig(12), recorder)
    assert recorder.notes == [
        "Contexts start without a BOS token, as the model's tokenizer does by default. Mean next-token loss on 8 "
        "contexts: 5.00 nats."
    ]
    assert len(recorder.warnings) == warned
    if warned:
        assert "'<s>'" in recorder.warnings[0]
        assert f"would be {5 - gain:.2f} instead of 5.00 nats" in recorder.warnings[0]
        assert "--tokens.prepend-bos True" in recorder.warnings[0]


def test_the_decision_is_reported_however_it_was_made(
    model: BaseModel, contexts: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BaseModel, "losses", losses_with_gain(3.0))

    def told(prepend_bos: bool | None) -> tuple[str, int]:
        recorder = Recorder()
        report(model, contexts, TokenConfig(12, prepend_bos), recorder)
        return recorder.notes[0].split(".")[0], len(recorder.warnings)

    assert told(False) == ("Contexts start without a BOS token, as tokens", 1)
    assert told(True) == ("Each context starts with the BOS token '<s>', as tokens", 0)
    model.tokenizer = build_tokenizer()
    model.tokenizer.bos_token = None
    assert told(None) == ("Contexts start without a BOS token: the model's tokenizer has none", 0)


def test_both_losses_are_of_the_same_targets(model: BaseModel, contexts: Contexts) -> None:
    tokens = contexts.tokens_NL[:8]
    few = Contexts(tokens, contexts.starts_NL[:8])
    measured = probe(model, few, TokenConfig(12))
    assert measured.n_contexts == 8
    # Targets 1 to 10 of 12: the first is no target without BOS, the last has no room beside it.
    assert measured.loss == pytest.approx(float(model.losses(tokens)[:, :10].mean()), rel=1e-5)
    with_bos = torch.cat([torch.full((8, 1), BOS, dtype=torch.int32), tokens[:, :11]], 1)
    assert measured.loss_with_bos == pytest.approx(float(model.losses(with_bos)[:, 1:11].mean()), rel=1e-5)


def test_boundaries_are_no_part_of_the_loss(model: BaseModel, contexts: Contexts) -> None:
    tokens, starts = contexts.tokens_NL[:1].clone(), contexts.starts_NL[:1].clone()
    tokens[0, 4], starts[0, 5] = 1, True
    losses = model.losses(tokens)[0]
    expected = torch.cat([losses[:3], losses[5:10]]).mean()
    assert probe(model, Contexts(tokens, starts), TokenConfig(12)).loss == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("length", [2, 3])
def test_the_shortest_contexts_are_measured_too(length: int, model: BaseModel, contexts: Contexts) -> None:
    short = Contexts(contexts.tokens_NL[:, :length], contexts.starts_NL[:, :length])
    assert probe(model, short, TokenConfig(length)).loss > 0


def test_harvest_and_dry_run_report_it(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BaseModel, "losses", losses_with_gain(2.0))
    for run in (Harvest.dry_run, Harvest.run):
        recorder = Recorder()
        run(Harvest(tiny_config(), tmp_path, recorder))
        assert sum("without a BOS token" in note and "5.00 nats" in note for note in recorder.notes) == 1
        assert sum("Set tokens.prepend_bos" in warning for warning in recorder.warnings) == 1


def test_a_store_repeats_what_its_harvest_warned_of(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BaseModel, "losses", losses_with_gain(1.0))
    first, again = Recorder(), Recorder()
    made = harvest(tiny_config(pair_tokens=600, heldout_tokens=60), tmp_path, first)
    repeat_warnings(Store.open(made.path), again)
    assert again.warnings == first.warnings
    assert [warning.split()[0] for warning in again.warnings] == ["The", "With"]
    assert again.notes == []

    write_seal(made.path, made.d_model)  # as an earlier version did, which kept no probe
    older = Recorder()
    repeat_warnings(Store.open(made.path), older)
    assert older.warnings == first.warnings[:1]
    assert "does not record whether its model misses a BOS token" in older.notes[0]


def test_nothing_is_known_about_imported_activations(tmp_path: Path) -> None:
    recorder = Recorder()
    repeat_warnings(import_store("cells", np.eye(9, 5, dtype=np.float32), root=tmp_path), recorder)
    assert (recorder.warnings, recorder.notes) == ([], [])
