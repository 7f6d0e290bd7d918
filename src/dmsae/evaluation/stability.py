"""Whether SAEs that were trained apart found the same latents, and whether these fire on the same tokens.

Latents of two SAEs are matched one to one, by decoder and by encoder, those of the core and all others separately. The
mean matched cosine is PW-MCC (Song et al. 2025, arXiv:2505.20254); a latent counts as shared when both matchings give
it the same partner at a cosine above 0.7 (Paulo & Belrose 2025, arXiv:2501.16615). Frequent latents are shared more, so
every figure is also given per bin of firing rate, and as the mean over bins. The null of all these figures are random
partners that fire as often as the real ones (`random_partners`). Only the draws of nulls depend on which of
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
from dmsae.evaluation.mcc_null import IsotropicNulls, NullMcc, rows_like
from dmsae.evaluation.partners import Part, Partners
from dmsae.evaluation.random_partners import Drawn, random_values
from dmsae.evaluation.subject import Subject, require_heldout
from dmsae.evaluation.survival import between
from dmsae.progress import SILENT, Progress
from dmsae.sae.sae import SAE

_STEPS = 7
"""Four matchings of a group of latents, random directions, a comparison of firing, and one with random partners."""


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
    null: Means
    """The same latents with random partners."""


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
    null_all: Means
    """What `all` is for random partners that fire as often: the null of each of its figures."""
    null_over_bins: Means
    """The same for `over_bins`."""


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
    outside = Part(one, slice(core, one.config.width)), Part(other, slice(other_core, other.config.width))
    groups = {"noncore": _Group(*outside, store, config, step)}
    if _both_have_cores(one, other):
        inside = Part(one, slice(0, core)), Part(other, slice(0, other_core))
        groups["core"] = _Group(*inside, store, config, step, by_index=_same_core(one, other))
    return groups


class _Group:
    """Some latents of one SAE matched with some of another, one by one."""

    def __init__(
        self,
        one: Part,
        other: Part,
        store: Store,
        config: StabilityConfig,
        step: Callable[[], None],
        by_index: bool = False,
    ) -> None:
        parts = one, other
        self._n, self._edges = (one.n, other.n), rate_edges(config.bins_per_decade)
        self._d_model = one.sae.config.d_model
        decoder, encoder, self._mcc = _matchings(list(zip(one.rows, other.rows, strict=True)), step)
        drawn = [Drawn(*(rows_like(rows, config.seed, side) for rows in part.rows)) for side, part in enumerate(parts)]
        self._nulls = [_mcc_of(*both) for both in zip(*drawn, strict=True)]
        step()
        # A core that is the same one is not matched: a latent's partner is the latent in its place.
        partners = Partners.by_index(*parts) if by_index else Partners.by_rows(decoder, encoder, other.n)
        matched = (partners.of_K >= 0).nonzero().squeeze(1)
        places = matched, partners.of_K[matched]
        latents, others = (places_C + part.latents.start for places_C, part in zip(places, parts, strict=True))
        alike = between(one.sae, latents, other.sae, others, store, n_top=1)
        step()
        rates = alike.rate_before_C, alike.rate_after_C
        self._rates = (rates[0] + rates[1]) / 2
        self._bin = torch.bucketize(self._rates, self._edges)
        self._values = partners.values(alike, matched, config.min_cosine)
        # The more numerous ones are replaced: then every one of the others has a random partner, too.
        kept, replaced = (0, 1) if one.n <= other.n else (1, 0)
        self._null_values = random_values(
            parts[kept], places[kept], parts[replaced], rates[replaced], drawn[replaced], store, config.min_cosine
        )
        step()

    @property
    def occupied(self) -> set[int]:
        """Bins of firing rate that some latent is in."""
        return set(self._bin[self._rates > 0].tolist())

    def figures(self, nulls: IsotropicNulls, bins: set[int]) -> GroupStability:
        """Return the figures; the mean over bins takes those named."""
        per_bin = {
            index: RateBin(
                float(self._edges[max(0, index - 1)]),
                float(self._edges[index]),
                _means(self._values, self._in_bin(index)),
                _means(self._null_values, self._in_bin(index)),
            )
            for index in sorted(self.occupied)
        }
        over = [per_bin[index] for index in sorted(bins)]
        everywhere = torch.ones(len(self._rates), dtype=torch.bool)
        return GroupStability(
            *self._n,
            mcc=self._mcc,
            null_isotropic=nulls.of(*self._n, self._d_model),
            null_decoder=self._nulls[0],
            null_encoder=self._nulls[1],
            all=_means(self._values, everywhere),
            bins=list(per_bin.values()),
            n_silent=int((self._rates == 0).sum()),
            over_bins=mean_of_means([one.means for one in over]),
            null_all=_means(self._null_values, everywhere),
            null_over_bins=mean_of_means([one.null for one in over]),
        )

    def _in_bin(self, index: int) -> Tensor:
        return (self._bin == index) & (self._rates > 0)


def _mcc_of(first: Tensor | None, second: Tensor | None) -> float | None:
    """Return the signed PW-MCC of random directions; None if there are none."""
    return None if first is None or second is None else _mean(match_rows(first, second).cosines_K)


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


def _means(values: Mapping[str, Tensor], which: Tensor) -> Means:
    return Means(int(which.sum()), **{name: _mean_or_none(of_latents[which]) for name, of_latents in values.items()})


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
