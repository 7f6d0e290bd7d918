"""What matching gives for random directions: the null of PW-MCC, from one simulation for all pairs of a shape."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.activations.store import Store
from dmsae.cores.null import covariance_matched_rows
from dmsae.cores.statistics import sample_activations
from dmsae.disk.files import canonical_hash
from dmsae.evaluation.assignment import match_rows
from dmsae.evaluation.shared import kept_tensors
from dmsae.seeds import derive_seed, generator

_VERSION = 1


class NullMcc(NamedTuple):
    """PW-MCC of as many random directions; encoder and decoder do not differ in them."""

    signed: float
    absolute: float


class MccNulls:
    """PW-MCC of random directions by their numbers; each is simulated once, and kept if there is a place for it."""

    def __init__(self, store: Store, seed: int = 0, cache: Path | None = None) -> None:
        self._store, self._seed, self._cache = store, seed, cache
        self._known: dict[str, NullMcc] = {}

    def isotropic(self, n_first: int, n_second: int) -> NullMcc:
        """Return what directions drawn evenly give."""
        width = self._store.d_model
        return self._null(
            f"isotropic in {width}",
            (n_first, n_second),
            lambda n, seed: torch.randn(n, width, generator=generator(seed, "isotropic")),
        )

    def covariance(self, n_first: int, n_second: int) -> NullMcc:
        """Return what directions drawn with the covariance of the store's activations give."""
        return self._null(
            f"covariance of {self._store.key}",
            (n_first, n_second),
            lambda n, seed: covariance_matched_rows(sample_activations(self._store), n, seed),
        )

    def _null(self, kind: str, sizes: tuple[int, int], draw: Callable[[int, int], Tensor]) -> NullMcc:
        def simulate() -> dict[str, Tensor]:
            first, second = (draw(n, derive_seed(self._seed, "null", side)) for side, n in enumerate(sizes))
            signed, absolute = (match_rows(first, second, by_size).cosines_K for by_size in (False, True))
            return {"mcc": torch.stack([signed.nanmean(), absolute.abs().nanmean()])}

        name = canonical_hash([_VERSION, kind, *sizes, self._seed])[:16]
        if name not in self._known:
            kept = kept_tensors(self._cache / f"mcc-null-{name}.safetensors" if self._cache else None, simulate)
            self._known[name] = NullMcc(*kept["mcc"].tolist())
        return self._known[name]
