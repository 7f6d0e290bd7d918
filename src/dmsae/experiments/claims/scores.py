"""Claims on what SAEs with a core score, beside Matryoshka SAEs of their L0 and random cores."""

from functools import partial

from dmsae.experiments.statistics import (
    over_control,
    over_msae,
    over_msae_at_smallest,
    over_random,
    sparse_follows,
)
from dmsae.experiments.verdicts import OURS, PAPER, Claim

_DIRECTIONS = "random directions of equal norms"

_SCORES = {
    ("fidelity", "fve"): "explains more variance",
    ("splice", "loss_recovered_zero"): "recovers more of the loss",
    ("probing", "accuracy.1"): "probes better with one latent",
    ("probing", "accuracy.5"): "probes better with five latents",
    ("absorption", "fraction"): "absorbs less",
    ("disentanglement", "score"): "disentangles better",
    ("concept_removal", "scr.20"): "removes spurious correlations better (SCR, unreliable)",
    ("concept_removal", "tpp.20"): "perturbs a probe with less effect on others (TPP, unreliable)",
    ("lexical_predictability", "lexical_predictability"): "fires more predictably from tokens",
}
"""Scores by which SAEs are compared."""
_PAPER_SCORES = {("absorption", "fraction"), ("disentanglement", "score")}
"""Those of them that the paper says improve."""

_AGAINST_MSAE = tuple(
    Claim(
        f"An SAE with {core} {does} than a Matryoshka SAE of the same measured L0.",
        PAPER if in_paper and (measure, figure) in _PAPER_SCORES else OURS,
        "benchmark",
        f"{measure}, {figure}: the difference (positive is better), mean over sparsities",
        partial(over_msae, method=method, measure=measure, figure=figure),
    )
    for method, core, in_paper in (
        ("dense", "the distilled dense core", True),
        ("sparse", "the distilled core in sparse mode", True),
        ("detector", "distilled detectors", False),
    )
    for (measure, figure), does in _SCORES.items()
)

_BEYOND_RANDOM = tuple(
    Claim(
        f"An SAE with {core} {does} than one with {control}.",
        OURS,
        "benchmark",
        f"{measure}, {figure}: the difference (positive is better), each against Matryoshka SAEs of its own measured "
        "L0, mean over the smallest and largest k",
        partial(over_random, method=method, control=of_control, measure=measure, figure=figure),
    )
    for method, core, of_control, control in (
        ("dense", "the distilled dense core", "random-norm_matched-dense", _DIRECTIONS),
        (
            "sparse",
            "the distilled core in sparse mode",
            "random-norm_matched-sparse",
            f"{_DIRECTIONS} in that mode",
        ),
        ("detector", "distilled detectors", "random-detector", "random detectors of equal rates and means"),
    )
    for (measure, figure), does in _SCORES.items()
)
"""Whether what an SAE with a core scores is due to what was distilled."""

_AGAINST_RANDOM = tuple(
    Claim(
        f"An SAE with {of_core} {does} than one with {of_control}.",
        OURS,
        "worth",
        f"{measure}, {figure}: the difference (positive is better), at nearly equal measured L0",
        partial(over_control, core=core, control=control, measure=measure, figure=figure),
    )
    for core, of_core, control, of_control in (
        ("detector", "detectors of the first core", "random-detector", "random detectors"),
        (
            "dense",
            "the first core, frozen as in the paper,",
            "random-norm_matched-dense",
            "random directions of equal norms",
        ),
    )
    for (measure, figure), does in _SCORES.items()
)


_by_judge = partial(over_msae_at_smallest, method="dense", measure="detection", figure="detection_balanced")

SCORES = (
    *_AGAINST_MSAE,
    Claim(
        "At the smallest k, a judge explains the latents of an SAE with the distilled dense core worse than an MSAE's.",
        PAPER,
        "benchmark",
        "detection, detection_balanced: Matryoshka less core, at equal measured L0 (no preset has a judge)",
        lambda figures: None if (gain := _by_judge(figures)) is None else -gain,
    ),
    *_BEYOND_RANDOM,
    *_AGAINST_RANDOM,
    Claim(
        "A sparse core follows the dense one.",
        PAPER,
        "benchmark",
        "0.02 less the difference in variance explained at equal measured L0",
        sparse_follows,
    ),
)
