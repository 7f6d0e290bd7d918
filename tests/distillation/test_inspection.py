"""Questions to a run on disk: which SAE a core came from, what its latents do, and whether ablation agrees."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from conftest import Recorder
from dmsae.activations.base_model import BaseModel, ModelConfig
from dmsae.activations.harvest import harvest
from dmsae.activations.importing import import_store
from dmsae.activations.request import HarvestConfig
from dmsae.activations.store import Store
from dmsae.cores.ablation import AblationConfig
from dmsae.cores.attribution import Attribution
from dmsae.cores.core import Core
from dmsae.disk import layout
from dmsae.disk.artifact import read_sealed
from dmsae.distillation.description import (
    DescriptionConfig,
    LatentFacts,
    describe_core,
    describe_found,
    describe_latents,
)
from dmsae.distillation.distill import DistillConfig, distill
from dmsae.distillation.inspection import FoundSAE, ablate_cycle, find_sae, sae_of
from dmsae.distillation.matching import open_store_of
from dmsae.distillation.reselect import reselect
from dmsae.errors import CheckpointError, ConfigError, StoreError
from dmsae.evaluation.examples import heldout_firing
from dmsae.evaluation.logit_lens import promoted_tokens
from dmsae.sae.config import CoreMode
from dmsae.sae.sae import SAE
from dmsae.text.corpus import TextConfig
from dmsae.text.tokens import TokenConfig
from dmsae.training.config import TrainConfig

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_RATE = 0.14


@pytest.fixture(scope="module")
def store(tiny_model: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    config = HarvestConfig(
        model=ModelConfig(name=str(tiny_model), hook=0, device="cpu"),
        text=TextConfig(source=str(tiny_text), txt_documents="line", heldout_fraction=0.2),
        tokens=TokenConfig(context_length=16),
        train_tokens=2000,
        heldout_tokens=300,
        pair_tokens=300,
        shard_tokens=1024,
    )
    return harvest(config, tmp_path_factory.mktemp("stores"))


@pytest.fixture(scope="module")
def run(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("inspection") / "run"
    train = TrainConfig(tokens=1280, batch_size=128, lr=3e-3, device="cpu")
    config = DistillConfig(width=48, k=6, nesting=(16, 48), cycles=1, max_rate=MAX_RATE, train=train)
    done = distill(replace(config, core_mode=CoreMode.DETECTOR), store, where)
    assert len(done.distilled) >= 4
    return where


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> BaseModel:
    return BaseModel.load(ModelConfig(name=str(tiny_model), hook=0, device="cpu"))


def test_agreement_with_ablation_selects_as_the_run_did(run: Path) -> None:
    """When every candidate is ablated, gradient × activation selects the core of that cycle, under the same cap."""
    for cycle in (0, 1):
        here = layout.cycle_directory(run, cycle)
        assert (Attribution.load(here).firing_rates_P > MAX_RATE).any(), "the cap keeps some out"
        done = ablate_cycle(run, cycle, AblationConfig(n_contexts=4, n_latents=None))
        assert done.agreement.n_first == len(Core.load(here))
        assert done.max_rate == MAX_RATE
        assert read_sealed(here / "ablation" / "agreement.json") == done.agreement._asdict()


def test_facts_are_those_of_the_store_and_the_unembedding(run: Path, store: Store, model: BaseModel) -> None:
    core, sae = Core.load(run), SAE.load(run / "cycle-1")
    config = DescriptionConfig(n_examples=1, n_random_examples=3, n_tokens=2, n_around=4, seed=9)
    latents = core.slots_C[:3].tolist()
    firing = heldout_firing(sae, latents, store, model.tokenizer, 1, 3, 4, seed=9)
    tokens = promoted_tokens(sae.W_dec[latents], model, 2)
    expected = [
        LatentFacts(latent, fires.rate, fires.mean, *effects, fires.top, fires.random)
        for latent, fires, effects in zip(latents, firing, tokens, strict=True)
    ]
    assert describe_latents(sae, latents, store, model, config) == expected
    assert describe_core(run, core, 3, config) == expected
    assert describe_found(find_sae(run), latents, config) == expected
    assert all(len(one.promoted) == len(one.suppressed) == 2 and len(one.random) == 3 for one in expected)
    assert describe_latents(sae, [], store, model) == []


def test_without_a_store_or_a_model_the_rest_is_there(run: Path, store: Store, model: BaseModel) -> None:
    sae = SAE.load(run / "cycle-1")
    (alone,) = describe_latents(sae, [3], None)
    assert alone == LatentFacts(3, None, None, [], [], [], [])
    assert not alone.is_mostly_on
    (no_store,) = describe_latents(sae, [3], None, model)
    assert (no_store.firing_rate, len(no_store.promoted)) == (None, 5)
    (no_model,) = describe_latents(sae, [3], store)
    assert (no_model.firing_rate is not None, no_model.promoted) == (True, [])


def test_a_core_without_its_store_has_the_figures_of_its_scores(run: Path, tmp_path: Path) -> None:
    core, scored = Core.load(run), Attribution.load(run / "cycle-1")
    recorder = Recorder()
    facts = describe_core(run, core, 4, DescriptionConfig(n_tokens=0), tmp_path, recorder)
    assert [one.firing_rate for one in facts] == scored.firing_rates_P[core.slots_C[:4]].tolist()
    assert scored.mean_activations_P is not None
    assert [one.mean_activation for one in facts] == scored.mean_activations_P[core.slots_C[:4]].tolist()
    assert len(recorder.notes) == 1
    assert recorder.notes[0].startswith("No example texts: No store under")


def test_imported_activations_have_figures_and_no_text(run: Path, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((200, 16), dtype=np.float32)
    imported = import_store("cells", x, heldout=x[:50], root=tmp_path)
    recorder = Recorder()
    one = FoundSAE(SAE.load(run / "cycle-1"), run / "cycle-1" / "sae", {})
    (facts,) = describe_found(one, [0], key=imported.key, root=tmp_path, progress=recorder)
    assert facts.firing_rate is not None
    assert (facts.top, facts.promoted) == ([], [])
    assert [note.partition(":")[0] for note in recorder.notes] == ["No promoted tokens", "No example texts"]
    assert "'cells' were imported" in recorder.notes[0]


def test_a_store_that_is_named_must_be_there_and_fit(run: Path, store: Store, tmp_path: Path) -> None:
    one = FoundSAE(SAE.load(run / "cycle-1"), tmp_path, {})
    recorder = Recorder()
    assert describe_found(one, [0], progress=recorder)[0].firing_rate is None
    assert "does not say which store it was made from" in recorder.notes[0]
    with pytest.raises(StoreError, match="No store under"):
        describe_found(one, [0], key="abc", root=tmp_path)
    x = np.ones((20, 5), np.float32) * np.arange(20)[:, None]
    narrow = import_store("narrow", x, heldout=x, root=tmp_path)
    with pytest.raises(ConfigError, match=r"width 16; those of the store .* have width 5"):
        describe_found(one, [0], key=narrow.key, root=tmp_path)


def test_another_model_in_the_place_of_the_first_gives_no_tokens(run: Path, store: Store, tmp_path: Path) -> None:
    core = Core.load(run)
    other = replace(core.provenance.model, weights_sha256="0" * 64)
    core = replace(core, provenance=replace(core.provenance, model=other))
    recorder = Recorder()
    facts = describe_core(run, core, 1, progress=recorder)
    assert facts[0].promoted == []
    assert "No promoted tokens: The models differ" in recorder.notes[0]


def test_a_core_selected_anew_records_where_its_sae_and_store_are(
    run: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    reselect(Path("run"), 0, coverage=0.5).core.save(tmp_path / "saved")
    core = Core.load(tmp_path / "saved")
    monkeypatch.chdir(tmp_path)
    assert sae_of(Path("saved"), core) == run / "cycle-0" / "sae"
    assert open_store_of(Path("saved"), store.key).path == store.path


def test_a_core_is_never_shown_with_the_latents_of_another_sae(run: Path, tmp_path: Path) -> None:
    """Its run has been replaced by one of the same shape."""
    there = shutil.copytree(run, tmp_path / "there")
    reselect(there, 0).core.save(tmp_path / "saved")
    sae = SAE.load(there / "cycle-0" / "sae")
    nn.init.normal_(sae.W_enc_noncore, generator=torch.Generator().manual_seed(1))
    sae.save(there / "cycle-0" / "sae")
    with pytest.raises(CheckpointError, match=r"was not selected from the SAE in .*cycle-0/sae: its latent"):
        describe_core(tmp_path / "saved", Core.load(tmp_path / "saved"), 1)
