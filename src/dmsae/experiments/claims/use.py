"""Claims on what becomes of a core: in training, from cycle to cycle, and with k and the coverage."""

from dmsae.experiments.statistics import (
    close,
    longer_rows_decay,
    loss_falls,
    peaks_inside,
    persists,
    rises,
    stays_at_largest,
    stays_in_use,
)
from dmsae.experiments.verdicts import OURS, PAPER, Claim

_USE = (
    "the smallest of: share of its initial L0 that the core keeps minus what random rows keep; what those lose; what "
    "the core keeps beyond a half"
)
_DECAY = "share of its initial L0 that it keeps, rows as found less rows twice as long; or what these lose, if smaller"


USE = (
    Claim(
        "A distilled core stays in use while a randomly initialised one of equal size decays.",
        PAPER,
        "random-core",
        f"{_USE}; random rows have norm 1, as at initialisation",
        lambda figures: stays_in_use(figures, random_norm="unit"),
    ),
    Claim(
        "A distilled core stays in use while a random one of equal norms decays.",
        OURS,
        "random-core",
        _USE,
        stays_in_use,
    ),
    Claim(
        "A distilled core stays in use while a random one of equal norms decays, at the largest k tried.",
        OURS,
        "random-core",
        _USE,
        lambda figures: stays_at_largest(figures, "k"),
    ),
    Claim(
        "A distilled core stays in use while a random one of equal norms decays, in the longest training tried.",
        OURS,
        "random-core",
        _USE,
        lambda figures: stays_at_largest(figures, "tokens"),
    ),
    Claim(
        "A distilled core stays in use while random rows with the covariance of the activations decay.",
        OURS,
        "random-core",
        _USE,
        lambda figures: stays_in_use(figures, kind="covariance_matched"),
    ),
    Claim(
        "At the largest k tried, a distilled core stays in use while rows with that covariance decay.",
        OURS,
        "random-core",
        _USE,
        lambda figures: stays_at_largest(figures, "k", "covariance_matched"),
    ),
    Claim(
        "A distilled core stays in use while random rows that are twice as long decay.",
        OURS,
        "random-core",
        _USE,
        lambda figures: stays_in_use(figures, random_norm=2.0),
    ),
    Claim(
        "A random core decays more when its rows are twice as long.",
        OURS,
        "random-core",
        _DECAY,
        lambda figures: longer_rows_decay(figures, "random-norm_matched-dense"),
    ),
    Claim(
        "The distilled core, too, decays more when its rows are twice as long.",
        OURS,
        "random-core",
        _DECAY,
        lambda figures: longer_rows_decay(figures, "dense"),
    ),
    Claim(
        "A subset of the first core persists across cycles, more than from a random start.",
        PAPER,
        "cycles",
        "share of the first core in the last core, selected start less random start",
        lambda figures: persists(figures, "dense"),
    ),
    Claim(
        "Carry-over peaks at an intermediate k.",
        PAPER,
        "sparsity",
        "share of a core kept in the last cycle: mean of the k inside the range less the better end",
        peaks_inside,
    ),
    Claim(
        "Variance explained rises with τ.",
        PAPER,
        "tau",
        "rank correlation of τ and held-out variance explained (L0 rises with τ too)",
        rises,
    ),
    Claim(
        "Reconstruction loss falls as τ rises, on average over training.",
        PAPER,
        "tau",
        "minus the rank correlation of τ and reconstruction loss on training batches, mean over training",
        loss_falls,
    ),
    Claim(
        "A coverage of 0.9 explains as much as one of 1.0.",
        PAPER,
        "tau",
        "0.01 less the difference in variance explained",
        close,
    ),
    Claim(
        "Detectors persist across cycles, more than random detectors do.",
        OURS,
        "cycles",
        "share of the first core in the last core, selected start less random start",
        lambda figures: persists(figures, "detector"),
    ),
)
