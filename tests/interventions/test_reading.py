"""What is read from a text is what a harvest of the same tokens would hold."""

from pathlib import Path

import pytest
import torch

from conftest import Recorder
from dictionaries import constant, random_sae
from dmsae.activations.base_model import BaseModel, ModelConfig
from dmsae.activations.harvest import harvest
from dmsae.activations.request import HarvestConfig
from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.errors import ConfigError
from dmsae.interventions.reading import read
from dmsae.sae.config import DenseCore, SAEConfig
from dmsae.text.corpus import TextConfig
from dmsae.text.tokens import TokenConfig
from hostile import HOSTILE

pytestmark = pytest.mark.usefixtures("one_thread")
PLAIN = SAEConfig(16, 32, 4, (8, 32))
WORDS = [f"w{i}" for i in (3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 3, 8)]
TEXT = " ".join(WORDS)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> BaseModel:
    return BaseModel.load(ModelConfig(name=str(tiny_model), hook=0, device="cpu"))


def one_document(tiny_model: Path, root: Path, prepend_bos: bool, max_norm_ratio: float | None) -> Store:
    """Return a harvest of TEXT alone, all of it held out; its contexts are just long enough for it."""
    (root / "text.txt").write_text(TEXT)
    config = HarvestConfig(
        model=ModelConfig(name=str(tiny_model), hook=0, device="cpu"),
        text=TextConfig(source=str(root / "text.txt"), heldout_fraction=0.98, pairs_fraction=0.01),
        tokens=TokenConfig(context_length=len(WORDS) + prepend_bos + 1, prepend_bos=prepend_bos),
        train_tokens=0,
        pair_tokens=0,
        heldout_tokens=len(WORDS) - 1 + prepend_bos,
        dtype="float32",
        max_norm_ratio=max_norm_ratio,
    )
    return harvest(config, root / "stores", Recorder())


@pytest.mark.parametrize("prepend_bos", [False, True])
@pytest.mark.parametrize("max_norm_ratio", [None, 1.2])
def test_a_reading_is_the_encoding_of_what_a_harvest_holds(
    tiny_model: Path, model: BaseModel, tmp_path: Path, prepend_bos: bool, max_norm_ratio: float | None
) -> None:
    store, sae = one_document(tiny_model, tmp_path, prepend_bos, max_norm_ratio), random_sae(PLAIN, threshold=0.3)
    reading = read(sae, model, TEXT, list(range(32)), prepend_bos=prepend_bos, max_norm_ratio=max_norm_ratio)
    (batch,) = store.batches(Split.HELDOUT, 100)
    positions = batch["position"].long()
    assert reading.kept_L.nonzero().flatten().tolist() == positions.tolist()
    assert torch.allclose(reading.activations_LR[positions], sae.encode(batch["x"]), atol=1e-5)
    assert not reading.activations_LR[~reading.kept_L].any()
    assert reading.tokens == (("<s>",) if prepend_bos else ()) + tuple(WORDS)
    if max_norm_ratio:
        assert not reading.kept_L[1:].all(), "no outlier was left out"


def test_the_core_is_read_by_default_and_else_the_strongest(model: BaseModel) -> None:
    with_core = random_sae(SAEConfig(16, 32, 4, (12, 32), DenseCore(6, 4)), threshold=0.3)
    assert read(with_core, model, TEXT).latents == tuple(range(6))
    assert read(with_core, model, TEXT, [31, 2]).latents == (31, 2)
    plain = random_sae(PLAIN, threshold=0.3)
    reading, every = read(plain, model, TEXT), read(plain, model, TEXT, range(32))
    peaks = reading.activations_LR.amax(0)
    assert torch.equal(peaks, peaks.sort(descending=True).values)
    assert set(reading.latents) == set((every.activations_LR.amax(0) > 0).nonzero().flatten().tolist())
    few = reading.strongest(3)
    assert few.latents == reading.latents[:3]
    assert torch.equal(few.activations_LR, reading.activations_LR[:, :3])
    nothing = read(constant(torch.zeros(16)), model, TEXT)
    assert (nothing.latents, nothing.activations_LR.shape) == ((), (len(WORDS), 0))
    with pytest.raises(ConfigError, match="n = 0"):
        reading.strongest(0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "The text '' has 0 tokens, and none that an SAE is applied to"),
        (" \n\t", "has 0 tokens"),
        ("w1", "'w1' has 1 token, and none"),
        ("w1 </s> </s>", "has 3 tokens, and none"),
        ("w1 w2 \ud800", "not valid Unicode: surrogates not allowed at character 6"),
        (" ".join(["w1"] * 65), "The text has 65 tokens; the model has 64 positions"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused(model: BaseModel, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(random_sae(PLAIN), model, text)


def test_a_bos_token_counts_as_no_text(model: BaseModel) -> None:
    with pytest.raises(ConfigError, match="has 1 token, and none"):
        read(random_sae(PLAIN), model, "", prepend_bos=True)
    assert read(random_sae(PLAIN), model, "w1", prepend_bos=True).kept_L.tolist() == [False, True]


def test_any_text_is_only_text(model: BaseModel) -> None:
    """Special tokens in it are special, as in a harvest, and left out; the rest is unknown words here."""
    reading = read(random_sae(PLAIN), model, f"w1 {HOSTILE} </s> [bold] w2 w3 \0")
    assert reading.tokens == ("w1", "<unk>", "<unk>", "<unk>", "</s>", "<unk>", "w2", "w3", "<unk>")
    assert [token for token, kept in zip(reading.tokens, reading.kept_L.tolist(), strict=True) if kept] == ["w2", "w3"]


def test_latents_and_widths_that_do_not_fit_are_refused(model: BaseModel) -> None:
    with pytest.raises(ConfigError, match=r"latents = \[-1, 32\]; the SAE has latents 0 to 31"):
        read(random_sae(PLAIN), model, TEXT, [-1, 3, 32])
    with pytest.raises(ConfigError, match=r"have width 16; the SAE takes 8\. Choose the model and the hook"):
        read(random_sae(SAEConfig(8, 32, 4, (32,))), model, TEXT)
