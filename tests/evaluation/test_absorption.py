"""Absorption is found where it was planted, and nowhere else."""

import random
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from conftest import build_model
from dmsae.activations.base_model import BaseModel
from dmsae.activations.identity import ModelIdentity
from dmsae.config import to_dict
from dmsae.errors import ConfigError, ModelError
from dmsae.evaluation import logistic
from dmsae.evaluation.absorption import (
    AbsorptionConfig,
    AbsorptionResult,
    f1,
    measure,
    score_letter,
    score_words,
    why_no_score,
)
from dmsae.evaluation.scores import as_json
from dmsae.evaluation.spelling import SpellingConfig, Words, prompt, spelled_words, vocabulary
from dmsae.evaluation.subject import Subject
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE

LETTER, TOKENS = range(3), range(3, 8)
"""Dimensions of the planted activations: one for each of three letters, and one for each of five particular words."""


@pytest.fixture
def words() -> Words:
    """Words of three letters. Of thirty that begin with the first, five have a feature of their own as well."""
    draw = torch.Generator().manual_seed(0)

    def part(n: int) -> tuple[Tensor, Tensor]:
        letters = torch.arange(n) % len(LETTER)
        x = 0.02 * torch.randn(n, 8, generator=draw)
        x[torch.arange(n), letters] += 2
        for place, token in enumerate(TOKENS):
            x[torch.arange(n) % 90 == len(LETTER) * place, token] += 2
        return x, letters

    (train_x, train_letters), (test_x, test_letters) = part(270), part(90)
    w = torch.zeros(26, 8, dtype=torch.float64)
    w[LETTER, LETTER] = 1
    b = torch.full((26,), -1.0, dtype=torch.float64)
    names = [f"word{i}" for i in range(90)]
    return Words(train_x, train_letters, test_x, test_letters, names, logistic.Logistic(w, b))


def dictionary(absorbs: bool) -> SAE:
    """A latent for each letter and each particular word. With absorption the latter stand for letter 0 as well."""
    sae = SAE(SAEConfig(d_model=8, width=8, k=1, prefixes=(8,)))
    with torch.no_grad():
        sae.W_enc_noncore.copy_(torch.eye(8))
        sae.W_dec.copy_(torch.eye(8))
        sae.b_enc.fill_(-0.5)
        if absorbs:
            sae.W_enc_noncore[0, TOKENS] = -2  # silent at the particular words
            sae.W_dec[TOKENS, 0] = 1
            sae.renormalise_()
    return sae


def test_a_planted_absorbing_latent_is_found(words: Words) -> None:
    result = score_words(dictionary(absorbs=True), words, AbsorptionConfig())
    assert result.n_letters == len(LETTER)
    first, *others = result.letters
    assert (first.letter, first.latents, first.n_words) == ("a", [0], 30)
    assert first.full == pytest.approx(5 / 30)
    assert first.fraction == pytest.approx(5 / 30)
    assert first.fraction_v032 == pytest.approx(5 / 30, abs=0.01)
    assert all(letter.full == letter.fraction == 0 for letter in others)
    assert result.full == pytest.approx(5 / 90)


def test_a_clean_dictionary_absorbs_nothing(words: Words) -> None:
    result = score_words(dictionary(absorbs=False), words, AbsorptionConfig())
    assert (result.full, result.fraction) == (0, 0)
    assert result.fraction_v032 == pytest.approx(0, abs=1e-3)
    assert [letter.latents for letter in result.letters] == [[0], [1], [2]]


def test_a_split_letter_has_all_its_latents_and_is_not_absorbed(words: Words) -> None:
    """Two latents share letter 0: one fires at the particular words, one at the rest. Both point at the letter."""
    sae = dictionary(absorbs=False)
    with torch.no_grad():
        sae.W_enc_noncore[0, TOKENS] = -2
        sae.W_enc_noncore[TOKENS] = 0
        sae.W_enc_noncore[TOKENS[0], TOKENS] = 1
        sae.W_dec[TOKENS[0]] = sae.W_dec[0]
    result = score_words(sae, words, AbsorptionConfig())
    assert sorted(result.letters[0].latents) == [0, TOKENS[0]]
    assert result.letters[0].full == 0
    assert result.n_latents == pytest.approx(4 / 3)


def test_letters_that_the_model_does_not_represent_are_left_out(words: Words) -> None:
    w = words.probes.w.clone()
    w[1] = -w[1]
    result = score_words(
        dictionary(False), words._replace(probes=logistic.Logistic(w, words.probes.b)), AbsorptionConfig()
    )
    assert [letter.letter for letter in result.letters] == ["a", "c"]
    nothing = logistic.Logistic(torch.zeros_like(w), words.probes.b)
    assert score_words(dictionary(False), words._replace(probes=nothing), AbsorptionConfig()) == AbsorptionResult(
        None, None, None, None, 0, []
    )


def test_a_model_without_letters_is_said_to_have_none(words: Words) -> None:
    nothing = words._replace(probes=logistic.Logistic(torch.zeros_like(words.probes.w), words.probes.b))
    settings = to_dict(AbsorptionConfig(min_probe_f1=0.7))
    found, lacking = (as_json(score_words(dictionary(False), one, AbsorptionConfig())) for one in (words, nothing))
    assert why_no_score(found, settings) == ""
    assert "no letter's dense probe has an F1 score above 0.7" in why_no_score(lacking, settings)


def test_a_dictionary_that_never_fires_absorbs_nothing(words: Words) -> None:
    sae = dictionary(False)
    with torch.no_grad():
        sae.b_enc.fill_(-100)
    result = score_words(sae, words, AbsorptionConfig())
    assert (result.full, result.fraction, result.fraction_v032, result.n_latents) == (0, 0, 0, 0)


def test_the_formulas_by_hand() -> None:
    """Latent 0 stands for the letter. Cosines 0.8, 0.5, 0.05, 0.3, 0.2, −0.4; the whole is 10 at every word.

    a. The letter's latent is silent; latent 1 contributes 5 of 10: full absorption.
    b. It contributes 4; latents 1, 3 and 4 contribute 2, 1.5 and 1, together 4.5 ≥ 4: 4.5 / (4.5 + 4). Latent 5 takes
       1 away: (4.5 − 1) / (4 + 4.5 − 1) by the old definition.
    c. It contributes 8, the others 4: what it leaves open is 2, so 2 / (2 + 8), and 4 / 12 by the old definition.
    d. It contributes 12 alone, more than the whole: nothing is absorbed.
    e. It is silent, latent 2 contributes 6, but its cosine is below 0.1: full, and no fraction by the new definition.
    f. It contributes 4, the others 3, which is less than 0.4 of the whole.
    """
    cosine = torch.tensor([0.8, 0.5, 0.05, 0.3, 0.2, -0.4], dtype=torch.float64)
    f = torch.tensor(
        [
            [0.0, 10, 0, 0, 0, 0],
            [5, 4, 0, 5, 5, 2.5],
            [10, 8, 0, 0, 0, 0],
            [15, 10, 0, 0, 0, 0],
            [0, 0, 120, 0, 0, 0],
            [5, 6, 0, 0, 0, 0],
        ],
        dtype=torch.float64,
    )
    scores = score_letter(f, torch.full((6,), 10.0, dtype=torch.float64), cosine, [0])
    assert scores.full.tolist() == [True, False, False, False, True, False]
    assert scores.fraction.tolist() == pytest.approx([1, 4.5 / 8.5, 0.2, 0, 0, 0])
    assert scores.fraction_v032.tolist() == pytest.approx([1, 3.5 / 7.5, 4 / 12, 0, 1, 3 / 7])


def test_full_absorption_needs_a_cosine_and_a_share() -> None:
    cosine = torch.tensor([0.9, 0.02, 0.5], dtype=torch.float64)
    f = torch.tensor([[0.0, 400, 0], [0, 0, 7], [0, 0, 9]], dtype=torch.float64)
    whole = torch.tensor([10.0, 10, -1], dtype=torch.float64)
    assert score_letter(f, whole, cosine, [0]).full.tolist() == [False, False, False]


def test_f1_is_the_harmonic_mean_of_precision_and_recall() -> None:
    says, truth = torch.tensor([True, True, True, False]), torch.tensor([True, False, False, True])
    assert f1(says, truth) == pytest.approx(2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2))
    assert f1(~truth, truth) == 0


def test_the_vocabulary_is_words_of_letters_that_stay_one_token() -> None:
    """A tokenizer that splits words at every q, so that no word with one is ever a single token."""
    tokens = ["</s>", "<unk>", "\n", ":", "b", "ab", "aqb", "x1", "Ab", "été"]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split("q", "isolated")]
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
    assert vocabulary(fast, "\n") == ["b", "ab", "Ab"]


def test_prompts_spell_other_words_and_end_in_the_word() -> None:
    config = SpellingConfig(n_examples=2, template="{word} begins with:")
    text = prompt(" cat", [" cat", " dog", "emu"], config, random.Random(0))
    assert text.splitlines()[-1] == " cat"
    assert sorted(text.splitlines()[1:-1]) == [" dog begins with: D", "emu begins with: E"]


def spelling_model() -> BaseModel:
    """A tiny model whose tokenizer knows 240 words of letters."""
    words = [first + second + third for first in "abcdef" for second in "klmnopqrst" for third in "uvwx"]
    vocabulary = {token: i for i, token in enumerate(["</s>", "<unk>", "\n", ":", *"ABCDEF", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
    identity = ModelIdentity("spelling", "", "0", "1", "model.layers.0", "float32")
    return BaseModel(build_model(vocab_size=len(vocabulary), max_position_embeddings=256), fast, identity)


def test_measure_is_the_same_with_and_without_a_cache(tmp_path: Path) -> None:
    model = spelling_model()
    config = AbsorptionConfig(
        spelling=SpellingConfig(n_words=200, n_examples=2, template="{word}:", probe_c=1000.0), min_probe_f1=0.0
    )
    subjects = [
        Subject(f"seed {seed}", SAE.init(SAEConfig(16, 64, 4, (64,)), torch.Generator().manual_seed(seed)))
        for seed in (0, 1)
    ]
    without = measure(subjects, model, config)
    cold = measure(subjects, model, config, tmp_path / "cache")
    warm = measure(subjects, model, config, tmp_path / "cache")
    assert without == cold == warm
    assert without[0].n_letters > 0
    assert "1B" in without[0].meant_for
    assert without[0] != without[1]


def test_too_small_a_vocabulary_is_an_error() -> None:
    model = spelling_model()
    with pytest.raises(ModelError, match=r"has 246 words of letters alone, but spelling.n_words = 1,500"):
        spelled_words(model, SpellingConfig(template="{word}:"))
    with pytest.raises(ModelError, match="too few for 20 examples"):
        spelled_words(model, SpellingConfig(n_words=20, n_examples=20, template="{word}:"))


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"hold \{word\} once"):
        SpellingConfig(template="no word")
    with pytest.raises(ConfigError, match=r"absorption\.max_k"):
        AbsorptionConfig(max_k=0)
