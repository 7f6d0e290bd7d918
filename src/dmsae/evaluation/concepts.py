"""Texts for concept removal: pairs of labels that can be made to correlate, and classes that exclude each other.

*Two labels*: a text of one labelled table and a text of another, on two lines, carry a label each, so all four
combinations exist. *Classes*: the positive classes of several tables, without texts that are in more than one. A text
is represented by the mean over its tokens, as in SAEBench.
"""

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.activations.base_model import BaseModel
from dmsae.config import require, require_whole
from dmsae.evaluation.labelled import draw, read_classes
from dmsae.evaluation.prompts import TokenActivations, token_activations
from dmsae.evaluation.subject import Dictionary
from dmsae.progress import SILENT, Progress
from dmsae.seeds import derive_seed

_ENCODED_TOKENS = 2048
"""Tokens that are encoded at a time."""


@dataclass(frozen=True, slots=True)
class ConceptsConfig:
    """Which texts concepts are removed from."""

    pairs: tuple[tuple[str, str], ...] = (
        ("92_glue_sst2", "105_click_bait"),
        ("96_spam_is", "105_click_bait"),
    )
    """Pairs of labelled tables whose labels are made to correlate: sentiment with clickbait, spam with clickbait."""
    classes: tuple[str, ...] = (
        "59_wikidata_occupation_isjournalist",
        "60_wikidata_occupation_isathlete",
        "61_wikidata_occupation_isactor",
        "62_wikidata_occupation_ispolitician",
        "63_wikidata_occupation_issinger",
        "64_wikidata_occupation_isresearcher",
    )
    """Labelled tables whose positive classes exclude each other: occupations."""
    n_train: int = 60
    """Texts that probes are trained on, for each combination of two labels; for each class half as many again."""
    n_test: int = 50
    """Texts that probes are tested on, for each combination of two labels and for each class."""
    max_tokens: int = 48
    """Of a longer text, the last tokens are kept."""
    seed: int = 0
    """Decides which texts are taken."""

    def __post_init__(self) -> None:
        require(len(self.pairs) > 0, "concepts.pairs", self.pairs, "name at least one pair of tables")
        require(len(self.classes) > 1, "concepts.classes", self.classes, "name at least two tables")
        require(len(set(self.classes)) == len(self.classes), "concepts.classes", self.classes, "name each table once")
        for name in ("n_train", "n_test", "max_tokens"):
            require_whole(f"concepts.{name}", getattr(self, name), 2)

    @property
    def tables(self) -> tuple[str, ...]:
        """All labelled tables that texts are taken from."""
        return (*(name for pair in self.pairs for name in pair), *self.classes)


class Pooled(NamedTuple):
    """Texts as activations of their tokens."""

    tokens: TokenActivations
    n_texts: int

    def mean_x(self) -> Tensor:
        """Return the mean activation of each text, [texts, D]."""
        return self._mean(self.tokens.x_BD.double())

    @torch.no_grad()
    def mean_codes(self, dictionary: Dictionary) -> Tensor:
        """Return the mean code of each text, [texts, K], in float32."""
        total = torch.zeros(self.n_texts, dictionary.config.width)
        for x_BD, text_B in zip(
            self.tokens.x_BD.split(_ENCODED_TOKENS), self.tokens.text_B.split(_ENCODED_TOKENS), strict=True
        ):
            total.index_add_(0, text_B, dictionary.encode(x_BD.to(dictionary.W_dec)).float().cpu())
        return total / self._counts()[:, None]

    def _mean(self, rows_BD: Tensor) -> Tensor:
        total = rows_BD.new_zeros(self.n_texts, rows_BD.shape[1]).index_add_(0, self.tokens.text_B, rows_BD)
        return total / self._counts()[:, None]

    def _counts(self) -> Tensor:
        return torch.bincount(self.tokens.text_B, minlength=self.n_texts).clamp(min=1)


class TwoLabels(NamedTuple):
    """Texts with two labels of 0 and 1."""

    names: tuple[str, str]
    texts: Pooled
    labels: Tensor
    """[2, texts]"""
    is_balanced: Tensor
    """Training texts of all four combinations, equally many of each."""
    is_biased: Tensor
    """Training texts in which both labels agree."""
    is_test: Tensor
    """Test texts of all four combinations."""


class Classes(NamedTuple):
    """Texts of classes that exclude each other."""

    names: tuple[str, ...]
    texts: Pooled
    of_text: Tensor
    """Index of each text's class."""
    is_test: Tensor


def read_two_labels(
    model: BaseModel,
    names: tuple[str, str],
    config: ConceptsConfig,
    cache: Path | None = None,
    progress: Progress = SILENT,
) -> TwoLabels:
    """Return texts that carry a label of each of two tables."""
    choose = random.Random(derive_seed(config.seed, "two labels", *(Path(name).stem for name in names)))
    n_train, n_test = config.n_train, config.n_test
    # Both labels agree twice as often: the biased set has as many texts as the balanced one.
    sizes = {(a, b): (2 if a == b else 1) * n_train + n_test for a in (0, 1) for b in (0, 1)}
    lines = []
    for table, name in enumerate(names):
        classes = read_classes(name, progress)
        needed = [sum(size for labels, size in sizes.items() if labels[table] == label) for label in (0, 1)]
        what = f"A class of the table {name}"
        lines.append([draw(texts, n, what, choose) for texts, n in zip(classes, needed, strict=True)])
    texts, rows = [], []
    for (a, b), size in sizes.items():
        for place in range(size):
            texts.append(f"{lines[0][a].pop().strip()}\n{lines[1][b].pop().strip()}")
            is_test = place >= size - n_test
            rows.append((a, b, place < n_train, a == b and not is_test, is_test))
    label_a, label_b, balanced, biased, test = torch.tensor(rows).T
    pooled = Pooled(token_activations(model, texts, config.max_tokens, cache, progress), len(texts))
    stems = (Path(names[0]).stem, Path(names[1]).stem)
    return TwoLabels(stems, pooled, torch.stack([label_a, label_b]), balanced.bool(), biased.bool(), test.bool())


def read_exclusive_classes(
    model: BaseModel, config: ConceptsConfig, cache: Path | None = None, progress: Progress = SILENT
) -> Classes:
    """Return texts of the positive classes of several tables, each text in one class alone."""
    choose = random.Random(derive_seed(config.seed, "classes"))
    positive = [read_classes(name, progress)[1] for name in config.classes]
    in_classes = Counter(text for texts in positive for text in texts)
    n_train = config.n_train + config.n_train // 2
    texts: list[str] = []
    for name, of_class in zip(config.classes, positive, strict=True):
        alone = [text for text in of_class if in_classes[text] == 1]
        texts += draw(alone, n_train + config.n_test, f"The positive class of the table {name}", choose)
    pooled = Pooled(token_activations(model, texts, config.max_tokens, cache, progress), len(texts))
    place = torch.arange(len(texts))
    size = n_train + config.n_test
    names = tuple(Path(name).stem for name in config.classes)
    return Classes(names, pooled, place // size, place % size >= n_train)
