"""The vocabulary of the absorption eval: words that are one token, and not too many of them."""

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from dmsae.errors import BenchmarkError
from dmsae.seeds import derive_seed

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_LEAST = 20
"""Words of each letter, if it has as many: with none for a letter, the package's probes become NaN."""


def one_token_words(words: Sequence[str], tokenizer: Any) -> list[str]:
    """Return the words that are one token where the eval's prompts put them: at the start of a line.

    It reads the activation at a fixed position, so a word of two tokens would be read at the wrong one.
    """
    lines = tokenizer([f"\n{word} has" for word in words], add_special_tokens=False).input_ids
    (before, after) = (tokenizer(text, add_special_tokens=False).input_ids for text in ("\n", " has"))
    length = len(before) + 1 + len(after)
    return [word for word, ids in zip(words, lines, strict=True) if len(ids) == length]


def sample_words(words: Sequence[str], n: int | None, seed: int) -> list[str]:
    """Return about n words, drawn letter by letter so that each letter keeps its share; None: all of them."""
    if n is None or n >= len(words):
        return list(words)
    by_letter: dict[str, list[str]] = defaultdict(list)
    for word in sorted(words):
        by_letter[word.strip()[0].lower()].append(word)
    if missing := [letter for letter in _LETTERS if not by_letter[letter]]:
        raise BenchmarkError(f"The vocabulary has no word that starts with {', '.join(missing)}.")
    choose = random.Random(derive_seed(seed, "words"))
    chosen = []
    for letter in _LETTERS:
        share = max(round(n * len(by_letter[letter]) / len(words)), _LEAST)
        chosen += choose.sample(by_letter[letter], min(share, len(by_letter[letter])))
    return chosen
