"""A model, a tokenizer and a text small enough that every test can make its own store in no time."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import settings as hypothesis_settings
from tokenizers import Tokenizer, models, pre_tokenizers

from dmsae.activations.base_model import BaseModel, ModelConfig
from dmsae.activations.request import HarvestConfig
from dmsae.progress import SILENT, Bar
from dmsae.text import assets
from dmsae.text.corpus import TextConfig
from dmsae.text.tokens import TokenConfig
from tiny_recipe import write_recipe

# A busy machine must not make a test fail: how long an example takes is never judged.
hypothesis_settings.register_profile("dmsae", deadline=None)
hypothesis_settings.load_profile("dmsae")


class Recorder:
    """A `Progress` that remembers what it was told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.bars: list[tuple[str, int]] = []

    def bar(self, what: str, total: int, unit: str) -> AbstractContextManager[Bar]:
        self.bars.append((what, total))
        return SILENT.bar(what, total, unit)

    def note(self, message: str) -> None:
        self.notes.append(message)

    def warn(self, message: str) -> None:
        self.warnings.append(message)


WORDS = [f"w{i}" for i in range(60)]
SPECIAL = {"<s>": 0, "</s>": 1, "<unk>": 2}


def build_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A word-level tokenizer that knows WORDS and adds no special token by itself."""
    vocabulary = SPECIAL | {word: len(SPECIAL) + i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def build_model(seed: int = 0, **overrides: Any) -> transformers.LlamaForCausalLM:
    """A randomly initialised Llama of two blocks, width 16."""
    settings = {
        "vocab_size": len(SPECIAL) + len(WORDS),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "initializer_range": 0.3,  # the usual 0.02 makes so small a model nearly constant
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings | overrides))
    model.eval()
    return model


def build_documents(n_documents: int, seed: int = 0) -> list[str]:
    """Distinct documents of 5 to 40 words."""
    choose = random.Random(seed)
    return [" ".join([f"w{i % 60}", *choose.choices(WORDS, k=choose.randint(4, 39))]) for i in range(n_documents)]


@pytest.fixture(autouse=True)
def _own_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep tests away from the user's cache, except those that need the real model from it."""
    if request.node.get_closest_marker("real") is None:
        monkeypatch.setenv("DMSAE_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("DMSAE_OFFLINE", "1")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run torch on one thread: for tiny tensors a second one only waits, and on a busy machine waits long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny model with its tokenizer."""
    path = tmp_path_factory.mktemp("tiny-model")
    build_model().save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .txt file of 600 documents, one per line."""
    path = tmp_path_factory.mktemp("tiny-text") / "corpus.txt"
    path.write_text("\n".join(build_documents(600)), encoding="utf8")
    return path


@pytest.fixture
def tiny_config(tiny_model: Path, tiny_text: Path) -> Callable[..., HarvestConfig]:
    """Return a function that makes harvest settings for the tiny model and text; keywords change single ones."""

    def make(**overrides: Any) -> HarvestConfig:
        settings: dict[str, Any] = {
            "model": ModelConfig(name=str(tiny_model), hook=0, device="cpu"),
            "text": TextConfig(source=str(tiny_text), txt_documents="line", heldout_fraction=0.2, pairs_fraction=0.2),
            "tokens": TokenConfig(context_length=16),
            "train_tokens": 2000,
            "heldout_tokens": 300,
            "pair_tokens": 200,
            "shard_tokens": 256,
            "dtype": "float32",
        }
        return HarvestConfig(**settings | overrides)

    return make


@pytest.fixture(scope="session")
def real_model() -> BaseModel:
    """The bundled model (SmolLM2-135M-Instruct, 4-bit weights), loaded once, hooked after block 8."""
    if not assets.is_fetched(assets.find("smollm2-135m")):
        pytest.fail("The bundled model has not been fetched. Run 'dmsae assets fetch' (or 'make test', which does).")
    return BaseModel.load(ModelConfig(device="cpu"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say in the last lines when pages were not opened in a browser."""
    skipped = terminalreporter.stats.get("skipped", [])
    if any("no Chromium or Chrome" in str(report.longrepr) for report in skipped):
        terminalreporter.write_line("The browser tests were NOT run: no Chromium or Chrome was found.")


@pytest.fixture
def recipe(tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe as a user would write it for the tiny model, in the directory in which commands then run."""
    monkeypatch.chdir(tmp_path)
    return str(write_recipe(tmp_path / "tiny.toml", tiny_model, tiny_text))
