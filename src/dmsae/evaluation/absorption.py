"""Feature absorption: does the latent for a first letter stay silent on words that another latent has swallowed?

*A is for Absorption* (Chanin et al., 2024) as SAEBench measures it. For each letter, k-sparse probes find the latents
that stand for it: one, or several when the feature is split (each further latent must raise the F1 score by more than
0.03). Then come the test words that a dense probe recognises. With p the probe's unit direction, latent j contributes
f_j cos(W_dec[j], p), and the whole is x·p.

- *Full absorption*: none of the letter's latents fires, and the latent that contributes most has a cosine of at least
  0.025 and contributes at least 0.4 of the whole.
- *Absorption fraction, SAEBench 0.4 and later*: of the other latents with a cosine of at least 0.1, the three that
  contribute most must make up at least 0.4 of the whole. The fraction is what they contribute, at most what the
  letter's latents leave open, over that plus what the letter's latents contribute.
- *Absorption fraction, up to SAEBench 0.3.2*: of what all latents contribute, the share that does not come from the
  letter's latents; 0 if those alone reach the whole.

The dense probe is the optimum of a regression whose bias is free. SAEBench's weight decay includes the bias, so its x·p
is smaller and its scores are higher where activations lie far from 0: docs/saebench.md shows how much.

Lower is better. The measure is meant for models of at least a billion parameters and SAEs of at least 16k latents: on
smaller ones the letters are hardly represented, and the figures describe little.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dmsae.activations.base_model import BaseModel
from dmsae.config import Json, require, require_whole
from dmsae.evaluation import logistic
from dmsae.evaluation.spelling import LETTERS, SpellingConfig, Words, spelled_words
from dmsae.evaluation.subject import Dictionary, Subject
from dmsae.progress import SILENT, Progress

MEANT_FOR = "models of at least 1B parameters and SAEs of at least 16k latents"
_SILENT = 1e-8
"""An activation below this counts as none."""
_MIN_COSINE_FULL = 0.025
_MIN_COSINE_FRACTION = 0.1
_MIN_SHARE = 0.4
"""Of the whole: how much the absorbing latents must contribute."""
_MAX_ABSORBERS = 3
_SELECTION_STEPS = 250
_LEARNING_RATES = 1e-2, 1e-5


@dataclass(frozen=True, slots=True)
class AbsorptionConfig:
    """Which words, and how a letter's latents are found."""

    spelling: SpellingConfig = field(default_factory=SpellingConfig)
    max_k: int = 10
    """How many latents a letter may be split into."""
    f1_jump: float = 0.03
    """A further latent must raise the F1 score by more than this."""
    l1_decay: float = 0.01
    """Strength of the ℓ₁ penalty under which latents compete to stand for a letter."""
    min_probe_f1: float = 0.6
    """Letters whose dense probe has a lower F1 score are not represented in the model, and left out."""

    def __post_init__(self) -> None:
        require_whole("absorption.max_k", self.max_k, 1)
        require(self.l1_decay >= 0, "absorption.l1_decay", self.l1_decay, "be at least 0")
        for name in ("f1_jump", "min_probe_f1"):
            require(0 <= getattr(self, name) < 1, f"absorption.{name}", getattr(self, name), "lie in [0, 1)")


class WordScores(NamedTuple):
    """What happens at each word of one letter."""

    full: Tensor
    """Whether it is fully absorbed."""
    fraction: Tensor
    fraction_v032: Tensor


class LetterScore(NamedTuple):
    """Means over the words of one letter that the dense probe recognises."""

    letter: str
    probe_f1: float
    n_words: int
    latents: list[int]
    """The latents that stand for the letter; more than one if it is split."""
    full: float
    fraction: float
    fraction_v032: float


class AbsorptionResult(NamedTuple):
    """Means over letters; None if the model represents no letter."""

    full: float | None
    """Share of words that are fully absorbed."""
    fraction: float | None
    """Mean absorption fraction as SAEBench has defined it since 0.4."""
    fraction_v032: float | None
    """Mean absorption fraction as SAEBench defined it up to 0.3.2."""
    n_latents: float | None
    """Latents that a letter is split into."""
    n_letters: int
    """Letters that the model represents. SAEBench asks for at least 20."""
    letters: list[LetterScore]
    meant_for: str = MEANT_FOR


def why_no_score(result: Json, settings: Json) -> str:
    """Return why a result has no scores; an empty text if it has."""
    if result["n_letters"]:
        return ""
    return (
        f"no letter's dense probe has an F1 score above {settings['min_probe_f1']} (--absorption.min-probe-f1), so the "
        "model hardly represents first letters at the hook, and there is nothing to absorb"
    )


def measure(
    subjects: Sequence[Subject],
    model: BaseModel,
    config: AbsorptionConfig,
    cache: Path | None = None,
    progress: Progress = SILENT,
) -> list[AbsorptionResult]:
    """Return the absorption scores of each subject."""
    words = spelled_words(model, config.spelling, cache, progress)
    results = []
    with progress.bar("absorption", len(subjects), "SAE") as bar:
        for subject in subjects:
            results.append(score_words(subject.dictionary, words, config))
            bar.advance(1, subject.name)
    return results


@torch.no_grad()
def score_words(dictionary: Dictionary, words: Words, config: AbsorptionConfig) -> AbsorptionResult:
    """Return the absorption scores of one dictionary on words whose activations are known."""
    logits_VB = words.probes.logits(words.test_x)
    f1s = [f1(logits_VB[letter] > 0, words.test_letters == letter) for letter in range(len(LETTERS))]
    letters = [letter for letter, score in enumerate(f1s) if score > config.min_probe_f1]
    train_f, test_f = (dictionary.encode(x.to(dictionary.W_dec)).cpu().float() for x in (words.train_x, words.test_x))
    split = letter_latents(train_f, words.train_letters, test_f, words.test_letters, letters, config)
    cosines_VK = _cosines(words.probes.w[letters], dictionary.W_dec.cpu())
    scores = []
    for letter, latents, cosine_K in zip(letters, split, cosines_VK, strict=True):
        known = (words.test_letters == letter) & (logits_VB[letter] > 0)
        whole_B = words.test_x[known].double() @ F.normalize(words.probes.w[letter], dim=0)
        at = score_letter(test_f[known].double(), whole_B, cosine_K, latents)
        means = (float(values.double().mean()) for values in at)
        scores.append(LetterScore(LETTERS[letter], f1s[letter], int(known.sum()), latents, *means))
    return _mean(scores)


def score_letter(f_BK: Tensor, whole_B: Tensor, cosine_K: Tensor, latents: list[int]) -> WordScores:
    """Return what happens at each word: from its activations, x·p, all decoder rows' cosines, the letter's latents."""
    contribution_BK = f_BK * cosine_K
    of_letter_B = contribution_BK[:, latents].sum(1)
    top_B, top_latent_B = contribution_BK.max(1)
    full_B = (
        (f_BK[:, latents] < _SILENT).all(1)
        & (cosine_K[top_latent_B] >= _MIN_COSINE_FULL)
        & (whole_B >= 0)
        & (top_B >= _MIN_SHARE * whole_B)
    )
    reached_B = of_letter_B >= whole_B

    others_BK = contribution_BK.clamp(min=0) * (cosine_K >= _MIN_COSINE_FRACTION)
    others_BK[:, latents] = 0
    absorbers_B = others_BK.topk(min(_MAX_ABSORBERS, others_BK.shape[1])).values.sum(1)
    open_B = torch.minimum(absorbers_B, whole_B - of_letter_B)
    partial_B = (open_B / (open_B + of_letter_B)).clamp(0, 1)
    fraction_B = torch.where(of_letter_B <= 0, 1.0, partial_B)
    too_little_B = absorbers_B / whole_B < _MIN_SHARE
    fraction_B = fraction_B.masked_fill(reached_B | too_little_B, 0)

    all_B = contribution_BK.sum(1)
    v032_B = ((all_B - of_letter_B) / all_B).clamp(0, 1).masked_fill(reached_B | (all_B <= 0), 0)
    return WordScores(full_B, fraction_B, v032_B)


def letter_latents(
    train_f: Tensor,
    train_letters: Tensor,
    test_f: Tensor,
    test_letters: Tensor,
    letters: list[int],
    config: AbsorptionConfig,
) -> list[list[int]]:
    """Return the latents that stand for each letter: as many as raise the F1 score of a k-sparse probe by a jump."""
    if not letters:
        return []
    is_letter_VB = torch.stack([train_letters == letter for letter in letters]).float()
    ranked_VK = _ranked_latents(train_f, is_letter_VB, config)
    found: list[list[int]] = [[] for _ in letters]
    best = [-1.0] * len(letters)
    growing = list(range(len(letters)))
    for k in range(1, min(config.max_k, ranked_VK.shape[1]) + 1):
        chosen = ranked_VK[growing, :k]
        probes = logistic.fit(train_f.T[chosen].mT, is_letter_VB[growing], balanced=True)
        says_VB = probes.logits(test_f.T[chosen].mT) > 0
        still = []
        for i, says_B in zip(growing, says_VB, strict=True):
            score = f1(says_B, test_letters == letters[i])
            if score > best[i] + (config.f1_jump if k > 1 else 0.0):
                best[i], found[i] = score, ranked_VK[i, :k].tolist()
                still.append(i)
        growing = still
        if not growing:
            break
    return found


@torch.enable_grad()
def _ranked_latents(f_BK: Tensor, is_letter_VB: Tensor, config: AbsorptionConfig) -> Tensor:
    """Return, for each letter, the latents by their weight in a linear probe with an ℓ₁ penalty, largest first, [V, k].

    The loss is the published one. All words are in one batch, and the probe starts at zero, so nothing is random.
    Latents that never fire on these words cannot get a weight, and stand for no letter.
    """
    firing = (f_BK > 0).any(0).nonzero().squeeze(1)
    f_BK = f_BK[:, firing].detach()
    w_VK = torch.zeros(len(is_letter_VB), len(firing), requires_grad=True)
    b_V = torch.zeros(len(is_letter_VB), requires_grad=True)
    n_positive_V = is_letter_VB.sum(1)
    weight_V = (is_letter_VB.shape[1] - n_positive_V) / n_positive_V
    first, last = _LEARNING_RATES
    optimiser = torch.optim.Adam([w_VK, b_V], lr=first)
    for step in range(_SELECTION_STEPS):
        optimiser.param_groups[0]["lr"] = first * (last / first) ** (step / _SELECTION_STEPS)
        logits_BV = f_BK @ w_VK.T + b_V
        fit = F.binary_cross_entropy_with_logits(logits_BV, is_letter_VB.T, pos_weight=weight_V)
        loss = fit + config.l1_decay * w_VK.abs().sum(1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    order = w_VK.detach().topk(min(config.max_k, len(firing)), dim=1).indices
    return firing[order]


def f1(says_B: Tensor, is_B: Tensor) -> float:
    """Return the harmonic mean of precision and recall; 0 without a true positive."""
    both = int((says_B & is_B).sum())
    return 2 * both / (int(says_B.sum()) + int(is_B.sum())) if both else 0.0


def _cosines(probes_VD: Tensor, W_dec: Tensor) -> Tensor:
    return F.normalize(probes_VD.double(), dim=1) @ F.normalize(W_dec.double(), dim=1).T


def _mean(letters: list[LetterScore]) -> AbsorptionResult:
    def mean(values: Sequence[float]) -> float | None:
        return sum(values) / len(values) if values else None

    return AbsorptionResult(
        full=mean([letter.full for letter in letters]),
        fraction=mean([letter.fraction for letter in letters]),
        fraction_v032=mean([letter.fraction_v032 for letter in letters]),
        n_latents=mean([len(letter.latents) for letter in letters]),
        n_letters=len(letters),
        letters=letters,
    )
