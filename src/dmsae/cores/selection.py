"""Which candidates become the core (the paper's Algorithm 2, last step), and what is distilled from two of them."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.config import require
from dmsae.cores.attribution import Attribution
from dmsae.cores.core import Core, Lineage, Provenance
from dmsae.cores.ranking import spearman
from dmsae.errors import AttributionError, CheckpointError, ConfigError
from dmsae.sae.detectors import Detectors
from dmsae.sae.sae import SAE


def require_coverage(coverage: float) -> None:
    """Raise unless a coverage τ lies in (0, 1]."""
    require(0 < coverage <= 1, "coverage", coverage, "be above 0 and at most 1")


def select_core(scores_P: Tensor, coverage: float) -> Tensor:
    """Return the fewest candidates that hold `coverage` of all attribution, highest first, as indices into the scores.

    Of equal scores the lower index goes first. A coverage of 1 takes every candidate with a positive score.

    >>> dmsae.select_core(torch.tensor([0.1, 5.0, 0.0, 3.0]), coverage=0.9).tolist()
    [1, 3]
    """
    require_coverage(coverage)
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


def eligible_scores(attribution: Attribution, max_rate: float | None) -> Tensor:
    """Return the scores, with 0 for candidates that fire on a larger share of positions than `max_rate`."""
    if max_rate is None:
        return attribution.scores_P
    require(0 < max_rate <= 1, "max_rate", max_rate, "be above 0 and at most 1, or left out")
    scores = attribution.scores_P.where(attribution.firing_rates_P <= max_rate, 0.0)
    if not scores.any():
        lowest = float(attribution.firing_rates_P[attribution.scores_P > 0].min())
        raise AttributionError(
            f"max_rate = {max_rate} leaves no candidate: the rarest with a score fires on {100 * lowest:.1f} % of "
            "positions. Raise max_rate, train a sparser or wider SAE, or score over active positions."
        )
    return scores


def next_core(
    previous: Core | None,
    sae: SAE,
    attribution: Attribution,
    cycle: int,
    coverage: float,
    provenance: Provenance,
    max_rate: float | None = None,
) -> Core:
    """Return the core selected after a cycle, from candidates that fire on at most `max_rate` of the positions.

    The coverage is that of the candidates which may be selected.

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
    chosen = select_core(eligible_scores(attribution, max_rate), coverage)
    slots = attribution.latents_P[chosen]
    n_core, n_pool = sae.config.n_core, sae.config.prefixes[0]
    pool_PD = torch.cat([sae.W_enc_core, sae.W_enc_noncore[: n_pool - n_core]]).detach().cpu().float()
    return Core(
        encoder_CD=pool_PD[slots],
        scores_C=attribution.scores_P[chosen].double(),
        slots_C=slots,
        lineage=tuple(_lineage(previous, slot, cycle) for slot in slots.tolist()),
        cycle=cycle,
        provenance=provenance,
        detectors=_detectors_at_birth(previous, sae, slots),
    )


def _detectors_at_birth(previous: Core | None, sae: SAE, slots: Tensor) -> Detectors:
    """Return offsets and thresholds from the SAE in which each latent was first selected; for the newborn, this one.

    A dense core's bias is learned anew in every cycle and its threshold is 0: they say nothing about the feature.
    """
    now = detectors_of(sae, slots)
    if previous is None or previous.detectors is None:
        return now
    kept = slots < len(previous)
    for values_C, before_C in zip(now, previous.detectors, strict=True):
        values_C[kept] = before_C[slots[kept]]
    return now


def detectors_of(sae: SAE, latents: Tensor) -> Detectors:
    """Return the offsets and thresholds that make detectors of some latents of an SAE.

    Those that are detectors already keep theirs to the bit.
    """
    rows = sae.W_enc[latents].double()
    shift = rows @ sae.b_dec.double() if sae.config.center_input else 0.0
    offsets = (sae.encoder_bias[latents].double() - shift).float()
    frozen = latents < sae.config.n_detectors
    offsets[frozen] = sae.offset[latents[frozen]].float()
    return Detectors(offsets.detach().cpu(), sae.threshold[latents].float().cpu())


def _require_trained_with(core: Core, sae: SAE, cycle: int) -> None:
    if cycle != core.cycle + 1:
        raise ConfigError(f"cycle = {cycle}; it must be {core.cycle + 1}, the cycle after the core's own.")
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


class SelectionReport(NamedTuple):
    """What selection did to a candidate pool."""

    n_pool: int
    """Candidates."""
    n_selected: int
    share_selected: float
    """Selected candidates as a share of the pool; close to 1, selection hardly selects."""
    attribution_held: float
    """Share of the attribution of the whole pool that the selected hold: less than the coverage under a `max_rate`."""
    score_rate_correlation: float | None
    """Rank correlation of score and firing rate over the pool; None when one of them is constant."""
    median_rate: float
    """Median firing rate of the selected, under the training-time mask."""
    stability: float | None
    """Mean share of resamples in which a selected latent is selected again; None without a bootstrap."""
    coverage_curve: list[int]
    """Latents that hold a coverage of 0.1, 0.2, … 1.0 of the attribution of those that may be selected."""

    def warnings(self) -> list[str]:
        """Return what a reader of the core should know, a sentence each."""
        lines = []
        if self.share_selected > 0.5:
            share = f"{self.n_selected} of {self.n_pool} candidates ({100 * self.share_selected:.0f} %)"
            lines.append(f"Selection hardly selects: it took {share}. Widen prefix-0, or lower the coverage.")
        if self.median_rate > 0.5:
            rate = f"the median core latent fires on {100 * self.median_rate:.0f} % of positions"
            lines.append(f"The core is nearly always on: {rate}. Lower k, widen the dictionary, or set max_rate.")
        return lines


def report_selection(attribution: Attribution, coverage: float, max_rate: float | None = None) -> SelectionReport:
    """Return what selecting at a coverage does to the pool that was scored."""
    eligible_P = eligible_scores(attribution, max_rate)
    chosen = select_core(eligible_P, coverage)
    stability = selection_stability(attribution, coverage, max_rate)
    n_pool = len(attribution.scores_P)
    return SelectionReport(
        n_pool=n_pool,
        n_selected=len(chosen),
        share_selected=len(chosen) / n_pool,
        attribution_held=float(attribution.scores_P[chosen].sum() / attribution.scores_P.sum()),
        score_rate_correlation=spearman(attribution.scores_P, attribution.firing_rates_P),
        median_rate=float(attribution.firing_rates_P[chosen].median()),
        stability=None if stability is None else float(stability[chosen].mean()),
        coverage_curve=[len(select_core(eligible_P, tenth / 10)) for tenth in range(1, 11)],
    )


def selection_stability(attribution: Attribution, coverage: float, max_rate: float | None = None) -> Tensor | None:
    """Return the share of resamples in which each candidate is selected, [P]; None without a bootstrap."""
    if attribution.bootstrap_XP is None:
        return None
    times = torch.zeros(len(attribution.scores_P), dtype=torch.float64)
    eligible = attribution.firing_rates_P <= (1.0 if max_rate is None else max_rate)
    for scores_P in attribution.bootstrap_XP.double() * eligible:
        if scores_P.any():
            times[select_core(scores_P, coverage)] += 1
    return times / len(attribution.bootstrap_XP)
