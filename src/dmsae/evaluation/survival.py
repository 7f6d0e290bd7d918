"""What is left of a latent in another SAE: when it fires, how strongly, what it writes, and on what it fires most.

Both SAEs see the same held-out activations, as they are used: above their thresholds. One pass, in float64 sums; what
is remembered between batches is a few numbers and `n_top` positions for each latent, whatever the number of tokens.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.config import require_whole
from dmsae.cores.core import Core
from dmsae.errors import CheckpointError, ConfigError, StoreError
from dmsae.progress import SILENT, Progress
from dmsae.sae.config import SAEConfig
from dmsae.sae.detectors import Detectors, detect
from dmsae.sae.sae import SAE

_ELEMENTS = 1 << 19
"""Activations of one SAE in a batch: a few copies of them fit into the cache."""
_MAX_BATCH = 4096
_LAST_POSITION = (1 << 32) - 1
_FIGURES = ("rate_before", "rate_after", "jaccard", "jaccard_chance", "correlation", "decoder_cosine", "top_overlap")


class SurvivalSummary(NamedTuple):
    """Medians over latents; a figure is None when no latent has a value."""

    n_latents: int
    n_silent_before: int
    """Latents that never fire in the first SAE. Those that never fire in either count only in the rates."""
    n_silent_after: int
    """Latents that never fire in the second SAE."""
    rate_before: float | None
    rate_after: float | None
    jaccard: float | None
    jaccard_chance: float | None
    correlation: float | None
    """Over the latents that vary in both SAEs: look at `n_silent_after` beside it."""
    decoder_cosine: float | None
    top_overlap: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Survival:
    """How alike C latents of one SAE ("before") and C of another ("after") are, one by one, in float64.

    What has no value, such as the correlation of a latent that never fires, is NaN.
    """

    rate_before_C: Tensor
    """Share of positions on which the latent fires in the first SAE."""
    rate_after_C: Tensor
    """The same in the second."""
    jaccard_C: Tensor
    """Positions on which both fire, as a share of those on which either does."""
    jaccard_chance_C: Tensor
    """What the Jaccard would be if both fired independently, at these rates."""
    correlation_C: Tensor
    """Pearson correlation of the activations over all positions, zeros included."""
    decoder_cosine_C: Tensor
    """Cosine of the decoder rows."""
    top_overlap_C: Tensor
    """Positions that are among the `n_top` strongest of both, as a share of `n_top`. If both fire less often than that,
    as a share of how often the more frequent one fires."""
    n_tokens: int
    """Held-out positions looked at."""
    n_top: int
    """Strongest positions kept of each latent."""

    def rows(self) -> list[dict[str, float | None]]:
        """Return each latent's figures by name; what has no value is None."""
        columns = [getattr(self, f"{name}_C").tolist() for name in _FIGURES]
        return [
            {name: None if value != value else value for name, value in zip(_FIGURES, values, strict=True)}
            for values in zip(*columns, strict=True)
        ]

    def summary(self) -> SurvivalSummary:
        """Return the median of each figure over the latents that have it."""
        rows = self.rows()
        medians: dict[str, float | None] = {}
        for name in _FIGURES:
            values = [value for row in rows if (value := row[name]) is not None]
            medians[name] = statistics.median(values) if values else None
        n_silent_before, n_silent_after = (int((rate == 0).sum()) for rate in (self.rate_before_C, self.rate_after_C))
        return SurvivalSummary(len(rows), n_silent_before, n_silent_after, **medians)


def survival(
    core: Core, before: SAE, after: SAE, store: Store, n_top: int = 20, progress: Progress = SILENT
) -> Survival:
    """Return what is left of a core's latents in an SAE that carries it.

    `before` is the SAE that the core was selected from, `after` one whose latents 0 … C−1 are the core. A random core
    comes from no SAE: compare two SAEs that carry it with `between`.
    """
    core.provenance.model.require_same(store.model, "the core", f"the store {store.key}")
    _require_fits(before, store)
    _require_fits(after, store)
    require_selected_from(core, before)
    _require_carries(core, after)
    return between(before, core.slots_C, after, range(len(core)), store, n_top, progress)


@torch.no_grad()
def between(
    before: SAE,
    latents_before: Tensor | Sequence[int],
    after: SAE,
    latents_after: Tensor | Sequence[int],
    store: Store,
    n_top: int = 20,
    progress: Progress = SILENT,
) -> Survival:
    """Return how alike latents of two SAEs are on held-out activations: the first with the first, and so on."""
    require_whole("n_top", n_top, 1)
    n_latents = len(latents_before)
    if n_latents != len(latents_after):
        raise ConfigError(f"{n_latents} latents of one SAE and {len(latents_after)} of the other cannot be paired.")
    parts = [_Part(before, latents_before, store), _Part(after, latents_after, store)]
    n_tokens = store.n_rows(Split.HELDOUT)
    if not n_tokens:
        raise StoreError(f"The store {store.key} holds no held-out activations. Harvest with heldout_tokens > 0.")
    together = _Together(n_latents, n_top)
    with progress.bar("survival", n_tokens, "tok") as bar:
        for batch in store.batches(Split.HELDOUT, min(_MAX_BATCH, max(1, _ELEMENTS // n_latents))):
            together.add(*(part.encode(batch["x"]) for part in parts))
            bar.advance(len(batch["x"]))
    return together.figures(_cosines(parts[0].decoder_CD, parts[1].decoder_CD))


class _Part:
    """Some latents of an SAE, encoded without the cost of the others."""

    def __init__(self, sae: SAE, latents: Tensor | Sequence[int], store: Store) -> None:
        _require_fits(sae, store)
        latents_C = _checked(latents, sae.config.width).to(sae.W_dec.device)
        frozen_C = latents_C < sae.config.n_detectors
        self._frozen, self._learned = (mask.nonzero().squeeze(1) for mask in (frozen_C, ~frozen_C))
        self._sae = _sae_of(sae, latents_C[self._learned]) if len(self._learned) else None
        self._rows_CD = sae.W_enc_core[latents_C[self._frozen]]
        self._detectors = Detectors(*(values[latents_C[self._frozen]] for values in sae.detectors))
        self.decoder_CD = sae.W_dec[latents_C].double().cpu()
        self._like = sae.W_dec[:0]
        weights = [self.decoder_CD, *self._detectors, *(self._sae.state_dict().values() if self._sae else ())]
        if not all(tensor.isfinite().all() for tensor in weights):
            raise CheckpointError("An SAE's weights are not finite: its training diverged. It cannot be compared.")

    def encode(self, x_BD: Tensor) -> Tensor:
        """Return the activations [C, B] at inference, in float32 on the CPU."""
        x_BD = x_BD.to(self._like)
        f_CB = x_BD.new_empty(len(self._frozen) + len(self._learned), len(x_BD))
        if len(self._frozen):
            f_CB[self._frozen] = detect(x_BD, self._rows_CD, self._detectors).T
        if self._sae is not None:
            f_CB[self._learned] = self._sae.encode(x_BD).T
        return f_CB.float().cpu()


def _checked(latents: Tensor | Sequence[int], width: int) -> Tensor:
    """Return latents as a tensor of indices, or raise when there are none or an SAE of this width lacks one."""
    latents_C = torch.as_tensor(latents if isinstance(latents, Tensor) else list(latents), dtype=torch.int64)
    if not len(latents_C):
        raise ConfigError("No latents to compare: the core, or the list of latents, is empty.")
    if len(lacking := latents_C[(latents_C < 0) | (latents_C >= width)]):
        raise ConfigError(f"There is no latent {int(lacking[0])}: the SAE's latents are 0 … {width - 1}.")
    return latents_C


def _sae_of(sae: SAE, latents_C: Tensor) -> SAE:
    """Return an SAE of these latents alone, none of them a detector."""
    n = len(latents_C)
    part = SAE(SAEConfig(sae.config.d_model, n, 1, (n,), center_input=sae.config.center_input)).to(sae.W_dec)
    part.W_enc_noncore.copy_(sae.W_enc[latents_C])
    part.b_enc.copy_(sae.encoder_bias[latents_C])
    part.W_dec.copy_(sae.W_dec[latents_C])
    part.b_dec.copy_(sae.b_dec)
    part.threshold.copy_(sae.threshold[latents_C])
    return part


class _Together:
    """What pairs of latents did over many batches, in memory that does not grow with them."""

    def __init__(self, n_latents: int, n_top: int) -> None:
        self.n_tokens = 0
        self._n_top = n_top
        self._fired = torch.zeros(3, n_latents, dtype=torch.int64)
        self._sums = torch.zeros(5, n_latents, dtype=torch.float64)
        self._origin = torch.zeros(2, n_latents, 1, dtype=torch.float64)
        self._strongest = torch.zeros(2, n_latents, n_top, dtype=torch.int64)

    def add(self, before_CB: Tensor, after_CB: Tensor) -> None:
        """Take in the activations of a batch."""
        both = torch.stack([before_CB, after_CB])
        fires_before, fires_after = both > 0
        fired = (fires_before, fires_after, fires_before & fires_after)
        self._fired += torch.stack([mask.sum(1) for mask in fired])
        self._strongest = _strongest(self._strongest, both, self.n_tokens)
        if not self.n_tokens:
            # Sums of differences from the first value keep their digits, and those of a constant are exactly 0.
            self._origin = both[:, :, :1].double()
        a_CB, b_CB = both.double() - self._origin
        products = (a_CB, b_CB, a_CB * a_CB, b_CB * b_CB, a_CB * b_CB)
        self._sums += torch.stack([values.sum(1) for values in products])
        self.n_tokens += before_CB.shape[1]

    def figures(self, decoder_cosine_C: Tensor) -> Survival:
        """Return the figures over everything added."""
        n_before, n_after, n_both = self._fired.double()
        rate_before, rate_after = n_before / self.n_tokens, n_after / self.n_tokens
        chance = rate_before * rate_after
        a, b, aa, bb, ab = self._sums
        covariances = (sums - one * other / self.n_tokens for sums, one, other in ((ab, a, b), (aa, a, a), (bb, b, b)))
        return Survival(
            rate_before_C=rate_before,
            rate_after_C=rate_after,
            jaccard_C=n_both / (n_before + n_after - n_both),
            jaccard_chance_C=chance / (rate_before + rate_after - chance),
            correlation_C=_normalised(*covariances),
            decoder_cosine_C=decoder_cosine_C,
            top_overlap_C=_overlap(self._strongest) / torch.maximum(n_before, n_after).clamp(max=self._n_top),
            n_tokens=self.n_tokens,
            n_top=self._n_top,
        )


def _strongest(known: Tensor, f_2CB: Tensor, first_position: int) -> Tensor:
    """Return the largest of those known and those of a batch, as one whole number each: activation, then position.

    The bits of positive floats, read as whole numbers, rise with their values; −0 is less than 0. Of equal activations
    the earlier position counts as larger, so nothing depends on how positions are cut into batches.
    """
    positions = torch.arange(first_position, first_position + f_2CB.shape[-1])
    keys = (f_2CB.view(torch.int32).long() << 32) | (_LAST_POSITION - positions)
    return torch.cat([known, keys], dim=-1).topk(known.shape[-1], dim=-1, sorted=False).values


def _overlap(strongest: Tensor) -> Tensor:
    """Return how many positions are among the strongest of both, [C]; those without an activation do not count."""
    positions = (strongest & _LAST_POSITION).where(strongest >> 32 > 0, -1)
    ordered = torch.cat(positions.unbind(), dim=1).sort(dim=1).values
    return ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).sum(1)


def _normalised(ab: Tensor, aa: Tensor, bb: Tensor) -> Tensor:
    """Return ab / √(aa·bb): exactly 1 for equals, NaN where one of them is nothing."""
    return (ab / (aa * bb).sqrt()).clamp(-1, 1)


def _cosines(a_CD: Tensor, b_CD: Tensor) -> Tensor:
    """Return the cosine of each pair of rows."""
    return _normalised(*((one * other).sum(1) for one, other in ((a_CD, b_CD), (a_CD, a_CD), (b_CD, b_CD))))


def _require_fits(sae: SAE, store: Store) -> None:
    if store.d_model != sae.config.d_model:
        raise ConfigError(
            f"The store {store.key} holds activations of width {store.d_model}; the SAE takes {sae.config.d_model}."
        )


def _require_carries(core: Core, after: SAE) -> None:
    n_core, rows_CD = after.config.n_core, after.W_enc_core[: len(core)].cpu().float()
    if n_core < len(core):
        wrong = f"'after' has {f'a core of {n_core}' if n_core else 'no core'}"
    elif not (same := (rows_CD == core.encoder_CD).all(1)).all():
        wrong = f"row {int((~same).nonzero()[0])} differs"
    else:
        return
    shape = f"{len(core)} rows of {core.encoder_CD.shape[1]}"
    raise CheckpointError(f"The SAE does not carry the core ({shape}): {wrong}. Give an SAE trained from this core.")


def require_selected_from(core: Core, before: SAE, name: str = "'before'") -> None:
    """Raise unless a core was selected from an SAE, which an error calls by `name`."""
    width = before.config.width
    if len(core) and int(core.slots_C.max()) >= width:
        wrong = f"latent {int(core.slots_C.max())} of it is in the core, but it has {width} latents"
    else:
        rows_CD = before.W_enc.detach()[core.slots_C.to(before.W_dec.device)].cpu()
        # A positive factor is allowed: the norms of a core's rows are a setting.
        same = _cosines(rows_CD.double(), core.encoder_CD.double()) > 1 - 1e-9
        if same.all():
            return
        wrong = f"its latent {int(core.slots_C[~same][0])} has another encoder row"
    raise CheckpointError(
        f"The core was not selected from {name}: {wrong}. Give the SAE of cycle {core.cycle} of its run, or compare "
        "two SAEs that carry the core with `between`."
    )
