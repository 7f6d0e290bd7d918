"""The first-letter task: single-token words, shown to the model among spelled examples, and a probe for each letter.

Prompts are those of *A is for Absorption* (Chanin et al., 2024; sae-spelling): a few lines such as `cat has the first
letter: C`, then the word. The activation is read at the word itself, so what the template says after it never matters.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_letters, ascii_lowercase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmsae.activations.base_model import BaseModel
from dmsae.config import require, require_whole
from dmsae.errors import ModelError
from dmsae.evaluation import logistic
from dmsae.evaluation.prompts import last_token_activations
from dmsae.progress import SILENT, Progress
from dmsae.seeds import derive_seed
from dmsae.text.token_text import token_texts

LETTERS = ascii_lowercase
_MAX_TOKENS = 1024
_TRAIN_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class SpellingConfig:
    """Which words, and how they are shown to the model."""

    n_words: int = 1500
    """How many words of the tokenizer's vocabulary are used, four fifths of them to train probes. SAEBench uses all,
    which takes hours without a GPU, and as much memory as words times latents."""
    n_examples: int = 5
    """Spelled examples before each word. SAEBench shows 10."""
    template: str = "{word} has the first letter:"
    """A line of the prompt, before its letter."""
    probe_c: float = 10.0
    """How little the letter probes are penalised, relative to the variance of activations."""
    seed: int = 0
    """Decides which words and examples are taken."""

    def __post_init__(self) -> None:
        require_whole("spelling.n_words", self.n_words, 10)
        require_whole("spelling.n_examples", self.n_examples, 1)
        require(self.template.count("{word}") == 1, "spelling.template", self.template, "hold {word} once")
        require(self.probe_c > 0, "spelling.probe_c", self.probe_c, "be positive")


class Words(NamedTuple):
    """Words as activations, their first letters, and a probe for each letter."""

    train_x: Tensor
    train_letters: Tensor
    """Indices into the alphabet."""
    test_x: Tensor
    test_letters: Tensor
    test_words: list[str]
    probes: logistic.Logistic
    """One for each letter of the alphabet; that of a letter which begins no training word is zero."""


def spelled_words(
    model: BaseModel, config: SpellingConfig, cache: Path | None = None, progress: Progress = SILENT
) -> Words:
    """Return words with their activations and the letter probes trained on four fifths of them."""
    choose = random.Random(derive_seed(config.seed, "spelling"))
    head = f"\n{config.template.partition('{word}')[0]}"
    words = vocabulary(model.tokenizer, head)
    if len(words) < config.n_words:
        raise ModelError(
            f"This model's vocabulary has {len(words):,} words of letters alone, but spelling.n_words = "
            f"{config.n_words:,}. Ask for fewer."
        )
    words = choose.sample(words, config.n_words)
    n_train = int(_TRAIN_SHARE * len(words))
    if n_train <= config.n_examples or len(words) - n_train <= config.n_examples:
        raise ModelError(f"{len(words)} words are too few for {config.n_examples} examples before each. Ask for more.")
    # Examples come from the same part as the word: no test word is ever seen while probes are trained.
    prompts = [prompt(word, part, config, choose) for part in (words[:n_train], words[n_train:]) for word in part]
    x_BD = last_token_activations(model, prompts, _MAX_TOKENS, cache, progress)
    letters = torch.tensor([LETTERS.index(first_letter(word)) for word in words])
    is_letter_VB = torch.arange(len(LETTERS))[:, None] == letters[:n_train]
    probes = logistic.fit_each(x_BD[:n_train], is_letter_VB, config.probe_c, cache, progress)
    return Words(x_BD[:n_train], letters[:n_train], x_BD[n_train:], letters[n_train:], words[n_train:], probes)


def vocabulary(tokenizer: Any, head: str) -> list[str]:
    """Return the tokens that consist of letters, with or without a space before them, in the order of their ids.

    Only those count that are still one token after `head`, which stands before the word in a prompt.
    """
    ids = sorted(tokenizer.get_vocab().values())
    texts = zip(token_texts(tokenizer, ids), ids, strict=True)
    words = {text: index for text, index in texts if set(text.removeprefix(" ") or "-") <= set(ascii_letters)}
    all_ids = tokenizer([head + word for word in words], add_special_tokens=False).input_ids if words else []
    return [word for (word, index), ids in zip(words.items(), all_ids, strict=True) if ids[-1] == index]


def prompt(word: str, others: Sequence[str], config: SpellingConfig, choose: random.Random) -> str:
    """Return lines that spell some of the other words, then the beginning of a line, up to and with the word."""
    examples = [other for other in choose.sample(others, config.n_examples + 1) if other != word][: config.n_examples]
    lines = [f"{config.template.format(word=other)} {first_letter(other).upper()}" for other in examples]
    head, _, _ = config.template.partition("{word}")
    return "".join(f"\n{line}" for line in [*lines, head + word])


def first_letter(word: str) -> str:
    """Return a word's first letter, lower case."""
    return word.strip()[0].lower()
