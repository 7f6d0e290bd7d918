"""The core: encoder directions that are kept from one cycle to the next, each with its lineage.

`C(t)` is the smallest set of candidate latents whose attribution reaches a coverage τ of the total. In cycle t + 1 its
encoder rows are latents 0 … C−1 and frozen. A latent's identity is (birth cycle, birth index), given when it is first
selected: indices mean nothing across cycles, and a feature that is dropped and learned again is a new latent.
`C* = C(T) ∩ C(T−1)`.

Shapes: D model width, C core latents, P candidate latents.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from dmsae.activations.store import Store
from dmsae.config import from_dict, to_dict
from dmsae.cores.attribution import Attribution
from dmsae.disk.artifact import read_artifact, write_artifact
from dmsae.errors import AttributionError, CheckpointError, ConfigError
from dmsae.sae.sae import SAE
from dmsae.seeds import generator

_NAME = "core"


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where a core latent came from."""

    birth_cycle: int
    """The cycle after which it was first selected."""
    birth_index: int
    """Its index in that cycle's SAE."""
    selected_in: tuple[int, ...]
    """Every cycle after which it was selected; none for a random row."""

    @property
    def identity(self) -> tuple[int, int]:
        """What makes this latent the same one across cycles."""
        return self.birth_cycle, self.birth_index


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a core was distilled from."""

    model: dict[str, Any]
    """Identity of the base model, its hook included."""
    store: str
    """Key of the activation store."""
    config: dict[str, Any]
    """The settings of the run, as JSON values."""

    @classmethod
    def of(cls, store: Store, config: dict[str, Any]) -> Self:
        """Return the provenance of what is made from a store."""
        return cls(store.model, store.key, config)


@dataclass(frozen=True, slots=True, eq=False)
class Core:
    """Selected latents in descending order of attribution."""

    encoder_CD: Tensor
    """Their encoder rows, float32, in the space of raw activations."""
    scores_C: Tensor
    """Their attribution scores, float64."""
    slots_C: Tensor
    """Their indices in the SAE of `cycle`."""
    lineage: tuple[Lineage, ...]
    """Their identities, in the same order."""
    cycle: int
    """The cycle after which they were selected."""
    provenance: Provenance
    """What they were distilled from."""

    def __post_init__(self) -> None:
        n = len(self.lineage)
        shapes = [tuple(t.shape) for t in (self.encoder_CD[:, :1], self.scores_C, self.slots_C)]
        if shapes != [(n, 1), (n,), (n,)] or self.encoder_CD.dtype != torch.float32:
            raise CheckpointError(
                f"A core of {n} latents has rows {tuple(self.encoder_CD.shape)} in {self.encoder_CD.dtype}, "
                f"{len(self.scores_C)} scores and {len(self.slots_C)} slots; expected {n} of each, rows in float32."
            )
        if len(set(self.identities)) != n:
            raise CheckpointError(f"A core of {n} latents holds only {len(set(self.identities))} distinct identities.")

    def __len__(self) -> int:
        return len(self.lineage)

    @property
    def identities(self) -> list[tuple[int, int]]:
        """(birth cycle, birth index) of each latent, in order."""
        return [latent.identity for latent in self.lineage]

    def births(self) -> dict[int, int]:
        """Return how many latents each cycle contributed, by birth cycle."""
        return dict(sorted(Counter(latent.birth_cycle for latent in self.lineage).items()))

    def digest(self) -> str:
        """Return a hex SHA-256 of the encoder rows."""
        return hashlib.sha256(self.encoder_CD.contiguous().numpy().tobytes()).hexdigest()

    def take(self, indices: list[int]) -> "Core":
        """Return the core of some of these latents, given by their places in it."""
        return replace(
            self,
            encoder_CD=self.encoder_CD[indices],
            scores_C=self.scores_C[indices],
            slots_C=self.slots_C[indices],
            lineage=tuple(self.lineage[i] for i in indices),
        )

    def save(self, directory: Path) -> None:
        """Write `core.safetensors` and `core.json`."""
        tensors = {"encoder": self.encoder_CD, "scores": self.scores_C, "slots": self.slots_C}
        facts = {
            "cycle": self.cycle,
            "n_latents": len(self),
            "provenance": to_dict(self.provenance),
            "lineage": to_dict(self.lineage),
        }
        write_artifact(directory, _NAME, tensors, facts)

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Return a saved core, or raise `CheckpointError` when anything about it is not as it was written."""
        tensors, facts = read_artifact(directory, _NAME)
        try:
            return cls(
                encoder_CD=tensors["encoder"],
                scores_C=tensors["scores"],
                slots_C=tensors["slots"],
                lineage=tuple(from_dict(Lineage, latent) for latent in facts["lineage"]),
                cycle=facts["cycle"],
                provenance=Provenance(**facts["provenance"]),
            )
        except (KeyError, TypeError, ConfigError) as error:
            raise CheckpointError(f"{directory / _NAME}.json does not describe a core: {error}") from error


def select_core(scores_P: Tensor, coverage: float) -> Tensor:
    """Return the fewest candidates that hold `coverage` of all attribution, highest first, as indices into the scores.

    Of equal scores the lower index goes first. A coverage of 1 takes every candidate with a positive score.
    """
    if not 0 < coverage <= 1:
        raise ConfigError(f"coverage is {coverage!r}; it must lie in (0, 1].")
    if not torch.isfinite(scores_P).all() or not (scores_P >= 0).all() or not scores_P.any():
        raise AttributionError(
            "The attribution scores are all zero, or some are negative or not finite: no core can be selected."
        )
    ordered, order = scores_P.double().sort(descending=True, stable=True)
    # At 1 a sum would stop early: the smallest scores vanish in the rounding of the largest.
    if coverage == 1:
        return order[: int((ordered > 0).sum())]
    cumulative = ordered.cumsum(0)
    return order[: int((cumulative < coverage * cumulative[-1]).sum()) + 1]


def next_core(
    previous: Core | None,
    sae: SAE,
    attribution: Attribution,
    cycle: int,
    coverage: float,
    provenance: Provenance,
) -> Core:
    """Return the core selected after a cycle.

    `previous` is the core that the cycle's SAE was trained with: its latents keep their lineage and rows. The others,
    and all of them when there is none, are born now.
    """
    if previous is not None:
        _require_trained_with(previous, sae, cycle)
    if int(attribution.latents_P.max()) >= sae.config.prefixes[0]:
        raise AttributionError(
            f"Latent {int(attribution.latents_P.max())} was scored, but the SAE's candidates are the first "
            f"{sae.config.prefixes[0]}: the scores belong to another SAE."
        )
    chosen = select_core(attribution.scores_P, coverage)
    slots = attribution.latents_P[chosen]
    n_core, n_pool = sae.config.n_core, sae.config.prefixes[0]
    pool_PD = torch.cat([sae.W_enc_core, sae.W_enc_free[: n_pool - n_core]]).detach().cpu().float()
    return Core(
        encoder_CD=pool_PD[slots],
        scores_C=attribution.scores_P[chosen].double(),
        slots_C=slots,
        lineage=tuple(_lineage(previous, slot, cycle) for slot in slots.tolist()),
        cycle=cycle,
        provenance=provenance,
    )


def _require_trained_with(core: Core, sae: SAE, cycle: int) -> None:
    if cycle != core.cycle + 1:
        raise ConfigError(f"cycle is {cycle}; the core selected after cycle {core.cycle} is that of {core.cycle + 1}.")
    if not torch.equal(sae.W_enc_core.cpu().float(), core.encoder_CD):
        raise CheckpointError(
            f"The SAE of cycle {cycle} was not trained with the core selected after cycle {core.cycle}: it holds "
            f"{sae.config.n_core} core rows, the core {len(core)}, and they are not the same. Give the SAE's own core."
        )


def _lineage(previous: Core | None, slot: int, cycle: int) -> Lineage:
    if previous is None or slot >= len(previous):
        return Lineage(cycle, slot, (cycle,))
    known = previous.lineage[slot]
    return replace(known, selected_in=(*known.selected_in, cycle))


def distilled_core(last: Core, previous: Core) -> Core:
    """Return `C* = C(T) ∩ C(T−1)`: the latents of the last core that were already in the one before, in its order."""
    if last.cycle != previous.cycle + 1:
        raise ConfigError(
            f"The distilled core needs two successive cores; these were selected after cycles {previous.cycle} and "
            f"{last.cycle}."
        )
    before = set(previous.identities)
    return last.take([i for i, identity in enumerate(last.identities) if identity in before])


class CarryOver(NamedTuple):
    """How a core differs from the one before it."""

    size: int
    """Latents in the core."""
    kept: int
    """Those that were in the one before."""
    new: int
    """Those that were not."""
    dropped: int
    """Latents of the one before that are gone."""


def carry_over(current: Core, previous: Core | None) -> CarryOver:
    """Return how many latents a core kept, gained and lost."""
    before = set() if previous is None else set(previous.identities)
    kept = len(before & set(current.identities))
    return CarryOver(len(current), kept, len(current) - kept, len(before) - kept)


class Nearest(NamedTuple):
    """For each latent of one core, the one of another whose encoder row points most nearly the same way."""

    cosine_C: Tensor
    index_C: Tensor


def nearest_in(core: Core, other: Core) -> Nearest:
    """Return the nearest latent of `other` for each of `core`; both must be of one width and not empty."""
    if core.encoder_CD.shape[1] != other.encoder_CD.shape[1]:
        widths = f"{core.encoder_CD.shape[1]} and {other.encoder_CD.shape[1]}"
        raise ConfigError(f"The cores are of activations of other widths ({widths}) and cannot be compared.")
    ours, theirs = (torch.nn.functional.normalize(one.encoder_CD, dim=1) for one in (core, other))
    return Nearest(*(ours @ theirs.T).max(dim=1))


class RandomKind(StrEnum):
    """How long the rows of a random core are."""

    UNIT = "unit"
    """Unit norm."""
    NORM_MATCHED = "norm_matched"
    """Each as long as the row that it stands for."""


def random_core(like: Core, kind: RandomKind, seed: int) -> Core:
    """Return a control: rows in random directions, as many as in `like`, selected by nothing."""
    rows = torch.randn(like.encoder_CD.shape, generator=generator(seed, "random core"), dtype=torch.float64)
    rows /= rows.norm(dim=1, keepdim=True)
    if kind is RandomKind.NORM_MATCHED:
        rows *= like.encoder_CD.double().norm(dim=1, keepdim=True)
    return replace(
        like,
        encoder_CD=rows.float(),
        scores_C=torch.zeros(len(like), dtype=torch.float64),
        slots_C=torch.arange(len(like)),
        lineage=tuple(Lineage(like.cycle, i, ()) for i in range(len(like))),
        provenance=replace(
            like.provenance, config={"random_core": {"kind": str(kind), "seed": seed, "like": like.digest()}}
        ),
    )
