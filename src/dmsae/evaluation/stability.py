"""Whether SAEs that were trained apart found the same latents, and whether these fire on the same tokens.

Latents of two SAEs are matched one to one, by decoder and by encoder, those of the core and all others separately. The
mean matched cosine is PW-MCC (Song et al. 2025, arXiv:2505.20254); a latent counts as shared when both matchings give
it the same partner at a cosine above 0.7 (Paulo & Belrose 2025, arXiv:2501.16615). Frequent latents are shared more, so
every figure is also given per bin of firing rate, and as the mean over bins. Only the draws of nulls depend on which of
two SAEs is the first. Pairs of three or more SAEs depend on each other: each is reported, and their mean without an
interval.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.activations.store import Store
from dmsae.config import require, require_whole
from dmsae.evaluation.activity import rate_edges
from dmsae.evaluation.assignment import Matching, match_rows
from dmsae.evaluation.mcc_null import IsotropicNulls, NullMcc, own_covariance_null
from dmsae.evaluation.subject import Subject, require_heldout
from dmsae.evaluation.survival import between
from dmsae.progress import SILENT, Progress
from dmsae.sae.sae import SAE

_STEPS = 6
"""Four matchings of a group of latents, its nulls, and one comparison of firing."""


@dataclass(frozen=True, slots=True)
class StabilityConfig:
    """What counts as shared, and how firing rates are binned."""

    min_cosine: float = 0.7
    """A latent is shared when its partner is above this by encoder and by decoder."""
    bins_per_decade: int = 2
    """Bins of firing rate for each factor of ten."""
    seed: int = 0
    """Decides the random directions of the nulls."""

    def __post_init__(self) -> None:
        require(-1 <= self.min_cosine < 1, "min_cosine", self.min_cosine, "be at least -1 and below 1")
        require_whole("bins_per_decade", self.bins_per_decade, 1)


class Means(NamedTuple):
    """How alike matched latents are, on average; None where no latent has a value."""

    n: int
    """Latents, or bins where the mean is over bins."""
    decoder: float | None
    """Cosine of decoder rows, matched by decoder."""
    encoder: float | None
    """Cosine of encoder rows, matched by encoder: the mean of a latent's and of its decoder partner's."""
    shared: float | None
    """Share with one partner by encoder and by decoder, above the bound in both."""
    jaccard: float | None
    """Tokens on which both fire, as a share of those on which either does; partners by decoder."""
    jaccard_chance: float | None
    """The same if both fired independently at these rates."""
    correlation: float | None
    """Of their activations over all tokens."""


class RateBin(NamedTuple):
    """Latents of similar firing rate, as the mean of both partners'; the bin includes its upper edge."""

    low: float
    high: float
    means: Means


class Mcc(NamedTuple):
    """PW-MCC: the mean cosine of latents matched one to one."""

    decoder_signed: float
    decoder_absolute: float
    encoder_signed: float
    encoder_absolute: float


class GroupStability(NamedTuple):
    """How stable the core, or the other latents, of two SAEs are."""

    n_first: int
    n_second: int
    mcc: Mcc
    null_isotropic: NullMcc
    """Directions drawn evenly."""
    null_decoder: float | None
    """Directions drawn with the covariance of the decoder rows, signed: what comes of filling the same space alone."""
    null_encoder: float | None
    """The same for encoder rows."""
    all: Means
    """Over all matched latents."""
    bins: list[RateBin]
    n_silent: int
    """Matched latents that fire in neither SAE. They are in no bin."""
    over_bins: Means
    """The mean over bins, each counting once, of those that the core and the other latents both have."""


class PairStability(NamedTuple):
    """Two SAEs, compared."""

    first: str
    second: str
    same_core: bool
    """Whether both carry the same frozen encoder rows: their core then agrees by construction, by index."""
    core: GroupStability | None
    noncore: GroupStability


@torch.no_grad()
def stability(
    saes: Mapping[str, SAE],
    store: Store,
    config: StabilityConfig | None = None,
    cache: Path | None = None,
    progress: Progress = SILENT,
) -> list[PairStability]:
    """Return how stable latents are between each two of several SAEs, by name, on a store's held-out activations.

    >>> saes = {f"cycle {i}": dmsae.SAE.load(run / f"cycle-{i}" / "sae") for i in (0, 1)}
    >>> (pair,) = dmsae.stability(saes, store)
    >>> pair.noncore.mcc.decoder_signed > pair.noncore.null_decoder
    True
    """
    config = config or StabilityConfig()
    require(len(saes) >= 2, "saes", list(saes), "be at least two SAEs")
    require_heldout(store, [Subject(name, sae) for name, sae in saes.items()])
    nulls = IsotropicNulls(config.seed, cache)
    pairs = list(combinations(saes, 2))
    n_groups = sum(1 + _both_have_cores(saes[first], saes[second]) for first, second in pairs)
    results = []
    with progress.bar("stability", n_groups * _STEPS, "steps") as bar:
        for first, second in pairs:
            groups = _groups(saes[first], saes[second], store, config, lambda: bar.advance(1))
            bins = set.intersection(*(group.occupied for group in groups.values()))
            figures = {name: group.figures(nulls, bins) for name, group in groups.items()}
            same_core = _same_core(saes[first], saes[second])
            results.append(PairStability(first, second, same_core, figures.get("core"), figures["noncore"]))
    return results


def _both_have_cores(one: SAE, other: SAE) -> bool:
    return bool(one.config.n_core and other.config.n_core)


def _same_core(one: SAE, other: SAE) -> bool:
    return _both_have_cores(one, other) and torch.equal(one.W_enc_core.cpu(), other.W_enc_core.cpu())


def _groups(
    one: SAE, other: SAE, store: Store, config: StabilityConfig, step: Callable[[], None]
) -> "dict[str, _Group]":
    """Return the core and the other latents of two SAEs, matched; no core unless both have one."""
    core, other_core = one.config.n_core, other.config.n_core
    outside = _Part(one, slice(core, one.config.width)), _Part(other, slice(other_core, other.config.width))
    groups = {"noncore": _Group(*outside, store, config, step)}
    if _both_have_cores(one, other):
        inside = _Part(one, slice(0, core)), _Part(other, slice(0, other_core))
        groups["core"] = _Group(*inside, store, config, step, by_index=_same_core(one, other))
    return groups


class _Part(NamedTuple):
    """Some latents of an SAE, one after another."""

    sae: SAE
    latents: slice

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Decoder and encoder rows."""
        return self.sae.W_dec[self.latents], self.sae.W_enc[self.latents]


class _Group:
    """Some latents of one SAE matched with some of another, one by one."""

    def __init__(
        self,
        one: _Part,
        other: _Part,
        store: Store,
        config: StabilityConfig,
        step: Callable[[], None],
        by_index: bool = False,
    ) -> None:
        rows = list(zip(one.rows, other.rows, strict=True))
        self._n, self._edges = (len(rows[0][0]), len(rows[0][1])), rate_edges(config.bins_per_decade)
        self._d_model = one.sae.config.d_model
        decoder, encoder, self._mcc = _matchings(rows, step)
        self._nulls = [own_covariance_null(*both, config.seed) for both in rows]
        step()
        if by_index:  # the core is the same one: a latent's partner is the latent in its place
            partners = torch.arange(self._n[0])
            cosines = [torch.cosine_similarity(a.double(), b.double()).cpu() for a, b in rows]
            same = torch.ones_like(partners, dtype=torch.bool)
        else:
            partners, cosines = decoder.partners_K, [decoder.cosines_K, _of_both(encoder, decoder, self._n[1])]
            same = decoder.partners_K == encoder.partners_K
        matched = (partners >= 0).nonzero().squeeze(1)
        latents, others = matched + one.latents.start, partners[matched] + other.latents.start
        alike = between(one.sae, latents, other.sae, others, store, n_top=1)
        step()
        above = (cosines[0] > config.min_cosine) & (cosines[1] > config.min_cosine)
        self._rates = (alike.rate_before_C + alike.rate_after_C) / 2
        self._values = {
            "decoder": cosines[0][matched],
            "encoder": cosines[1][matched],
            "shared": (same & above)[matched].double(),
            "jaccard": alike.jaccard_C,
            "jaccard_chance": alike.jaccard_chance_C,
            "correlation": alike.correlation_C,
        }
        self._bin = torch.bucketize(self._rates, self._edges)

    @property
    def occupied(self) -> set[int]:
        """Bins of firing rate that some latent is in."""
        return set(self._bin[self._rates > 0].tolist())

    def figures(self, nulls: IsotropicNulls, bins: set[int]) -> GroupStability:
        """Return the figures; the mean over bins takes those named."""
        per_bin = {
            index: RateBin(
                float(self._edges[max(0, index - 1)]), float(self._edges[index]), self._means(self._in_bin(index))
            )
            for index in sorted(self.occupied)
        }
        over = [per_bin[index].means for index in sorted(bins)]
        return GroupStability(
            *self._n,
            mcc=self._mcc,
            null_isotropic=nulls.of(*self._n, self._d_model),
            null_decoder=self._nulls[0],
            null_encoder=self._nulls[1],
            all=self._means(torch.ones(len(self._rates), dtype=torch.bool)),
            bins=list(per_bin.values()),
            n_silent=int((self._rates == 0).sum()),
            over_bins=mean_of_means(over),
        )

    def _in_bin(self, index: int) -> Tensor:
        return (self._bin == index) & (self._rates > 0)

    def _means(self, which: Tensor) -> Means:
        return Means(int(which.sum()), **{name: _mean_or_none(values[which]) for name, values in self._values.items()})


def _matchings(rows: list[tuple[Tensor, Tensor]], step: Callable[[], None]) -> tuple[Matching, Matching, Mcc]:
    """Return the signed matchings by decoder and by encoder rows, and the mean cosines of these and by size."""
    found = []
    for (first, second), absolute in product(rows, (False, True)):
        found.append(match_rows(first, second, absolute))
        step()
    decoder, decoder_absolute, encoder, encoder_absolute = found
    return (
        decoder,
        encoder,
        Mcc(
            decoder_signed=_mean(decoder.cosines_K),
            decoder_absolute=_mean(decoder_absolute.cosines_K.abs()),
            encoder_signed=_mean(encoder.cosines_K),
            encoder_absolute=_mean(encoder_absolute.cosines_K.abs()),
        ),
    )


def _of_both(encoder: Matching, decoder: Matching, n_second: int) -> Tensor:
    """Return the mean encoder cosine of each latent and its partner by decoder, each with its partner by encoder."""
    of_second = torch.full((n_second,), torch.nan, dtype=torch.float64)
    of_second[encoder.partners_K[encoder.matched]] = encoder.cosines_K[encoder.matched]
    of_partner = of_second[decoder.partners_K].where(decoder.matched, torch.nan)
    return torch.stack([encoder.cosines_K, of_partner]).nanmean(0)


def mean_of_means(means: Sequence[Means]) -> Means:
    """Return the mean of each figure, every one of the means counting once; those without a value count nowhere."""
    columns = (
        [value for one in means if (value := getattr(one, name)) is not None] for name in Means._fields if name != "n"
    )
    return Means(len(means), *(sum(values) / len(values) if values else None for values in columns))


def _mean(values: Tensor) -> float:
    return float(values.nanmean())


def _mean_or_none(values: Tensor) -> float | None:
    known = values[~values.isnan()]
    return float(known.mean()) if len(known) else None
