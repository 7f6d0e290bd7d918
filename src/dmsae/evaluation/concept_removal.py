"""Concept removal: SCR and TPP. Does ablating a few latents remove one concept and spare the others?

Both are of Karvonen et al. (2024, arXiv 2411.18895), and part of SAEBench. **Its audit found both unreliable** (Chanin,
2026, arXiv 2605.18229). They are here to be set beside published figures, not to choose between SAEs.

*Spurious correlation removal.* A probe trained where two labels always agree learns the wrong one. Ablate the n latents
that matter most to the wrong label, and let a be the probe's accuracy on the right label:
SCR = (a after − a before) / (a of a probe trained without the correlation − a before). Of the two directions the one
with the lower accuracy before counts, as published.

*Targeted probe perturbation.* One probe for each of several classes. Ablate the n latents that matter most to class i:
TPP = mean over i of (fall of probe i − mean fall of the other probes).

A latent matters by (difference of its mean activations) · (probe · its decoder row): in absolute value for SCR; for TPP
only latents that are more active in the class, and whose effect is positive. Where fewer than n qualify, fewer are
ablated; SAEBench then adds latents whose effect is zero or negative, so its TPP may differ. Codes are set to zero and
the reconstruction error is kept. Probes are exact regressions on mean activations; SAEBench trains its own for some
epochs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.activations.base_model import BaseModel
from dmsae.config import require, require_whole
from dmsae.evaluation import logistic
from dmsae.evaluation.concepts import Classes, ConceptsConfig, TwoLabels, read_exclusive_classes, read_two_labels
from dmsae.evaluation.subject import Dictionary, Subject
from dmsae.progress import SILENT, Progress
from dmsae.seeds import generator

CAVEAT = "unreliable, as SAEBench's audit found (arXiv 2605.18229)"
_NO_GAP = 0.001
"""If a probe without the correlation is better by less than this, there is nothing to remove, and SCR is 0."""


@dataclass(frozen=True, slots=True)
class ConceptRemovalConfig:
    """Which texts, and how many latents are ablated."""

    concepts: ConceptsConfig = field(default_factory=ConceptsConfig)
    n_ablated: tuple[int, ...] = (2, 5, 10, 20, 50, 100)
    """How many latents are ablated at once."""
    probe_c: float = 10.0
    """How little the probes are penalised, relative to the variance of activations."""

    def __post_init__(self) -> None:
        require(len(self.n_ablated) > 0, "concept_removal.n_ablated", self.n_ablated, "hold at least one number")
        for n in self.n_ablated:
            require_whole("concept_removal.n_ablated", n, 1)
        require(self.probe_c > 0, "concept_removal.probe_c", self.probe_c, "be positive")


class ScrScore(NamedTuple):
    """Spurious correlation removal on one pair of labels."""

    kept: str
    """The label that the probe should read: of the two, the one that it reads worse before."""
    removed: str
    before: float
    """Accuracy of the probe trained on correlated labels."""
    clean: float
    """Accuracy of a probe trained without the correlation."""
    after: dict[int, float]
    """Accuracy by number of latents ablated."""
    score: dict[int, float]
    """SCR by number of latents ablated."""


class TppScore(NamedTuple):
    """Targeted probe perturbation of one class."""

    name: str
    clean: float
    """Accuracy of its probe before."""
    intended: dict[int, float]
    """How far its accuracy falls, by number of latents ablated."""
    unintended: dict[int, float]
    """How far the accuracy of the other probes falls."""


class ConceptRemovalResult(NamedTuple):
    """SCR and TPP by number of latents ablated. Unreliable; see the caveat."""

    scr: dict[int, float]
    """Mean over pairs of labels."""
    tpp: dict[int, float]
    """Mean over classes of the intended less the unintended fall."""
    pairs: list[ScrScore]
    classes: list[TppScore]
    caveat: str = CAVEAT


def measure(
    subjects: Sequence[Subject],
    model: BaseModel,
    config: ConceptRemovalConfig,
    cache: Path | None = None,
    progress: Progress = SILENT,
) -> list[ConceptRemovalResult]:
    """Return the SCR and TPP scores of each subject."""
    pairs = [read_two_labels(model, names, config.concepts, cache, progress) for names in config.concepts.pairs]
    classes = read_exclusive_classes(model, config.concepts, cache, progress)
    pair_probes = [scr_probes(pair, config.probe_c, cache) for pair in pairs]
    class_probes = tpp_probes(classes, config.concepts.seed, config.probe_c, cache)
    results = []
    with progress.bar("concept removal", len(subjects) * (len(pairs) + 1), "set") as bar:
        for subject in subjects:
            scr = []
            for pair, probes in zip(pairs, pair_probes, strict=True):
                scr.append(score_scr(subject.dictionary, pair, probes, config.n_ablated))
                bar.advance(1, subject.name)
            tpp = score_tpp(subject.dictionary, classes, class_probes, config.n_ablated)
            bar.advance(1, subject.name)
            results.append(_result(scr, tpp, config.n_ablated))
    return results


class ScrProbes(NamedTuple):
    """What SCR needs that does not depend on the SAE."""

    x_test: Tensor
    """Mean activations of the test texts."""
    clean: logistic.Logistic
    """A probe for each of the two labels, trained without the correlation."""
    biased: logistic.Logistic
    """The probe trained where both labels agree."""


def scr_probes(pair: TwoLabels, c: float, cache: Path | None = None) -> ScrProbes:
    """Return the probes of a pair of labels."""
    x = pair.texts.mean_x()
    clean = logistic.fit_each(x[pair.is_balanced], pair.labels[:, pair.is_balanced], c, cache)
    biased = logistic.fit_each(x[pair.is_biased], pair.labels[:1, pair.is_biased], c, cache)
    return ScrProbes(x[pair.is_test], clean, logistic.Logistic(biased.w[0], biased.b[0]))


def score_scr(dictionary: Dictionary, pair: TwoLabels, probes: ScrProbes, n_ablated: Sequence[int]) -> ScrScore:
    """Return how far ablating the latents of one label frees a biased probe to read the other."""
    f = pair.texts.mean_codes(dictionary)
    labels = pair.labels[:, pair.is_test]
    before = [logistic.accuracy(probes.biased.logits(probes.x_test), labels[i]) for i in (0, 1)]
    kept = 0 if before[0] <= before[1] else 1
    removed = 1 - kept
    clean = logistic.accuracy(probes.clean.logits(probes.x_test)[kept], labels[kept])
    effects_K = latent_effects(
        f[pair.is_balanced], pair.labels[removed, pair.is_balanced], probes.clean.w[removed], dictionary
    ).abs()
    after = {}
    for n in n_ablated:
        x = ablate(probes.x_test, f[pair.is_test], dictionary, strongest(effects_K, n))
        after[n] = logistic.accuracy(probes.biased.logits(x), labels[kept])
    score = {n: scr(accuracy, before[kept], clean) for n, accuracy in after.items()}
    return ScrScore(pair.names[kept], pair.names[removed], before[kept], clean, after, score)


def scr(after: float, before: float, clean: float) -> float:
    """Return the share of the accuracy lost to a spurious correlation that was won back."""
    return (after - before) / (clean - before) if clean - before >= _NO_GAP else 0.0


class TppProbes(NamedTuple):
    """What TPP needs that does not depend on the SAE."""

    x: Tensor
    """Mean activations of all texts."""
    train: list[Tensor]
    """Texts that each class's probe is trained on: those of the class, and as many of the others."""
    test: list[Tensor]
    probes: list[logistic.Logistic]


def tpp_probes(classes: Classes, seed: int, c: float, cache: Path | None = None) -> TppProbes:
    """Return a probe for each class against an equal number of texts drawn evenly from the others."""
    x = classes.texts.mean_x()
    draw = generator(seed, "negatives")
    train, test, probes = [], [], []
    for i in range(len(classes.names)):
        train.append(_against_others(classes, i, ~classes.is_test, draw))
        test.append(_against_others(classes, i, classes.is_test, draw))
        fitted = logistic.fit_each(x[train[-1]], (classes.of_text[train[-1]] == i)[None], c, cache)
        probes.append(logistic.Logistic(fitted.w[0], fitted.b[0]))
    return TppProbes(x, train, test, probes)


def _against_others(classes: Classes, which: int, part: Tensor, draw: torch.Generator) -> Tensor:
    """Return the texts of a class in one part, and as many of the other classes, evenly."""
    positive = ((classes.of_text == which) & part).nonzero().squeeze(1)
    others = [i for i in range(len(classes.names)) if i != which]
    shuffled = []
    for i in others:
        index = ((classes.of_text == i) & part).nonzero().squeeze(1)
        shuffled.append(index[torch.randperm(len(index), generator=draw)])
    # The first text of each class, then the second of each, and so on.
    interleaved = torch.stack(shuffled, dim=1).flatten()
    return torch.cat([positive, interleaved[: len(positive)]])


def score_tpp(dictionary: Dictionary, classes: Classes, probes: TppProbes, n_ablated: Sequence[int]) -> list[TppScore]:
    """Return how far each probe falls when the latents of a class are ablated."""
    f = classes.texts.mean_codes(dictionary)

    def accuracies(x: Tensor) -> list[float]:
        return [
            logistic.accuracy(probe.logits(x[index]), classes.of_text[index] == i)
            for i, (probe, index) in enumerate(zip(probes.probes, probes.test, strict=True))
        ]

    clean = accuracies(probes.x)
    scores = []
    for i, name in enumerate(classes.names):
        is_class = (classes.of_text[probes.train[i]] == i).long()
        effects_K = latent_effects(f[probes.train[i]], is_class, probes.probes[i].w, dictionary, only_gains=True)
        intended, unintended = {}, {}
        for n in n_ablated:
            falls = [
                a - b
                for a, b in zip(
                    clean, accuracies(ablate(probes.x, f, dictionary, strongest(effects_K, n))), strict=True
                )
            ]
            intended[n] = falls.pop(i)
            unintended[n] = sum(falls) / len(falls)
        scores.append(TppScore(name, clean[i], intended, unintended))
    return scores


def latent_effects(
    f_BK: Tensor, y_B: Tensor, probe_D: Tensor, dictionary: Dictionary, only_gains: bool = False
) -> Tensor:
    """Return how much each latent moves a probe from one class to the other: difference of means times alignment."""
    difference_K = f_BK[y_B == 1].mean(0) - f_BK[y_B == 0].mean(0)
    if only_gains:
        difference_K = difference_K.clamp(min=0)
    return difference_K.double() * (dictionary.W_dec.detach().cpu().double() @ probe_D)


def strongest(effects_K: Tensor, n: int) -> Tensor:
    """Return the n latents with the largest effects, fewer if fewer are positive."""
    values, latents = effects_K.topk(min(n, len(effects_K)))
    return latents[values > 0]


def ablate(x_BD: Tensor, f_BK: Tensor, dictionary: Dictionary, latents: Tensor) -> Tensor:
    """Return mean activations without what some latents add. The decoder is linear, so means may be ablated."""
    return x_BD - f_BK[:, latents].double() @ dictionary.W_dec.detach().cpu()[latents].double()


def _result(pairs: list[ScrScore], classes: list[TppScore], n_ablated: Sequence[int]) -> ConceptRemovalResult:
    return ConceptRemovalResult(
        scr={n: sum(pair.score[n] for pair in pairs) / len(pairs) for n in n_ablated},
        tpp={n: sum(one.intended[n] - one.unintended[n] for one in classes) / len(classes) for n in n_ablated},
        pairs=pairs,
        classes=classes,
    )
