"""How much of what was planted a dictionary has found, and whether attribution tells what the loss reads.

Latents and features are matched one to one by the cosine of decoder row and direction (the Hungarian method); every
figure rests on that match. A feature that is left without a latent counts as 0. Each figure means what it has beyond
that of an untrained SAE, or of random scores.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.config import require
from dmsae.evaluation.assignment import Matching, match_rows
from dmsae.evaluation.planted import Planted, Sample
from dmsae.evaluation.subject import Dictionary
from dmsae.seeds import generator

FOUND_COSINE, FOUND_F1 = 0.7, 0.5
"""A feature is found if the latent matched to it has at least this cosine, and this F1 as its detector."""
_BATCH = 1024
_RANDOM_SCORINGS = 1000


class Detection(NamedTuple):
    """How well the firing of each feature's latent tells where the feature fires, each [F] in float64."""

    precision_F: Tensor
    """Share of the latent's rows on which the feature fires; 0 for a latent that never fires."""
    recall_F: Tensor
    """Share of the feature's rows on which the latent fires; not a number for a feature that never fires."""
    f1_F: Tensor


@torch.no_grad()
def detect_features(dictionary: Dictionary, latents_F: Tensor, sample: Sample) -> Detection:
    """Return how well each feature's latent detects it on a sample; a latent of −1 never fires."""
    n_hit, n_fired, n_on = (torch.zeros(len(latents_F), dtype=torch.float64) for _ in range(3))
    for x_BD, strengths_BF in zip(sample.x_BD.split(_BATCH), sample.strengths_BF.split(_BATCH), strict=True):
        codes_BK = dictionary.encode(x_BD.to(dictionary.W_dec)).cpu()
        fires_BF = (codes_BK[:, latents_F] > 0) & (latents_F >= 0)
        on_BF = strengths_BF > 0
        n_hit += (fires_BF & on_BF).sum(0)
        n_fired += fires_BF.sum(0)
        n_on += on_BF.sum(0)
    return Detection(n_hit / n_fired.clamp(min=1), n_hit / n_on, 2 * n_hit / (n_fired + n_on))


class Recovery(NamedTuple):
    """What a dictionary has found; means are over all features, frequent or rare."""

    mcc_signed: float
    """Mean cosine of features and their latents: a latent that points the other way is not the feature."""
    mcc_absolute: float
    """The same when the match is by absolute cosine: what the literature mostly calls MCC."""
    precision: float
    recall: float
    f1: float
    """Mean precision, recall and F1 of the latents' firing as detectors of their features; the match is the signed."""
    share_found: float
    """Share of the features that are found."""
    share_read_found: float
    """Share of the features that the loss reads that are found."""


def recover(dictionary: Dictionary, planted: Planted) -> Recovery:
    """Return what a dictionary has found of what was planted, on held-out rows."""
    match = match_rows(planted.directions_FD, dictionary.W_dec)
    absolute = match_rows(planted.directions_FD, dictionary.W_dec, absolute=True)
    found_F, detection = _found(dictionary, match, planted)
    return Recovery(
        mcc_signed=float(match.cosines_K.nan_to_num().mean()),
        mcc_absolute=float(absolute.cosines_K.nan_to_num().abs().mean()),
        precision=float(detection.precision_F.mean()),
        recall=float(detection.recall_F.mean()),
        f1=float(detection.f1_F.mean()),
        share_found=float(found_F.double().mean()),
        share_read_found=float(found_F[planted.is_read_F].double().mean()),
    )


def _found(dictionary: Dictionary, match: Matching, planted: Planted) -> tuple[Tensor, Detection]:
    """Return which features are found, [F], and how well they are detected."""
    heldout = planted.heldout()
    silent = int((~(heldout.strengths_BF > 0).any(0)).sum())
    remedy = "Draw more held-out rows, or plant fewer rare features."
    require(
        not silent, "heldout_rows", len(heldout.x_BD), f"be enough for all features to fire: {silent} do not", remedy
    )
    detection = detect_features(dictionary, match.partners_K, heldout)
    return (match.cosines_K >= FOUND_COSINE) & (detection.f1_F >= FOUND_F1), detection


class CoreRecovery(NamedTuple):
    """Which features the latents of a core are. A second latent of one feature counts as none."""

    n_latents: int
    precision: float
    """Share of its latents that are features which the loss reads."""
    recall: float
    """Share of the features that the loss reads that are among its latents."""
    share_features: float
    """Share of its latents that are features, read or not."""
    precision_direction: float
    recall_direction: float
    """Precision and recall when a latent need only write the direction of a feature, whenever it fires."""


def recover_core(dictionary: Dictionary, latents: Tensor, planted: Planted) -> CoreRecovery:
    """Return which features some latents of a dictionary are."""
    require(len(latents) > 0, "latents", len(latents), "be at least one")
    match = match_rows(planted.directions_FD, dictionary.W_dec[latents.to(dictionary.W_dec.device)])
    match = match._replace(partners_K=latents[match.partners_K].where(match.matched, -1))
    found_F, _ = _found(dictionary, match, planted)
    written_F = match.cosines_K >= FOUND_COSINE
    n_latents, n_read = len(latents), int(planted.is_read_F.sum())
    n_read_found, n_read_written = (int((one & planted.is_read_F).sum()) for one in (found_F, written_F))
    return CoreRecovery(
        n_latents=n_latents,
        precision=n_read_found / n_latents,
        recall=n_read_found / n_read,
        share_features=int(found_F.sum()) / n_latents,
        precision_direction=n_read_written / n_latents,
        recall_direction=n_read_written / n_read,
    )


class Ranking(NamedTuple):
    """How well scores put latents of features that the loss reads above latents of those that it does not."""

    n_read: int
    """Latents that are features which the loss reads."""
    n_unread: int
    """Latents that are other features."""
    auc: float | None
    """Chance that a read one has a higher score than an unread one. None without both."""
    auc_random: float | None
    """The same for random scores, on average."""
    auc_random_high: float | None
    """What random scores exceed in one of 40 cases."""
    precision: float | None
    """Share of read ones among the `n_read` latents with the highest scores; of equal scores, on average."""
    precision_random: float | None
    """The same for random scores: the share of read ones."""


def rank_features(
    scores: Mapping[str, Tensor], dictionary: Dictionary, planted: Planted, seed: int = 0, only_found: bool = True
) -> dict[str, Ranking]:
    """Return how well scores of the first P latents, by name, tell those of read features from those of others.

    With `only_found`, latents that are no feature are left out; without, each has the feature that it is matched to, so
    that there is a figure for a dictionary that has found nothing.
    """
    (n_pool,) = {len(scores_P) for scores_P in scores.values()}
    match = match_rows(planted.directions_FD, dictionary.W_dec[:n_pool])
    found_F = _found(dictionary, match, planted)[0] if only_found else match.matched
    latents, is_read = match.partners_K[found_F], planted.is_read_F[found_F]
    n_read, n_all = int(is_read.sum()), len(is_read)
    if n_read in (0, n_all):
        return dict.fromkeys(scores, Ranking(n_read, n_all - n_read, None, None, None, None, None))
    random = _random_aucs(n_read, n_all, seed)
    rankings = {}
    for name, scores_P in scores.items():
        of_latents = scores_P.cpu().double()[latents]
        rankings[name] = Ranking(
            n_read=n_read,
            n_unread=n_all - n_read,
            auc=auc(of_latents, is_read),
            auc_random=float(random.mean()),
            auc_random_high=float(random.quantile(0.975)),
            precision=_precision_at(of_latents, is_read, n_read),
            precision_random=n_read / n_all,
        )
    return rankings


def _random_aucs(n_positive: int, n_all: int, seed: int) -> Tensor:
    """Return the AUC of many random scorings, [_RANDOM_SCORINGS]."""
    draws = torch.rand(_RANDOM_SCORINGS, n_all, generator=generator(seed, "random scores"), dtype=torch.float64)
    ranks = draws.argsort(dim=1).argsort(dim=1).double()
    n_below = ranks[:, :n_positive].sum(1) - n_positive * (n_positive - 1) / 2
    return n_below / (n_positive * (n_all - n_positive))


def auc(scores: Tensor, positive: Tensor) -> float:
    """Return the chance that a positive has a higher score than a negative; equal scores count half."""
    difference = scores[positive][:, None] - scores[~positive][None]
    return float((difference.sign() + 1).mean() / 2)


def _precision_at(scores: Tensor, positive: Tensor, n: int) -> float:
    """Return the share of positives among the n highest scores; those equal to the last of them share its place."""
    cut = scores.sort(descending=True).values[n - 1]
    above, at = scores > cut, scores == cut
    from_ties = (n - int(above.sum())) * float(positive[at].double().mean())
    return (int(positive[above].sum()) + from_ties) / n
