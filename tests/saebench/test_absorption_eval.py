"""The real absorption eval on a tiny model whose words are letters: explicit caches, all or nothing, reproducible."""

import os
from itertools import product
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from benched import SKIP, job_of, sae_of_kind, save
from conftest import build_model

pytest.importorskip("sae_bench", reason=SKIP)

import sae_bench

from dmsae.evaluation.saebench.job import Event, Job, JobSAE
from dmsae.evaluation.saebench.results import read_figures
from dmsae.evaluation.saebench.worker import Worker

WORDS = ["".join(letters) for letters in product(ascii_lowercase, "aeiou", "bcdfg")]
SETTINGS = {
    "words": 520,
    "prompt_token_pos": -5,  # this tokenizer does not split off the colon
    "min_GT_probe_f1": -1.0,  # a random model represents no letter
    "k_sparse_probe_num_epochs": 2,
    "max_k_value": 2,
    "precalc_k_sparse_probe_sae_acts": True,
    "llm_batch_size": 64,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that knows 650 words, the letters, and the prompt."""
    path = tmp_path_factory.mktemp("spelling-model")
    known = ["<s>", "</s>", "<unk>", "has", "the", "first", "letter:", *ascii_uppercase, *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)
    build_model(vocab_size=len(known), max_position_embeddings=128).save_pretrained(path)
    return path


@pytest.fixture
def sae(tmp_path: Path) -> JobSAE:
    x_BD = torch.randn(512, 16, generator=torch.Generator().manual_seed(2))
    return save(sae_of_kind("msae", x_BD), tmp_path / "saes" / "one")


class Listener(list[Event]):
    def say(self, event: Event) -> None:
        self.append(event)


def run(job: Job) -> Event:
    before, listener = Path.cwd(), Listener()
    try:
        Worker(job, listener).run()  # type: ignore[arg-type]
    finally:
        os.chdir(before)
    return listener[-1]


def test_it_runs_with_explicit_caches_and_the_same_seed_gives_the_same_figures(
    model: Path, sae: JobSAE, tmp_path: Path
) -> None:
    job = job_of("absorption", [sae], model, 0, tmp_path / "a", **SETTINGS)
    assert run(job)._replace(seconds=0.0) == Event("done", "one", "", 0.0)
    figures = read_figures(job, sae)
    assert set(figures) == {"fraction", "full"}
    probes = list(job.cache.rglob("probe.pth"))
    assert len(probes) == 1
    assert not (Path(sae_bench.__file__).parent / "artifacts").exists(), "nothing is written into the installation"
    # Elsewhere, with the probes in place or not.
    elsewhere = job_of("absorption", [sae], model, 0, tmp_path / "b", **SETTINGS)
    run(elsewhere)
    assert read_figures(elsewhere, sae) == figures


def test_it_says_when_the_model_represents_too_few_letters(model: Path, sae: JobSAE, tmp_path: Path) -> None:
    settings: dict[str, Any] = SETTINGS | {"min_GT_probe_f1": 0.99}
    event = run(job_of("absorption", [sae], model, 0, tmp_path / "out", **settings))
    assert event.kind == "failed"
    assert "Fewer than 20 letters have a probe with F1 above 0.99" in event.text
