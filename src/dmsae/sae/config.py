"""What an SAE is, apart from its weights: its width, its nested prefixes, its core and its sparsity.

`nesting` is always without a core, `prefixes` always with it: a *nesting* (64, 192, 2048) around a core of 50 latents
makes the *prefixes* (114, 242, 2048).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Literal

from torch import Tensor

from dmsae.config import require, require_whole
from dmsae.errors import ConfigError
from dmsae.sae.detectors import Detectors

_FRACTIONS = (1 / 32, 1 / 16, 1 / 8, 1 / 4)


@dataclass(frozen=True, slots=True)
class DenseCore:
    """A core that fires freely: only the other latents compete in BatchTopK.

    >>> core = dmsae.DenseCore(n=50, k_noncore=39)
    >>> dmsae.SAEConfig(d_model=576, width=4096, k=40, prefixes=(178, 4096), core=core).k_selected
    39
    """

    n: int
    """Number C of core latents."""
    k_noncore: int
    """Non-core latents that BatchTopK keeps per token, on average over the batch."""
    kind: Literal["dense"] = "dense"

    def __post_init__(self) -> None:
        require_whole("core.n", self.n, 1)
        require_whole("core.k_noncore", self.k_noncore, 1)


@dataclass(frozen=True, slots=True)
class SparseCore:
    """A core that competes in BatchTopK like any other latent.

    >>> core = dmsae.SparseCore(n=50)
    >>> dmsae.SAEConfig(d_model=576, width=4096, k=40, prefixes=(178, 4096), core=core).k_selected
    40
    """

    n: int
    """Number C of core latents."""
    kind: Literal["sparse"] = "sparse"

    def __post_init__(self) -> None:
        require_whole("core.n", self.n, 1)


@dataclass(frozen=True, slots=True)
class DetectorCore:
    """A core of frozen detectors: row, offset and threshold are given, and only its decoder rows are learned.

    >>> core = dmsae.DetectorCore(n=50, k_noncore=30)
    >>> dmsae.SAEConfig(d_model=576, width=4096, k=40, prefixes=(178, 4096), core=core).k_selected
    30
    """

    n: int
    """Number C of core latents."""
    k_noncore: int
    """Non-core latents that BatchTopK keeps per token, on average over the batch."""
    kind: Literal["detector"] = "detector"

    def __post_init__(self) -> None:
        require_whole("core.n", self.n, 1)
        require_whole("core.k_noncore", self.k_noncore, 1)


CoreConfig = DenseCore | SparseCore | DetectorCore


class CoreMode(StrEnum):
    """What of a core is frozen, and how it takes part in BatchTopK."""

    DENSE = "dense"
    """Its encoder rows are frozen and it fires freely; only the other latents compete. As in the paper."""
    SPARSE = "sparse"
    """Its encoder rows are frozen and it competes like any other latent."""
    DETECTOR = "detector"
    """Rows, offsets and thresholds are frozen: its activations are the same in every SAE that carries it."""

    def core(self, n: int, k_noncore: int) -> CoreConfig:
        """Return a core of this mode; a sparse one has no use for `k_noncore`."""
        match self:
            case CoreMode.DENSE:
                return DenseCore(n, k_noncore)
            case CoreMode.SPARSE:
                return SparseCore(n)
            case CoreMode.DETECTOR:
                return DetectorCore(n, k_noncore)


@dataclass(frozen=True, slots=True)
class SAEConfig:
    """What an SAE is, apart from its weights.

    >>> dmsae.SAEConfig(d_model=576, width=4096, k=40, prefixes=(128, 384, 4096)).n_noncore
    4096
    """

    d_model: int
    """Width D of the activations."""
    width: int
    """Number K of latents, the core included."""
    k: int
    """Target sparsity: active latents per token that were asked for. Without a dense core, what BatchTopK keeps."""
    prefixes: tuple[int, ...]
    """Cumulative sizes of the nested reconstructions, the core included; the last is `width`."""
    core: CoreConfig | None = None
    """The frozen latents 0 … C−1, and how they take part in BatchTopK."""
    center_input: bool = True
    """Whether the encoder sees x − b_dec rather than x."""

    def __post_init__(self) -> None:
        for name in ("d_model", "width", "k"):
            require_whole(name, getattr(self, name), 1)
        require(self.n_core < self.width, "core.n", self.n_core, f"be smaller than width ({self.width})")
        _require_prefixes(self.prefixes, self.width, self.n_core)
        name = "core.k_noncore" if self.n_dense else "k"
        must = f"be at most the {self.n_competing} latents that compete in BatchTopK"
        require(self.k_selected <= self.n_competing, name, self.k_selected, must)

    @property
    def n_core(self) -> int:
        """Number C of core latents."""
        return self.core.n if self.core else 0

    @property
    def n_noncore(self) -> int:
        """Number of non-core latents."""
        return self.width - self.n_core

    @property
    def n_dense(self) -> int:
        """Number of leading latents that bypass BatchTopK: the core, unless it is sparse."""
        return self.core.n if isinstance(self.core, DenseCore | DetectorCore) else 0

    @property
    def n_detectors(self) -> int:
        """Number of leading latents that are frozen detectors: the core if it is made of them, else none."""
        return self.core.n if isinstance(self.core, DetectorCore) else 0

    @property
    def n_competing(self) -> int:
        """Number of latents that compete in BatchTopK."""
        return self.width - self.n_dense

    @property
    def k_selected(self) -> int:
        """Latents that BatchTopK keeps per token: `k_noncore` beside a dense or detector core, else `k`."""
        return self.core.k_noncore if isinstance(self.core, DenseCore | DetectorCore) else self.k

    def require_latents(self, latents: Iterable[int]) -> None:
        """Raise unless this SAE has all of these latents."""
        if wrong := [latent for latent in latents if not 0 <= latent < self.width]:
            raise ConfigError(f"latents = {wrong}; the SAE has latents 0 to {self.width - 1}.")

    def require_core_rows(self, core_rows: Tensor | None) -> None:
        """Raise unless encoder rows fit this SAE's core."""
        expected = (self.n_core, self.d_model)
        given = (0, self.d_model) if core_rows is None else tuple(core_rows.shape)
        if given != expected:
            raise ConfigError(f"core_rows has shape {given}; it must have shape {expected}.")
        if core_rows is not None and not (finite := core_rows.isfinite().all(1)).all():
            row = int((~finite).nonzero()[0])
            raise ConfigError(f"core_rows is not finite in row {row}. Check where the core came from.")

    def require_detectors(self, detectors: Detectors | None) -> None:
        """Raise unless offsets and thresholds are given exactly when this SAE's core is made of detectors."""
        if detectors is None and self.n_detectors:
            raise ConfigError(
                "A core of detectors needs offsets and thresholds, and this one has none: it was made by an earlier "
                "version, or its rows are all there is. Distill again, or use a dense or sparse core."
            )
        for name, values_C in detectors._asdict().items() if detectors else ():
            if values_C.shape != (self.n_detectors,) or not values_C.isfinite().all():
                raise ConfigError(f"{name} must be {self.n_detectors} finite numbers, one for each detector.")


def matryoshka_nesting(width: int) -> tuple[int, ...]:
    """Return the published nesting: groups of 1/32, 1/16, 1/8, 1/4 of `width` and the rest, as cumulative sizes."""
    require_whole("width", width, 32)
    sizes = [int(fraction * width) for fraction in _FRACTIONS]
    return (*accumulate(sizes), width)


def core_first(nesting: tuple[int, ...], n_core: int) -> tuple[int, ...]:
    """Return the prefixes of a nesting with the core before its groups; the last group makes room for the core."""
    require(_rises(nesting, 0), "nesting", nesting, "be whole numbers above 0 that rise")
    if len(nesting) > 1 and nesting[-2] + n_core >= nesting[-1]:
        raise ConfigError(
            f"A core of {n_core} latents does not fit: width {nesting[-1]} with the nesting {nesting} leaves room for "
            f"{max(0, nesting[-1] - nesting[-2] - 1)}. Choose a larger width, or smaller groups."
        )
    return (*(size + n_core for size in nesting[:-1]), nesting[-1])


def _require_prefixes(prefixes: tuple[int, ...], width: int, n_core: int) -> None:
    must = f"be whole numbers that rise from above the core's size ({n_core}) to width ({width})"
    require(_rises(prefixes, n_core) and prefixes[-1] == width, "prefixes", prefixes, must)


def _rises(sizes: tuple[int, ...], low: int) -> bool:
    """Return whether there are sizes, all whole numbers, each larger than the one before and the first than `low`."""
    whole = isinstance(sizes, tuple) and bool(sizes) and all(type(size) is int for size in sizes)
    return whole and all(smaller < larger for smaller, larger in pairwise((low, *sizes)))
