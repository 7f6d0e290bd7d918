"""The core: encoder directions that are kept from one cycle to the next, each with its lineage.

`C(t)` is the smallest set of candidate latents whose attribution reaches a coverage τ of the total. In cycle t + 1 its
encoder rows are latents 0 … C−1 and frozen. A latent's identity is (birth cycle, birth index), given when it is first
selected: indices mean nothing across cycles, and a feature that is dropped and learned again is a new latent.
`C* = C(T) ∩ C(T−1)`.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from dmsae.activations.identity import ModelIdentity
from dmsae.activations.store import Store
from dmsae.config import Json, from_dict, to_dict
from dmsae.disk import layout
from dmsae.disk.artifact import Bound, read_artifact, read_sealed, seal_of, write_artifact
from dmsae.errors import CheckpointError, ConfigError, first_line
from dmsae.sae.detectors import Detectors

DISTILLED_SEAL = "distilled_sha256"
"""Under what name the summary of a run holds the seal of its distilled core."""


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

    def told(self) -> str:
        """Return it in words."""
        times = {1: "once", 2: "twice"}.get(len(self.selected_in), f"{len(self.selected_in)} times")
        return f"born in cycle {self.birth_cycle} as latent {self.birth_index}, selected {times}"


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a core was distilled from."""

    model: ModelIdentity
    """The base model, its hook included."""
    store: str
    """Key of the activation store."""
    config: Json
    """The settings of the run, as JSON values."""

    @classmethod
    def of(cls, store: Store, config: Json) -> Self:
        """Return the provenance of what is made from a store."""
        return cls(store.model, store.key, config)


@dataclass(frozen=True, slots=True, eq=False)
class Core:
    """Selected latents, in descending order of attribution.

    >>> core = dmsae.Core.load(run)  # the distilled core of a run; a cycle's directory works too
    >>> core.encoder_CD.shape == (len(core), 16)
    True
    >>> core.lineage[0].birth_cycle < core.cycle
    True
    """

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
    detectors: Detectors | None = None
    """Their offsets and thresholds, float32, for raw activations; None for rows that are all there is."""

    def __post_init__(self) -> None:
        n = len(self.lineage)
        if self.encoder_CD.ndim != 2 or not self.encoder_CD.isfinite().all():
            raise CheckpointError(
                f"The encoder rows of a core have shape {tuple(self.encoder_CD.shape)}; expected a matrix of finite "
                "numbers."
            )
        shapes = [tuple(t.shape) for t in (self.encoder_CD[:, :1], self.scores_C, self.slots_C)]
        if shapes != [(n, 1), (n,), (n,)] or self.encoder_CD.dtype != torch.float32:
            raise CheckpointError(
                f"A core of {n} latents has rows {tuple(self.encoder_CD.shape)} in {self.encoder_CD.dtype}, "
                f"{len(self.scores_C)} scores and {len(self.slots_C)} slots; expected {n} of each, rows in float32."
            )
        if self.detectors and {tuple(values_C.shape) for values_C in self.detectors} != {(n,)}:
            raise CheckpointError(f"A core of {n} latents needs {n} offsets and thresholds, or none.")
        if len(set(self.identities)) != n:
            raise CheckpointError(f"A core of {n} latents holds only {len(set(self.identities))} distinct identities.")

    def __len__(self) -> int:
        return len(self.lineage)

    @property
    def identities(self) -> list[tuple[int, int]]:
        """(birth cycle, birth index) of each latent, in order."""
        return [latent.identity for latent in self.lineage]

    @property
    def is_selected(self) -> bool:
        """Whether its latents were selected from an SAE; random rows were not."""
        return all(latent.selected_in for latent in self.lineage)

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
            detectors=Detectors(*(values_C[indices] for values_C in self.detectors)) if self.detectors else None,
        )

    def save(self, directory: Path, bound_to: Bound | None = None) -> None:
        """Write `core.safetensors` and `core.json`, bound to what it was selected from."""
        tensors = {"encoder": self.encoder_CD, "scores": self.scores_C, "slots": self.slots_C}
        if self.detectors is not None:
            tensors |= {"offsets": self.detectors.offsets_C, "thresholds": self.detectors.thresholds_C}
        facts = {
            "format": layout.FORMAT,
            "cycle": self.cycle,
            "n_latents": len(self),
            "provenance": to_dict(self.provenance),
            "lineage": to_dict(self.lineage),
        }
        write_artifact(directory, layout.CORE, tensors, facts, bound_to)

    @classmethod
    def load(cls, place: Path | str) -> Self:
        """Return the core in a directory, or the distilled core of a distillation run.

        Anything that is not as it was written is a `CheckpointError`.
        """
        directory = _with_core(Path(place))
        _require_own_distilled(directory)
        tensors, facts = read_artifact(directory, layout.CORE)
        try:
            return cls(
                encoder_CD=tensors["encoder"],
                scores_C=tensors["scores"],
                slots_C=tensors["slots"],
                lineage=tuple(from_dict(Lineage, latent) for latent in facts["lineage"]),
                cycle=int(facts["cycle"]),
                provenance=from_dict(Provenance, facts["provenance"]),
                detectors=Detectors(tensors["offsets"], tensors["thresholds"]) if "offsets" in tensors else None,
            )
        except (KeyError, TypeError, ValueError, RuntimeError, ConfigError, CheckpointError) as error:
            path = directory / layout.CORE
            raise CheckpointError(f"{path}.json does not describe a core: {first_line(error)}. Restore it.") from error


def _require_own_distilled(directory: Path) -> None:
    """Raise when another core is in the place of the one that a distillation ended with."""
    summary = directory.parent / layout.SUMMARY
    if directory.name != layout.DISTILLED or not summary.is_file():
        return
    seal = read_sealed(summary, must_be_sealed=False).get(DISTILLED_SEAL)
    if seal is not None and seal != seal_of(directory / f"{layout.CORE}.json"):
        raise CheckpointError(
            f"{directory / layout.CORE}.json is not the core that this run ended with. Restore it; or run the same "
            "command again, which makes it again."
        )


def _with_core(place: Path) -> Path:
    """Return the directory that holds the core: the one given, or that of a run's distilled core."""
    for directory in (place, place / layout.DISTILLED):
        if layout.has_artifact(directory, layout.CORE):
            return directory
    raise CheckpointError(f"{place} holds no core, and is not the directory of a finished distillation.")
