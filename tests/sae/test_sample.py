"""The token sample: kept at the end of training, and a wrong model, hook, width or normalisation is noticed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import Recorder, build_model, build_tokenizer
from dictionaries import random_sae
from dmsae.activations.base_model import BaseModel, ModelConfig
from dmsae.activations.harvest import Harvest, harvest
from dmsae.activations.importing import import_store
from dmsae.activations.request import HarvestConfig
from dmsae.activations.sources import LiveSource
from dmsae.activations.store import Store
from dmsae.activations.token_sample import sample_of_harvest, sample_of_store
from dmsae.disk.artifact import write_sealed
from dmsae.errors import CheckpointError, WrongModelError
from dmsae.evaluation.evaluate import EvaluateConfig, evaluate
from dmsae.interventions.hooks import splice_into
from dmsae.interventions.intervention import Intervention
from dmsae.interventions.reading import read
from dmsae.interventions.steering import steer
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE
from dmsae.training.config import TrainConfig
from dmsae.training.learner import SAESpec
from dmsae.training.trainer import train, train_together

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = SAEConfig(16, 32, 4, (8, 32))
RECIPE = TrainConfig(tokens=1280, batch_size=128, lr=3e-3, device="cpu")
TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10]])


@pytest.fixture(scope="module")
def store(tiny_model: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    from dmsae.text.corpus import TextConfig
    from dmsae.text.tokens import TokenConfig

    config = HarvestConfig(
        model=ModelConfig(name=str(tiny_model), hook=0, device="cpu"),
        text=TextConfig(source=str(tiny_text), txt_documents="line", heldout_fraction=0.2, pairs_fraction=0.2),
        tokens=TokenConfig(context_length=16),
        train_tokens=2000,
        heldout_tokens=300,
        pair_tokens=200,
        shard_tokens=256,
    )
    return harvest(config, tmp_path_factory.mktemp("stores"))


@pytest.fixture(scope="module")
def trained(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "run"
    train(CONFIG, store, directory, RECIPE)
    return directory / "sae"


@pytest.fixture
def sae(trained: Path) -> SAE:
    return SAE.load(trained)


def loaded(path: Path, hook: int = 0) -> BaseModel:
    return BaseModel.load(ModelConfig(name=str(path), hook=hook, device="cpu"))


def saved_model(path: Path, seed: int = 0, **changes: Any) -> Path:
    build_model(seed, **changes).save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path


def test_a_trained_sae_keeps_what_its_model_gave_and_what_it_makes_of_it(
    sae: SAE, store: Store, tiny_model: Path
) -> None:
    assert sae.sample is not None
    tokens = sae.sample.tokens
    assert tokens.model == store.model
    assert tokens.tokens_NL.shape == (2, 16)
    assert tokens.x_RD.shape == (16, 16)
    x_NLD = loaded(tiny_model).activations(tokens.tokens_NL)
    expected = x_NLD[tokens.context_R.long(), tokens.position_R.long()]
    torch.testing.assert_close(tokens.x_RD, expected, rtol=1e-3, atol=1e-3)  # the store holds them in 16 bits
    assert (tokens.position_R > 0).all()
    codes = sae.sample.codes(32)
    assert int((codes > 0).sum()) > 0
    assert torch.equal(codes, sae.encode(tokens.x_RD))


def test_the_right_model_passes_however_it_is_given(sae: SAE, tiny_model: Path) -> None:
    model = loaded(tiny_model)
    with splice_into(model, sae):
        model.logits(TOKENS)
    raw = build_model()
    with splice_into(raw, sae, hook="model.layers.0"):
        raw(TOKENS)
    with (
        splice_into(raw, sae, hook=0),
        splice_into(raw, sae, hook=0),
    ):  # one inside the other: the model counts as it is
        raw(TOKENS)
    half = build_model().bfloat16()
    with splice_into(half, sae, hook=0):
        half(TOKENS)
    training = build_model().train()
    with splice_into(training, sae, hook=0):
        assert training.training


def test_two_saes_in_one_model_are_each_checked_against_the_model_as_it_is(sae: SAE, tiny_model: Path) -> None:
    above, model = random_sae(CONFIG, threshold=0.3), loaded(tiny_model, hook=1)
    assert sae.sample is not None
    tokens = sae.sample.tokens
    x_NLD = model.activations(tokens.tokens_NL)
    above.keep_sample_(tokens._replace(x_RD=x_NLD[tokens.context_R.long(), tokens.position_R.long()]))
    with splice_into(model, sae, hook=0), splice_into(model, above):
        spliced = model.logits(TOKENS)
    assert not torch.equal(spliced, model.logits(TOKENS))


def test_it_runs_once_for_each_model(sae: SAE, tiny_model: Path) -> None:
    model, passes = loaded(tiny_model), []
    model.model.register_forward_pre_hook(lambda *_: passes.append(1))
    for _ in range(3):
        with splice_into(model, sae):
            pass
    assert len(passes) == 1


def refusal(function: Callable[[], object]) -> WrongModelError:
    with pytest.raises(WrongModelError) as caught:
        function()
    return caught.value


def splice(model: BaseModel | nn.Module, sae: SAE, **settings: Any) -> Callable[[], None]:
    def run() -> None:
        with splice_into(model, sae, **settings):
            pass

    return run


def test_another_model_is_named_with_both_hashes(sae: SAE, tmp_path: Path) -> None:
    other = loaded(saved_model(tmp_path / "other", seed=5))
    error = refusal(splice(other, sae))
    assert error.differs == "model"
    assert other.identity.weights_sha256[:12] in str(error)
    assert sae.sample is not None
    assert sae.sample.tokens.model.weights_sha256[:12] in str(error)
    assert "% off" in str(error)


def test_another_hook_is_named_with_the_one_that_agrees(sae: SAE, tiny_model: Path) -> None:
    error = refusal(splice(loaded(tiny_model, hook=1), sae))
    assert error.differs == "hook"
    assert "at model.layers.0 they agree" in str(error)
    assert "Give the hook model.layers.0." in str(error)


def test_another_width_and_another_vocabulary_are_named(sae: SAE) -> None:
    wide = build_model(hidden_size=32)
    error = refusal(splice(wide, sae, hook=0))
    assert error.differs == "width"
    assert "32 wide" in str(error)
    error = refusal(splice(build_model(vocab_size=5), sae, hook=0))
    assert error.differs == "model"
    assert "has no token" in str(error)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: 0.05 * x, "0.05 to 0.05 times the norm"),
        (lambda x: x / x.norm(dim=-1, keepdim=True), "times the norm expected, in the same directions"),
        (lambda x: x - x.mean(-1, keepdim=True), "the mean over the width has been subtracted"),
    ],
)
def test_a_normalisation_is_named(sae: SAE, change: Callable[[Tensor], Tensor], words: str) -> None:
    model = build_model()
    model.get_submodule("model.layers.0").register_forward_hook(lambda _m, _i, out: change(out))
    error = refusal(splice(model, sae, hook=0))
    assert error.differs == "normalisation"
    assert words in str(error)


def test_reading_and_steering_are_checked_too(sae: SAE, tmp_path: Path) -> None:
    other = loaded(saved_model(tmp_path / "other", seed=5))
    assert refusal(lambda: read(sae, other, "w7 w23 w9")).differs == "model"
    assert refusal(lambda: steer(sae, other, "w7 w23 w9", [Intervention(0, "ablate")])).differs == "model"


def test_an_evaluation_that_runs_the_model_says_that_the_sae_is_of_another(
    store: Store, sae: SAE, tmp_path: Path, tiny_model: Path
) -> None:
    assert sae.sample is not None
    tokens = sae.sample.tokens
    sae.sample = sae.sample._replace(tokens=tokens._replace(x_RD=tokens.x_RD.flip(0)))
    config = EvaluateConfig(measures=("fidelity", "splice"), nulls=())
    found = evaluate({"mine": sae}, store, tmp_path / "out", config, loaded(tiny_model))
    assert "fidelity" in found.measures
    assert "the model differs" in found.not_run["splice"]


def test_a_live_source_gives_a_sample_and_arrays_give_none(
    tiny_config: Callable[..., HarvestConfig], tmp_path: Path, store: Store
) -> None:
    running = Harvest(tiny_config(), tmp_path / "stores")
    train_together([SAESpec("sae", CONFIG)], LiveSource(running), tmp_path / "live", RECIPE)
    sample = SAE.load(tmp_path / "live" / "sae").sample
    assert sample is not None
    assert sample.tokens.model == running.identity
    with splice_into(running.model, SAE.load(tmp_path / "live" / "sae")):
        pass
    imported = import_store("mine", store.heldout(), root=tmp_path / "stores")
    assert sample_of_store(imported) is None
    for name, data in (("array", store.heldout()), ("imported", imported)):
        train(CONFIG, data, tmp_path / name, RECIPE)
        assert SAE.load(tmp_path / name).sample is None
    assert sample_of_harvest(running) is not None


def test_training_is_the_same_with_and_without_a_sample(store: Store, trained: Path, tmp_path: Path) -> None:
    class Silent:
        """The same activations from a source that knows no text."""

        def __init__(self) -> None:
            from dmsae.activations.sources import StoreSource

            self._source = StoreSource(store)
            self.d_model, self.facts, self.block = store.d_model, self._source.facts, self._source.block

    train(CONFIG, Silent(), tmp_path / "run", RECIPE)
    assert SAE.load(tmp_path / "run").sample is None
    ours, theirs = (path / "sae.safetensors" for path in (trained, tmp_path / "run" / "sae"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_a_text_that_cannot_be_read_does_not_cost_what_was_trained(store: Store, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(store.path, tmp_path / store.key)
    shard = next((tmp_path / store.key / "heldout").iterdir())
    shard.write_bytes(b"damaged")
    notes = Recorder()
    result = train(CONFIG, Store.open(tmp_path / store.key), tmp_path / "run", RECIPE, progress=notes)
    assert result.state.value == "finished"
    assert SAE.load(tmp_path / "run").sample is None
    assert any("without a token sample" in warning for warning in notes.warnings)


def test_saes_without_a_sample_load_and_one_of_another_sae_is_refused(trained: Path, sae: SAE, tmp_path: Path) -> None:
    sae.save(tmp_path / "copy")
    assert SAE.load(tmp_path / "copy").sample is not None
    other = random_sae(CONFIG, threshold=0.3)
    other.save(tmp_path / "other")
    assert SAE.load(tmp_path / "other").sample is None
    for suffix in ("json", "safetensors"):
        (tmp_path / "other" / f"sample.{suffix}").write_bytes((trained / f"sample.{suffix}").read_bytes())
    with pytest.raises(CheckpointError, match="was made for another"):
        SAE.load(tmp_path / "other")
    other.save(tmp_path / "copy")  # what is there belongs to the one before
    assert SAE.load(tmp_path / "copy").sample is None


@pytest.mark.parametrize("change", ["latent", "position", "x", "rows", "model"])
def test_a_sample_that_makes_no_sense_is_refused(trained: Path, tmp_path: Path, change: str) -> None:
    SAE.load(trained).save(tmp_path)
    sae = SAE.load(tmp_path)
    assert sae.sample is not None
    sample, tokens = sae.sample, sae.sample.tokens
    match change:
        case "latent":
            sample = sample._replace(latent_S=sample.latent_S + 32)
        case "position":
            sample = sample._replace(tokens=tokens._replace(position_R=tokens.position_R + 100))
        case "x":
            sample = sample._replace(tokens=tokens._replace(x_RD=tokens.x_RD[:, :8]))
        case "rows":
            sample = sample._replace(row_S=sample.row_S[:-1])
    sample.save(tmp_path)
    if change == "model":
        facts = json.loads((tmp_path / "sample.json").read_text())
        del facts["facts_sha256"], facts["model"]
        write_sealed(tmp_path / "sample.json", facts)
    with pytest.raises(CheckpointError, match="sample"):
        SAE.load(tmp_path)


def test_a_later_format_is_refused_with_what_to_do(trained: Path, tmp_path: Path) -> None:
    SAE.load(trained).save(tmp_path)
    facts = json.loads((tmp_path / "sae.json").read_text())
    del facts["facts_sha256"]
    write_sealed(tmp_path / "sae.json", facts | {"format": 99})
    with pytest.raises(CheckpointError, match=r"is of format 99.*Update dmsae"):
        SAE.load(tmp_path)
    del facts["format"], facts["sample"]
    write_sealed(tmp_path / "sae.json", facts)  # the first version did not say
    (tmp_path / "sample.json").unlink()
    SAE.load(tmp_path)


def test_a_sample_that_went_missing_is_noticed(store: Store, tmp_path: Path) -> None:
    sae = random_sae(SAEConfig(store.d_model, 32, 4, (8, 32)), threshold=0.3)
    sae.keep_sample_(sample_of_store(store))
    sae.save(tmp_path)
    SAE.load(tmp_path)
    (tmp_path / "sample.json").unlink()
    with pytest.raises(CheckpointError, match=r"sample\.json is missing: the SAE was saved with a token sample"):
        SAE.load(tmp_path)
