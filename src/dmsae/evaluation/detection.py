"""Detection scoring: can a language model tell, from an explanation of a latent, on which texts the latent fires?

Automatic interpretability as in SAEBench, after *Automatically Interpreting Millions of Features* (Paulo et al., 2024).
A judge explains a latent from texts of the first half of the held-out text: those on which it fires most, and others
drawn by activation. It is then shown its explanation and texts of the second half, some on which the latent fires, some
without, and says which are which. The score is the share that it gets right.

Unlike SAEBench, texts without firing are such, not just random ones; and the balanced accuracy is given too, because
most texts shown are without.
"""

import random
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmsae.activations.base_model import BaseModel
from dmsae.activations.store import Store
from dmsae.config import Json, require_whole
from dmsae.evaluation.firing_sample import HeldoutText, heldout_text, sample_latents
from dmsae.evaluation.judge import Judge, JudgeConfig, Message
from dmsae.evaluation.subject import Subject
from dmsae.progress import SILENT, Progress
from dmsae.seeds import derive_seed, generator
from dmsae.text.token_text import token_texts
from dmsae.text.tokens import PAD

_EXPLAIN = (
    "Below are excerpts of text in which one feature of a language model is active. The tokens on which it is active "
    "stand between << and >>; the excerpts with the strongest activity come first. Find what these tokens, or the "
    "texts around them, have in common. It may be a word, a part of a word, a kind of word or a topic. Answer with one "
    "phrase of at most 20 words, and nothing else."
)
_DETECT = (
    "A feature of a language model is described by a phrase. Below are numbered excerpts of text. Say in which of them "
    "the feature is active on at least one token, judging by the description. Answer with the numbers alone, separated "
    "by commas, or with the word none."
)
_MAX_EXPLANATION_TOKENS = 60
_ACTIVE_SHARE = 0.01
"""Of a latent's largest activation: what is marked as active."""


@dataclass(frozen=True, slots=True)
class DetectionConfig:
    """Who judges, and what it is shown."""

    judge: JudgeConfig = field(default_factory=JudgeConfig)
    n_latents: int = 50
    """Latents drawn at random."""
    n_tokens: int = 32_768
    """Held-out tokens, one half to explain and one to test."""
    n_around: int = 10
    """Tokens shown on either side."""
    n_explain_top: int = 10
    """Texts on which a latent fires most, to explain it from."""
    n_explain_weighted: int = 5
    """Further texts to explain it from, drawn by activation."""
    n_test_top: int = 2
    """Texts on which it fires most, to recognise."""
    n_test_weighted: int = 2
    """Further texts on which it fires, drawn by activation, to recognise."""
    n_test_without: int = 10
    """Texts on which it does not fire, to tell from the others."""
    seed: int = 0
    """Decides which latents and texts are taken."""

    def __post_init__(self) -> None:
        for name in ("n_latents", "n_around", "n_explain_top", "n_test_top", "n_test_without"):
            require_whole(f"detection.{name}", getattr(self, name), 1)
        for name in ("n_explain_weighted", "n_test_weighted"):
            require_whole(f"detection.{name}", getattr(self, name), 0)
        require_whole("detection.n_tokens", self.n_tokens, 2)


class LatentDetection(NamedTuple):
    """What the judge makes of one latent."""

    latent: int
    explanation: str
    score: float | None
    """Share of texts that it sorts right; None if its answer was no list of numbers."""
    balanced: float | None
    """Mean of the shares right among texts with and without firing."""


class DetectionResult(NamedTuple):
    """Means over the latents that the judge gave an answer for; None without any."""

    detection: float | None
    """Share of texts sorted right, as SAEBench scores."""
    detection_balanced: float | None
    """Balanced accuracy: ½ for a judge that cannot tell."""
    n_latents: int
    n_unclear: int
    """Latents for which the judge's answer was no list of numbers."""
    latents: list[LatentDetection]


def why_no_score(result: Json, settings: Json) -> str:
    """Return why a result has no scores; an empty text if it has."""
    if result["n_latents"]:
        return ""
    if not result["n_unclear"]:
        return "no latent that was drawn fires often enough in both halves of the text; raise --detection.n-tokens"
    return f"none of the judge's {result['n_unclear']} answers was a list of numbers; try another model"


def measure(
    subjects: Sequence[Subject],
    store: Store,
    model: BaseModel,
    config: DetectionConfig,
    cache: Path | None = None,
    progress: Progress = SILENT,
) -> list[DetectionResult]:
    """Return the detection scores of each subject on a store's held-out text. The model only lends its tokenizer."""
    judge = Judge(config.judge, cache)
    text = heldout_text(store, list(subjects), config.n_tokens)
    shown = _Shown(text, model.tokenizer, config)
    n_positive = config.n_test_top + config.n_test_weighted
    results = []
    with progress.bar("detection", len(subjects) * config.n_latents, "latent") as bar:
        for subject in subjects:
            latents, f_CR = sample_latents(subject.dictionary, text, config.n_latents, n_positive, config.seed)
            found = []
            with ThreadPoolExecutor(config.judge.workers) as pool:
                for one in pool.map(partial(judge_latent, judge, shown), latents, f_CR):
                    found.append(one)
                    bar.advance(1, subject.name)
            bar.advance(config.n_latents - len(latents))
            results.append(_mean(found))
    return results


class Excerpt(NamedTuple):
    """A stretch of text around one token, and whether the latent fires on it."""

    text: str
    fires: bool


class _Shown:
    """Cuts excerpts out of the held-out text."""

    def __init__(self, text: HeldoutText, tokenizer: Any, config: DetectionConfig) -> None:
        self._text, self._tokenizer, self.config = text, tokenizer, config
        self._row_NL = torch.full(text.tokens_NL.shape, -1)
        self._row_NL[text.context_R, text.position_R] = torch.arange(len(text.x_RD))

    def to_explain(self, f_R: Tensor, latent: int) -> list[str]:
        """Return excerpts of the first half with active tokens marked, the strongest first."""
        config = self.config
        rows = self._firing_rows(f_R, ~self._text.is_test_R, latent, config.n_explain_top, config.n_explain_weighted)
        rows = sorted(rows, key=lambda row: -float(f_R[row]))
        return [self._excerpt(row, f_R, mark=True).text for row in rows]

    def to_test(self, f_R: Tensor, latent: int) -> list[Excerpt]:
        """Return excerpts of the second half in random order, some with firing and some without any."""
        config = self.config
        rows = self._firing_rows(f_R, self._text.is_test_R, latent, config.n_test_top, config.n_test_weighted)
        excerpts = [self._excerpt(row, f_R, mark=False) for row in rows]
        draw = generator(config.seed, "without", latent)
        candidates = (self._text.is_test_R & (f_R <= 0)).nonzero().squeeze(1)
        without: list[Excerpt] = []
        for row in candidates[torch.randperm(len(candidates), generator=draw)].tolist():
            if len(without) == config.n_test_without:
                break
            excerpt = self._excerpt(row, f_R, mark=False)
            if not excerpt.fires:
                without.append(excerpt)
        excerpts += without
        random.Random(derive_seed(config.seed, "order", latent)).shuffle(excerpts)
        return excerpts

    def _firing_rows(self, f_R: Tensor, half_R: Tensor, latent: int, n_top: int, n_weighted: int) -> list[int]:
        """Return rows where a latent fires: the strongest, one a context, then others drawn by activation."""
        rows = (half_R & (f_R > 0)).nonzero().squeeze(1)
        strongest = rows[f_R[rows].sort(descending=True, stable=True).indices]
        top: dict[int, int] = {}
        for row, context in zip(strongest.tolist(), self._text.context_R[strongest].tolist(), strict=True):
            if len(top) == n_top:
                break
            top.setdefault(context, row)
        others = rows[~torch.isin(rows, torch.tensor(list(top.values())))]
        n_weighted = min(n_weighted, len(others))
        if not n_weighted:
            return list(top.values())
        draw = generator(self.config.seed, "weighted", latent)
        weighted = others[torch.multinomial(f_R[others].double(), n_weighted, generator=draw)]
        return [*top.values(), *weighted.tolist()]

    def _excerpt(self, row: int, f_R: Tensor, mark: bool) -> Excerpt:
        context, position = int(self._text.context_R[row]), int(self._text.position_R[row])
        start = max(0, position - self.config.n_around)
        tokens = self._text.tokens_NL[context, start : position + self.config.n_around + 1].tolist()
        tokens = [token for token in tokens if token != PAD]
        rows = self._row_NL[context, start : start + len(tokens)]
        activations = torch.where(rows >= 0, f_R[rows], 0.0)
        active = (activations > _ACTIVE_SHARE * float(f_R.max())).tolist()
        pieces = token_texts(self._tokenizer, tokens)
        if mark:
            pieces = [f"<<{piece}>>" if on else piece for piece, on in zip(pieces, active, strict=True)]
        return Excerpt(" ".join("".join(pieces).split()), bool((activations > 0).any()))


def judge_latent(judge: Judge, shown: _Shown, latent: int, f_R: Tensor) -> LatentDetection:
    """Return a judge's explanation of a latent, and how well it sorts texts by it."""
    examples = "\n".join(f"{i}. {text}" for i, text in enumerate(shown.to_explain(f_R, latent), 1))
    explanation = judge.ask([Message("system", _EXPLAIN), Message("user", examples)], _MAX_EXPLANATION_TOKENS)
    excerpts = shown.to_test(f_R, latent)
    listed = "\n".join(f"{i}. {excerpt.text}" for i, excerpt in enumerate(excerpts, 1))
    question = f"Description: {explanation}\n\n{listed}"
    reply = judge.ask([Message("system", _DETECT), Message("user", question)], 4 * len(excerpts) + 8)
    chosen = parse_numbers(reply, len(excerpts))
    if chosen is None:
        return LatentDetection(latent, explanation, None, None)
    return LatentDetection(latent, explanation, *score(chosen, [excerpt.fires for excerpt in excerpts]))


def parse_numbers(reply: str, n: int) -> set[int] | None:
    """Return the numbers from 1 to n in an answer; an empty set for "none", None for an answer that is neither."""
    text = reply.strip().rstrip(".").lower()
    if text in {"none", "[]", "0"}:
        return set()
    if not re.fullmatch(r"\[?\s*\d+(?:\s*(?:,|and|,\s*and|\s)\s*\d+)*\s*\]?", text):
        return None
    return {number for number in map(int, re.findall(r"\d+", text)) if 1 <= number <= n}


def score(chosen: set[int], fires: Sequence[bool]) -> tuple[float, float]:
    """Return the share of excerpts sorted right, and the mean of the shares of either kind."""
    right = [(i in chosen) == fired for i, fired in enumerate(fires, 1)]
    kinds = ([ok for ok, fired in zip(right, fires, strict=True) if fired is kind] for kind in (True, False))
    shares = [sum(of_kind) / len(of_kind) for of_kind in kinds if of_kind]
    return sum(right) / len(right), sum(shares) / len(shares)


def _mean(latents: list[LatentDetection]) -> DetectionResult:
    scores = [one.score for one in latents if one.score is not None]
    balanced = [one.balanced for one in latents if one.balanced is not None]
    return DetectionResult(
        detection=sum(scores) / len(scores) if scores else None,
        detection_balanced=sum(balanced) / len(balanced) if balanced else None,
        n_latents=len(scores),
        n_unclear=len(latents) - len(scores),
        latents=latents,
    )
