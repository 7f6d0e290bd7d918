"""How well an SAE reconstructs text it has never seen, as it is used: with its thresholds, on held-out activations.

The figures of a trained SAE are measured once, over the whole held-out split, and kept beside it in `fidelity.json`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.config import Json
from dmsae.disk import layout
from dmsae.disk.artifact import bound, read_sealed, write_sealed
from dmsae.errors import CheckpointError
from dmsae.evaluation.subject import Dictionary, Subject, require_heldout
from dmsae.progress import SILENT, Progress
from dmsae.sae.sae import SAE
from dmsae.sae.variance import VarianceExplained

_BATCH = 1024
_REMEDY = "Remove it: it will be measured again."


class Half(StrEnum):
    """A half of the held-out activations. They are stored in reading order, so the other half is other text."""

    FIRST = "first"
    SECOND = "second"


class Fidelity(NamedTuple):
    """Held-out figures of one SAE."""

    n_tokens: int
    fve: float
    """Fraction of the variance explained by the full reconstruction."""
    fve_prefixes: list[float]
    """The same for each prefix, the smallest first; the last is `fve`."""
    l0_core: float
    """Core latents that fire per token."""
    l0_noncore: float
    """Other latents that fire per token."""


@dataclass(frozen=True, slots=True)
class FidelityConfig:
    """How reconstruction is measured: there is nothing to set, it takes the whole held-out split."""


class FidelityResult(NamedTuple):
    """How well a dictionary reconstructs held-out activations."""

    n_tokens: int
    fve: float
    """Fraction of the variance about the mean that the full reconstruction explains; the mean itself explains 0."""
    fve_prefixes: list[float]
    """The same for each prefix, the smallest first; the last is `fve`."""
    cosine: float
    """Cosine of an activation and its reconstruction, mean over tokens."""
    l0: float
    """Latents that fire per token, at inference."""
    l0_core: float
    l0_noncore: float


@torch.no_grad()
def fidelity(sae: SAE, store: Store, progress: Progress = SILENT, half: Half | None = None) -> Fidelity | None:
    """Return the figures over all held-out activations of a store, or a half of them; None when it holds none.

    >>> figures = dmsae.fidelity(dmsae.SAE.load(run / "cycle-0" / "sae"), store)
    >>> 0 < figures.fve_prefixes[0] < figures.fve < 1
    True
    """
    reconstruction = _Reconstruction(sae)
    with progress.bar("held-out", store.n_rows(Split.HELDOUT), "tok") as bar:
        for x_BD in _heldout(store, half):
            reconstruction.add(x_BD)
            bar.advance(len(x_BD))
    if not reconstruction.n_tokens:
        return None
    figures = reconstruction.figures()
    return Fidelity(figures.n_tokens, figures.fve, figures.fve_prefixes, figures.l0_core, figures.l0_noncore)


def _heldout(store: Store, half: Half | None) -> Iterator[Tensor]:
    """Yield the held-out activations of a store, or a half of them, in batches."""
    n_rows = store.n_rows(Split.HELDOUT)
    low = n_rows // 2 if half is Half.SECOND else 0
    high = n_rows // 2 if half is Half.FIRST else n_rows
    start = 0
    for batch in store.batches(Split.HELDOUT, _BATCH):
        x_BD = batch["x"][max(low - start, 0) : max(high - start, 0)]
        start += len(batch["x"])
        if len(x_BD):
            yield x_BD


@torch.no_grad()
def measure_fidelity(
    subjects: Sequence[Subject], store: Store, config: FidelityConfig, progress: Progress = SILENT
) -> list[FidelityResult]:
    """Return how well each subject reconstructs all held-out activations of a store, read once for all of them."""
    n_tokens = require_heldout(store, subjects)
    reconstructions = [_Reconstruction(subject.dictionary) for subject in subjects]
    with progress.bar("fidelity", n_tokens * len(subjects), "tok") as bar:
        for batch in store.batches(Split.HELDOUT, _BATCH):
            for reconstruction in reconstructions:
                reconstruction.add(batch["x"])
                bar.advance(len(batch["x"]))
    return [reconstruction.figures() for reconstruction in reconstructions]


class _Reconstruction:
    """What one dictionary made of many batches."""

    def __init__(self, dictionary: Dictionary) -> None:
        self._dictionary, config = dictionary, dictionary.config
        self._explained = VarianceExplained(config.d_model, len(config.prefixes))
        self._fired_core = self._fired = 0
        self._cosines = 0.0

    @property
    def n_tokens(self) -> int:
        return self._explained.n_tokens

    def add(self, x_BD: Tensor) -> None:
        """Take in a batch of raw activations."""
        x_BD = x_BD.to(self._dictionary.W_dec)
        f_BK = self._dictionary.encode(x_BD)
        nested = _nested(self._dictionary, f_BK)
        self._explained.add(x_BD, *nested)
        self._cosines += float(torch.cosine_similarity(x_BD, nested[-1]).sum(dtype=torch.float64))
        self._fired += int((f_BK > 0).sum())
        self._fired_core += int((f_BK[:, : self._dictionary.config.n_core] > 0).sum())

    def figures(self) -> FidelityResult:
        """Return the figures over everything added."""
        n, fractions = self.n_tokens, self._explained.fractions()
        l0, l0_core = self._fired / n, self._fired_core / n
        return FidelityResult(n, fractions[-1], fractions, self._cosines / n, l0, l0_core, l0 - l0_core)


def _nested(dictionary: Dictionary, f_BK: Tensor) -> list[Tensor]:
    """Return the reconstructions of all prefixes, each from the one before it: together they cost one decoding."""
    W_dec, start = dictionary.W_dec, 0
    reconstructions = [dictionary.b_dec.expand(len(f_BK), -1)]
    for size in dictionary.config.prefixes:
        reconstructions.append(torch.addmm(reconstructions[-1], f_BK[:, start:size], W_dec[start:size]))
        start = size
    return reconstructions[1:]


def kept_fidelity(
    directory: Path,
    store: Store,
    device: torch.device | str = "cpu",
    progress: Progress = SILENT,
    half: Half | None = None,
) -> Fidelity | None:
    """Return the held-out figures of the SAE in a directory: those kept beside it, or measured now and kept.

    None when the store holds no held-out activations, or the SAE is no longer finite.
    """
    path = directory / layout.fidelity(half)
    kept = _read(path)
    if kept.get("store") != store.key:
        figures = fidelity(SAE.load(directory).to(device), store, progress, half)
        usable = figures is not None and math.isfinite(figures.fve)
        kept = {"store": store.key, "root": str(store.path.parent.resolve())}
        kept |= {"figures": figures._asdict() if figures and usable else None}
        write_sealed(path, kept, bound(directory, directory / f"{layout.SAE}.json"))
    try:
        return Fidelity(**kept["figures"]) if kept["figures"] else None
    except TypeError as error:
        raise CheckpointError(f"{path} does not hold the figures of an SAE. {_REMEDY}") from error


def _read(path: Path) -> Json:
    """Return what is kept, or nothing when nothing is."""
    kept = read_sealed(path, _REMEDY, must_be_sealed=False) if path.is_file() else {}
    return kept if set(kept) == {"store", "root", "figures"} else {}
