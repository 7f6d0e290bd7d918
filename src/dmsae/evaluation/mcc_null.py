"""What matching gives for random directions: the nulls of PW-MCC."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.cores.null import covariance_matched_rows
from dmsae.disk.files import canonical_hash
from dmsae.evaluation.assignment import Matching, match_rows
from dmsae.evaluation.shared import kept_tensors
from dmsae.seeds import derive_seed, generator

_VERSION = 1


class NullMcc(NamedTuple):
    """PW-MCC of as many directions drawn evenly; encoder and decoder do not differ in them."""

    signed: float
    absolute: float


class IsotropicNulls:
    """PW-MCC of directions drawn evenly, by their numbers: simulated once, and kept if there is a place for it."""

    def __init__(self, seed: int = 0, cache: Path | None = None) -> None:
        self._seed, self._cache = seed, cache
        self._known: dict[tuple[int, int, int], NullMcc] = {}

    def of(self, n_first: int, n_second: int, d_model: int) -> NullMcc:
        """Return what so many directions in so many dimensions give."""

        def simulate() -> dict[str, Tensor]:
            draws = generator(self._seed, "isotropic null")
            first, second = (torch.randn(n, d_model, generator=draws) for n in (n_first, n_second))
            signed, absolute = (match_rows(first, second, by_size).cosines_K for by_size in (False, True))
            return {"mcc": torch.stack([signed.nanmean(), absolute.abs().nanmean()])}

        sizes = (n_first, n_second, d_model)
        if sizes not in self._known:
            name = f"mcc-null-{canonical_hash([_VERSION, *sizes, self._seed])[:16]}.safetensors"
            kept = kept_tensors(self._cache / name if self._cache else None, simulate)
            self._known[sizes] = NullMcc(*kept["mcc"].tolist())
        return self._known[sizes]


def rows_like(rows_KD: Tensor, seed: int, side: int) -> Tensor | None:
    """Return as many random directions that are as unevenly spread as some rows; None for rows without a spread.

    Seed and side (the first or the second of two SAEs) decide how the rows are combined. Drawn with the same, decoder
    and encoder rows of an SAE are combined in the same way, and row i of either belongs to one random latent.
    """
    unit = torch.nn.functional.normalize(rows_KD.detach().double().cpu(), dim=1)
    if (unit == unit[0]).all():
        return None
    return covariance_matched_rows(unit, len(unit), derive_seed(seed, "own covariance", side))


def own_covariance_matching(first_KD: Tensor, second_KD: Tensor, seed: int) -> Matching | None:
    """Return the matching of random directions that are as unevenly spread as two sets of rows, each as its own.

    It is what two sets have in common because they fill the same part of the space. None for sets without a spread.
    """
    first, second = (rows_like(rows, seed, side) for side, rows in enumerate((first_KD, second_KD)))
    return None if first is None or second is None else match_rows(first, second)
