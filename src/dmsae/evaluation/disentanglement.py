"""Disentanglement: can one attribute of an entity be exchanged without touching the others?

RAVEL (Huang et al., 2024) for SAEs, as SAEBench has it: a mask over latents is learned for each attribute; at the last
token of a city, the masked latents take the activations that they have at another city. *Cause*: the attribute must
become that of the other city. *Isolation*: every other attribute must stay. The score is the mean of both.

The published measure reads attributes from the model's completions. A small model completes few of these sentences, so
here they are read by linear probes on the activations at the hook; only cities whose attributes the probe reads right
are scored, as RAVEL keeps only entities that the model knows. The rest is as published: the mask is trained with a
falling temperature, the activation is replaced by the SAE's reconstruction, pairs are of cities that differ in the
attribute that is read. Exchanging no latent gives a cause of 0, exchanging all an isolation of 0: either way a perfect
reconstruction gets ½.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dmsae.activations.base_model import BaseModel
from dmsae.config import require, require_whole
from dmsae.errors import ModelError
from dmsae.evaluation.cities import UNKNOWN, Cities, CitiesConfig, known_cities
from dmsae.evaluation.subject import Dictionary, Subject
from dmsae.progress import SILENT, Progress
from dmsae.seeds import generator

CAVEAT = (
    "attributes are read by probes at the hook, not from what the model writes: not to be set beside RAVEL's scores"
)

_TEMPERATURES = 1.0, 1e-4


@dataclass(frozen=True, slots=True)
class DisentanglementConfig:
    """Which cities, and how the masks are learned."""

    cities: CitiesConfig = field(default_factory=CitiesConfig)
    steps: int = 100
    """Training steps of a mask."""
    batch_pairs: int = 256
    """Pairs of cities in a step, half of them for cause and half for isolation."""
    lr: float = 1e-2
    """Learning rate of a mask."""
    n_test_pairs: int = 1000
    """Pairs of cities that each of cause and isolation is scored on."""
    seed: int = 0
    """Decides which pairs are taken."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_pairs", "n_test_pairs"):
            require_whole(f"disentanglement.{name}", getattr(self, name), 2)
        require(self.lr > 0, "disentanglement.lr", self.lr, "be positive")


class AttributeScore(NamedTuple):
    """How well one attribute can be exchanged."""

    attribute: str
    cause: float
    """Share of pairs in which the attribute becomes that of the other city."""
    isolation: float
    """Share of pairs in which another attribute stays."""
    n_latents: int
    """Latents that the mask exchanges."""
    untouched: float
    """Isolation when no latent is exchanged: what the reconstruction alone keeps."""
    probe_accuracy: float
    """How often the probe reads the attribute right at cities that it was not trained on."""


class DisentanglementResult(NamedTuple):
    """Means over attributes, and those of each."""

    score: float
    """Mean of cause and isolation. Exchanging nothing or everything gets ½ at most."""
    cause: float
    isolation: float
    attributes: list[AttributeScore]
    read_by: str = "linear probes at the hook, not the model's completions"


def measure(
    subjects: Sequence[Subject],
    model: BaseModel,
    config: DisentanglementConfig,
    cache: Path | None = None,
    progress: Progress = SILENT,
) -> list[DisentanglementResult]:
    """Return the disentanglement scores of each subject."""
    cities = known_cities(model, config.cities, cache, progress)
    results = []
    with progress.bar("disentanglement", len(subjects), "SAE") as bar:
        for subject in subjects:
            results.append(score_cities(subject.dictionary, cities, config))
            bar.advance(1, subject.name)
    return results


class _Pairs(NamedTuple):
    """Pairs of cities, and the attribute that is read of each pair."""

    base: Tensor
    source: Tensor
    attribute: int


@torch.no_grad()
def score_cities(dictionary: Dictionary, cities: Cities, config: DisentanglementConfig) -> DisentanglementResult:
    """Return the scores of one dictionary on cities whose activations are known."""
    f_BK = dictionary.encode(cities.x.to(dictionary.W_dec)).cpu().float()
    firing = (f_BK > 0).any(0).nonzero().squeeze(1)
    W_dec = dictionary.W_dec.cpu().double()[firing]
    # A probe's logits are linear in the codes, so the reconstruction itself is never needed.
    readouts = [(one.probe.w @ W_dec.T).float() for one in cities.attributes]
    offsets = [one.probe.logits(dictionary.b_dec.cpu()[None])[:, 0].float() for one in cities.attributes]
    reads = _Reader(f_BK[:, firing], readouts, offsets)
    scores = [_score_attribute(i, reads, cities, config) for i in range(len(cities.attributes))]
    cause = sum(one.cause for one in scores) / len(scores)
    isolation = sum(one.isolation for one in scores) / len(scores)
    return DisentanglementResult((cause + isolation) / 2, cause, isolation, scores)


class _Reader(NamedTuple):
    """Reads attributes after some latents have been exchanged."""

    f_BK: Tensor
    readouts: list[Tensor]
    offsets: list[Tensor]

    def logits(self, pairs: _Pairs, mask_K: Tensor) -> Tensor:
        """Return the logits [pairs, values] of the attribute that is read."""
        base, source = self.f_BK[pairs.base], self.f_BK[pairs.source]
        mixed = base + mask_K * (source - base)
        return mixed @ self.readouts[pairs.attribute].T + self.offsets[pairs.attribute]


def _score_attribute(which: int, reads: _Reader, cities: Cities, config: DisentanglementConfig) -> AttributeScore:
    """Return cause and isolation of one attribute with the mask that was learned for it."""
    mask_K = _learn_mask(which, reads, cities, config)
    nothing_K = torch.zeros_like(mask_K)
    # Only cities of which the probe knows the attribute that is read.
    right = [one.answers(cities.x) == one.of_city for one in cities.attributes]
    usable = [~cities.is_train & is_right for is_right in right]
    draw = generator(config.seed, "test pairs", which)
    cause = _draw_pairs(cities, which, usable[which], config.n_test_pairs, draw)
    others = [i for i in range(len(cities.attributes)) if i != which]
    kept = [_draw_pairs(cities, i, usable[i], config.n_test_pairs // len(others), draw) for i in others]

    def share(all_pairs: list[_Pairs], mask: Tensor, of: str) -> float:
        hits = [_hits(reads, pairs, cities, mask, of) for pairs in all_pairs]
        return float(torch.cat(hits).double().mean())

    tested = ~cities.is_train & (cities.attributes[which].of_city != UNKNOWN)
    return AttributeScore(
        cities.attributes[which].name,
        cause=share([cause], mask_K, "source"),
        isolation=share(kept, mask_K, "base"),
        n_latents=int(mask_K.sum()),
        untouched=share(kept, nothing_K, "base"),
        probe_accuracy=float(right[which][tested].double().mean()),
    )


def _hits(reads: _Reader, pairs: _Pairs, cities: Cities, mask_K: Tensor, of: str) -> Tensor:
    """Return, for each pair, whether the attribute read is that of the base or of the source."""
    values = cities.attributes[pairs.attribute].of_city
    return reads.logits(pairs, mask_K).argmax(1) == values[getattr(pairs, of)]


@torch.enable_grad()
def _learn_mask(which: int, reads: _Reader, cities: Cities, config: DisentanglementConfig) -> Tensor:
    """Return the mask, 0 or 1 for each latent, under which an attribute changes and others stay at training cities."""
    draw = generator(config.seed, "training pairs", which)
    usable = [cities.is_train & (one.of_city != UNKNOWN) for one in cities.attributes]
    others = [i for i in range(len(cities.attributes)) if i != which]
    n_cause, n_each = config.batch_pairs // 2, max(1, config.batch_pairs // 2 // len(others))
    theta_K = torch.zeros(reads.f_BK.shape[1], requires_grad=True)
    optimiser = torch.optim.Adam([theta_K], lr=config.lr)
    first, last = _TEMPERATURES
    for step in range(config.steps):
        temperature = first * (last / first) ** (step / max(1, config.steps - 1))
        mask_K = torch.sigmoid(theta_K / temperature)
        cause = _draw_pairs(cities, which, usable[which], n_cause, draw)
        kept = [_draw_pairs(cities, i, usable[i], n_each, draw) for i in others]
        targets = [cities.attributes[which].of_city[cause.source]]
        targets += [cities.attributes[pairs.attribute].of_city[pairs.base] for pairs in kept]
        losses = [
            F.cross_entropy(reads.logits(pairs, mask_K), target, reduction="sum")
            for pairs, target in zip([cause, *kept], targets, strict=True)
        ]
        optimiser.zero_grad()
        (sum(losses, torch.zeros(())) / config.batch_pairs).backward()
        optimiser.step()
    return (theta_K.detach() > 0).float()


def _draw_pairs(cities: Cities, attribute: int, usable_B: Tensor, n: int, draw: torch.Generator) -> _Pairs:
    """Return n pairs of usable cities that differ in an attribute, drawn with replacement."""
    index = usable_B.nonzero().squeeze(1)
    values = cities.attributes[attribute].of_city
    if len(values[index].unique()) < 2:
        raise ModelError(
            f"A probe reads the {cities.attributes[attribute].name} of {len(index)} cities right, and of none that "
            "differ: the model does not represent it at this hook. Choose another, or raise cities.n_cities."
        )
    base = index[torch.randint(len(index), (n,), generator=draw)]
    source = index[torch.randint(len(index), (n,), generator=draw)]
    while bool((same := values[base] == values[source]).any()):
        source[same] = index[torch.randint(len(index), (int(same.sum()),), generator=draw)]
    return _Pairs(base, source, attribute)
