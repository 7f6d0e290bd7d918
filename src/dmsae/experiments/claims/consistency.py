"""Claims on whether independent runs find the same, and on what is alike beside a shared core."""

from functools import partial

from dmsae.experiments.statistics import found_again, grows, more_alike
from dmsae.experiments.verdicts import OURS, Claim

_NONE = "the same without a core"

_SHARED = tuple(
    Claim(
        f"The unfrozen prefix-0 latents of two SAEs {are} when the SAEs share {core} than when they {control}.",
        OURS,
        "consistency",
        f"{statistic}, with the shared core less {against}",
        partial(measure, what=f"the rest beside {core}", than=than),
    )
    for core, than, control, against in (
        ("distilled detectors", _NONE, "have none", "without"),
        ("a distilled dense core", _NONE, "have none", "without"),
        ("detectors of the first core", _NONE, "have none", "without"),
        ("a consensus", _NONE, "have none", "without"),
        ("distilled detectors", "the rest beside random detectors", "share random detectors", "beside random ones"),
        (
            "a distilled dense core",
            "the rest beside random directions",
            "share random directions",
            "beside random ones",
        ),
    )
    for are, measure, statistic in (
        ("agree more", found_again, "share of them that both SAEs have"),
        ("are more alike", more_alike, "mean encoder and decoder cosine of matched ones"),
    )
)
"""Whether what is not frozen agrees more beside a core that SAEs share."""


CONSISTENCY = (
    Claim(
        "First cores of independent runs agree more than random rows with the covariance of the activations.",
        OURS,
        "consistency",
        "share of latents that both runs have, first core under a cap on firing rates less random rows",
        lambda figures: found_again(figures, "first core, capped", "random rows"),
    ),
    Claim(
        "Distilled dense cores of independent runs agree more than the runs' prefix-0s.",
        OURS,
        "consistency",
        "share of latents that both runs have, distilled dense core less prefix-0",
        lambda figures: found_again(figures, "distilled, dense", "prefix-0"),
    ),
    Claim(
        "Distilled detectors of independent runs agree more than the runs' prefix-0s.",
        OURS,
        "consistency",
        "share of latents that both runs have, distilled detectors less prefix-0",
        lambda figures: found_again(figures, "distilled, detector", "prefix-0"),
    ),
    Claim(
        "Distilled detectors of independent runs agree more than first cores under the same cap on firing rates.",
        OURS,
        "consistency",
        "share of latents that both runs have, distilled detectors less first core",
        lambda figures: found_again(figures, "distilled, detector", "first core, capped"),
    ),
    Claim(
        "Consensus cores of independent runs agree more than first cores under the same cap on firing rates.",
        OURS,
        "consistency",
        "share of latents that both runs have, consensus less first core",
        lambda figures: found_again(figures, "consensus", "first core, capped"),
    ),
    Claim(
        "Consensus cores of independent runs agree more than the runs' prefix-0s.",
        OURS,
        "consistency",
        "share of latents that both runs have, consensus less prefix-0",
        lambda figures: found_again(figures, "consensus", "prefix-0"),
    ),
    Claim(
        "First cores of independent runs are more alike than random rows with the covariance of the activations.",
        OURS,
        "consistency",
        "mean encoder and decoder cosine of matched latents, first core under a cap on firing rates less random rows",
        lambda figures: more_alike(figures, "first core, capped", "random rows"),
    ),
    Claim(
        "Distilled dense cores of independent runs are more alike than random rows with the activations' covariance.",
        OURS,
        "consistency",
        "mean encoder and decoder cosine of matched latents, distilled dense core less random rows",
        lambda figures: more_alike(figures, "distilled, dense", "random rows for distilled, dense"),
    ),
    Claim(
        "Distilled detectors of independent runs are more alike than random rows with the activations' covariance.",
        OURS,
        "consistency",
        "mean encoder and decoder cosine of matched latents, distilled detectors less random rows",
        lambda figures: more_alike(figures, "distilled, detector", "random rows for distilled, detector"),
    ),
    Claim(
        "Consensus cores of independent runs are more alike than random rows with the activations' covariance.",
        OURS,
        "consistency",
        "mean encoder and decoder cosine of matched latents, consensus less random rows",
        lambda figures: more_alike(figures, "consensus", "random rows for consensus"),
    ),
    *(
        Claim(
            f"{what} of independent runs are more alike after longer training.",
            OURS,
            "consistency",
            f"mean encoder and decoder cosine of matched latents{beyond}, longest training less shortest",
            partial(grows, what=kind, than=than),
        )
        for what, kind, beyond, than in (
            ("Prefix-0s", "prefix-0", "", ""),
            ("First cores", "first core, capped", " beyond that of random rows", "random rows"),
            *(
                (
                    f"Distilled {what}",
                    f"distilled, {mode}",
                    " beyond that of random rows",
                    f"random rows for distilled, {mode}",
                )
                for what, mode in (("dense cores", "dense"), ("detectors", "detector"))
            ),
        )
    ),
    *_SHARED,
)
