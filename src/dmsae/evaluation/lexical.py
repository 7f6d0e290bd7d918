"""Lexical predictability: how well is a latent's firing predicted from its own top examples, with no judge?

A latent that responds to something simple in the text is predictable from the tokens around it. From its top examples
in the first half of the held-out text a naive Bayes classifier learns which tokens stand there, and just before.
Then it says on which tokens of the second half the latent fires. The score is the balanced accuracy: the mean of the
shares right among tokens on which it fires and on which it does not. With shuffled labels the classifier gets about ½:
somewhat more if latents fire on frequent tokens, less if on rare ones.

This is not interpretability: a latent for a meaning that many words share is hard to predict so, and one for a comma is
easy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.activations.store import Store
from dmsae.config import require, require_whole
from dmsae.evaluation.firing_sample import HeldoutText, heldout_text, sample_latents
from dmsae.evaluation.subject import Dictionary, Subject
from dmsae.progress import SILENT, Progress
from dmsae.seeds import generator

CAVEAT = "not interpretability: a latent for a comma is easy to predict, one for a meaning that many words share is not"


@dataclass(frozen=True, slots=True)
class LexicalConfig:
    """How many latents, and what they are predicted from."""

    n_latents: int = 100
    """Latents drawn at random."""
    n_tokens: int = 16_384
    """Held-out tokens, one half to learn from and one to test on."""
    n_top: int = 50
    """Top examples that the classifier learns from."""
    n_others: int = 500
    """Tokens without firing that it learns from; also how many of either kind it is tested on at most."""
    n_previous: int = 3
    """How many tokens before may be looked at; how many help is found out on the training half."""
    min_examples: int = 10
    """Latents that fire on fewer tokens of either half are left out."""
    smoothing: float = 10.0
    """How many examples the overall frequencies of tokens are worth."""
    seed: int = 0
    """Decides which latents and tokens are taken."""

    def __post_init__(self) -> None:
        for name, low in (("n_latents", 1), ("n_tokens", 2), ("n_top", 2), ("n_others", 2), ("min_examples", 2)):
            require_whole(f"lexical.{name}", getattr(self, name), low)
        require_whole("lexical.n_previous", self.n_previous, 0)
        require(self.smoothing > 0, "lexical.smoothing", self.smoothing, "be positive")


class LatentPrediction(NamedTuple):
    """How well one latent's firing is predicted."""

    latent: int
    accuracy: float
    """Balanced accuracy on the second half of the text."""
    shuffled: float
    """The same after the labels were shuffled."""
    rate: float
    """Share of tokens on which it fires."""


class LexicalResult(NamedTuple):
    """Means over latents; None if none fires often enough."""

    lexical_predictability: float | None
    """Balanced accuracy of a naive Bayes classifier of tokens."""
    shuffled: float | None
    """The same after the labels were shuffled: the null."""
    n_latents: int
    latents: list[LatentPrediction]


def measure(
    subjects: Sequence[Subject], store: Store, config: LexicalConfig, progress: Progress = SILENT
) -> list[LexicalResult]:
    """Return the lexical predictability of each subject on a store's held-out text."""
    text = heldout_text(store, list(subjects), config.n_tokens)
    classifier = Classifier(text, config)
    results = []
    with progress.bar("lexical predictability", len(subjects), "SAE") as bar:
        for subject in subjects:
            results.append(_score(subject.dictionary, text, classifier, config))
            bar.advance(1, subject.name)
    return results


def _score(dictionary: Dictionary, text: HeldoutText, classifier: "Classifier", config: LexicalConfig) -> LexicalResult:
    latents, f_CR = sample_latents(dictionary, text, config.n_latents, config.min_examples, config.seed)
    predictions = []
    for latent, f_R in zip(latents, f_CR, strict=True):
        accuracy, shuffled = (classifier.accuracy(f_R, latent, shuffle) for shuffle in (False, True))
        predictions.append(LatentPrediction(latent, accuracy, shuffled, float((f_R > 0).double().mean())))
    if not predictions:
        return LexicalResult(None, None, 0, [])
    n = len(predictions)
    mean, null = sum(one.accuracy for one in predictions) / n, sum(one.shuffled for one in predictions) / n
    return LexicalResult(mean, null, n, predictions)


class Classifier:
    """Naive Bayes over the token at a place and those before it, for any latent on one text."""

    def __init__(self, text: HeldoutText, config: LexicalConfig) -> None:
        self._config, self._is_test_R = config, text.is_test_R
        features = [text.tokens(offset) for offset in range(config.n_previous + 1)]
        vocabulary, index = torch.cat(features).unique(return_inverse=True)
        self._tokens_RO = index.view(len(features), -1).T
        self._n_tokens = len(vocabulary)
        counts_OV = torch.stack([self._count(self._tokens_RO[~text.is_test_R, o]) for o in range(len(features))])
        # One more of each token: what only the second half holds is rare, not impossible.
        self._background_OV = (counts_OV + 1) / (counts_OV + 1).sum(1, keepdim=True)

    def accuracy(self, f_R: Tensor, latent: int, shuffle: bool = False) -> float:
        """Return the balanced accuracy with which a latent's firing in the second half is predicted from the first."""
        draw = generator(self._config.seed, "lexical", latent)
        fires_R = f_R > 0
        positive, negative = self._examples(f_R, draw, shuffle)
        n_features, threshold, counts_OV = self._learn(positive, negative)
        rates = []
        for is_right in (fires_R & self._is_test_R, ~fires_R & self._is_test_R):
            rows = _some(is_right.nonzero().squeeze(1), self._config.n_others, draw)
            says = self._scores(rows, counts_OV, len(positive))[:, n_features - 1] > threshold
            rates.append(float((says == fires_R[rows]).double().mean()))
        return sum(rates) / 2

    def _examples(self, f_R: Tensor, draw: torch.Generator, shuffle: bool) -> tuple[Tensor, Tensor]:
        """Return rows of the first half: where a latent fires most, and some where it does not fire."""
        train = (~self._is_test_R).nonzero().squeeze(1)
        f_train = f_R[train]
        if shuffle:  # over the whole half, or its tokens would be more frequent among the examples than elsewhere
            f_train = f_train[torch.randperm(len(f_train), generator=draw)]
        strongest = f_train.sort(descending=True, stable=True).indices[
            : min(self._config.n_top, int((f_train > 0).sum()))
        ]
        return train[strongest], _some(train[f_train == 0], self._config.n_others, draw)

    def _learn(self, positive: Tensor, negative: Tensor) -> tuple[int, float, Tensor]:
        """Return how many tokens to look at, the score above which to say yes, and the counts of tokens that fire.

        Each positive example is scored as if it had not been counted. Both choices are those with the best balanced
        accuracy on the examples.
        """
        counts_OV = torch.stack([self._count(self._tokens_RO[positive, o]) for o in range(self._tokens_RO.shape[1])])
        yes = self._scores(positive, counts_OV, len(positive), leave_out=1)
        no = self._scores(negative, counts_OV, len(positive))
        best = (-1.0, 0, 0.0)
        for n_features in range(1, yes.shape[1] + 1):
            accuracy, threshold = _best_threshold(yes[:, n_features - 1], no[:, n_features - 1])
            best = max(best, (accuracy, -n_features, threshold))
        return -best[1], best[2], counts_OV

    def _scores(self, rows: Tensor, counts_OV: Tensor, n_positive: int, leave_out: int = 0) -> Tensor:
        """Return log likelihood ratios, [rows, features]: of the token alone, with the one before, and so on.

        `leave_out` is how often each row itself is in the counts.
        """
        tokens_RO = self._tokens_RO[rows]
        ratios = []
        for o, (counts_V, background_V) in enumerate(zip(counts_OV, self._background_OV, strict=True)):
            tokens = tokens_RO[:, o]
            count, n = counts_V[tokens] - leave_out, n_positive - leave_out
            chance = background_V[tokens]
            likelihood = (count + self._config.smoothing * chance) / (n + self._config.smoothing)
            ratios.append((likelihood / chance).log())
        return torch.stack(ratios, dim=1).cumsum(1)

    def _count(self, tokens: Tensor) -> Tensor:
        return torch.bincount(tokens, minlength=self._n_tokens).double()


def _some(rows: Tensor, n: int, draw: torch.Generator) -> Tensor:
    """Return at most n of the rows, drawn at random."""
    return rows[torch.randperm(len(rows), generator=draw)[:n]]


def _best_threshold(yes: Tensor, no: Tensor) -> tuple[float, float]:
    """Return the best balanced accuracy of any threshold, and the threshold: midway between two scores."""
    values, order = torch.cat([yes, no]).sort()
    is_yes = order < len(yes)
    # With the threshold after the i-th smallest score, those up to it are called no.
    missed = is_yes.double().cumsum(0) / len(yes)
    rejected = (~is_yes).double().cumsum(0) / len(no)
    accuracy = (1 - missed + rejected) / 2
    accuracy[:-1][values[1:] == values[:-1]] = -1  # no threshold divides equal scores
    best = int(accuracy[:-1].argmax()) if len(values) > 1 else 0
    if accuracy[best] <= 0.5:
        return 0.5, float(values[-1])
    return float(accuracy[best]), float((values[best] + values[best + 1]) / 2)
