"""The paper's claims and ours, each with the statistic that it is judged by."""

from functools import partial

from dmsae.experiments.parts.regime import ANY, HOLDING
from dmsae.experiments.statistics import (
    LAST,
    close,
    confirmed_gain,
    confirmed_margin,
    effect,
    found_again,
    grows,
    longer_rows_decay,
    loss_falls,
    more_alike,
    negative,
    over_control,
    over_msae,
    over_msae_at_smallest,
    over_random,
    peaks_inside,
    persists,
    price_saved,
    rises,
    row_of,
    sparse_follows,
    stays_at_largest,
    stays_in_use,
)
from dmsae.experiments.verdicts import Claim

PAPER, OURS = "the paper", "ours"
_NONE = "the same without a core"
_DIRECTIONS = "random directions of equal norms"
_COMPONENTS = "as many principal components"
_USE = (
    "the smallest of: share of its initial L0 that the core keeps minus what random rows keep; what those lose; what "
    "the core keeps beyond a half"
)
_DECAY = "share of its initial L0 that it keeps, rows as found less rows twice as long; or what these lose, if smaller"

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

_COSTS = "price of the other core less price of the core, each against SAEs of its own L0"

_PRICES = tuple(
    Claim(f"{what} costs less than {than}.", OURS, part, _COSTS, partial(price_saved, core=core, control=control))
    for part, what, core, than, control in (
        ("prices", "The distilled dense core", f"{LAST}dense", _DIRECTIONS, f"{LAST}random-norm_matched-dense"),
        (
            "prices",
            "The distilled dense core, kept in sparse mode,",
            f"{LAST}sparse",
            f"{_DIRECTIONS} in that mode",
            f"{LAST}random-norm_matched-sparse",
        ),
        (
            "prices",
            "A distilled core of detectors",
            f"{LAST}detector",
            "random detectors of equal rates and means",
            f"{LAST}random-detector",
        ),
        (
            "uncapped",
            "The first core, kept in sparse mode,",
            "sparse",
            f"{_DIRECTIONS} in that mode",
            "random-norm_matched-sparse",
        ),
        ("uncapped", "The first core, kept dense,", "dense", _COMPONENTS, "principal_components-dense"),
        ("prices", "The distilled core, kept dense,", f"{LAST}dense", _COMPONENTS, f"{LAST}principal_components-dense"),
        ("capped", "A first core of detectors", "detector", _COMPONENTS, "principal_components-detector"),
    )
)
"""What cores cost, against random ones and principal components."""

_RULES = tuple(
    Claim(
        f"{kept}, {core} {rule}.",
        OURS,
        part,
        _COSTS,
        partial(price_saved, core=f"{beginning}{mode}", control=f"{beginning}{of_rule}-{mode}"),
    )
    for part, beginning, core in (
        ("uncapped", "", "a first core chosen by attribution costs less than one chosen by"),
        ("prices", LAST, "the distilled core costs less than as many candidates of the last cycle chosen by"),
    )
    for mode, kept in (("dense", "Kept dense"), ("sparse", "Kept in sparse mode"), ("detector", "As detectors"))
    if (part, mode) != ("uncapped", "detector")  # the part `capped` has these
    for of_rule, rule in (
        ("firing_rate", "firing rate"),
        ("mean_activation", "mean activation"),
        ("random_subset", "chance"),
    )
)
"""What attribution buys over simpler rules, in every mode, before and after the cycles."""

_FRESH = "on seeds and held-out text outside the search"

_REGIMES = tuple(
    claim
    for what, of_which in (
        (ANY, "In the best regime of a search"),
        (HOLDING, "In the best regime of a search whose cores hold a tenth of the attribution"),
    )
    for claim in (
        *(
            Claim(
                f"{of_which}, the distilled core costs less than {control}.",
                OURS,
                "confirmation",
                f"price of the other core less price of the core, {_FRESH}",
                partial(confirmed_margin, what=what, controls=controls),
            )
            for control, controls in (
                ("as many candidates of the last cycle chosen by firing rate", ("firing_rate",)),
                ("as many candidates of the last cycle chosen by mean activation", ("mean_activation",)),
                ("as many candidates of the last cycle chosen by chance", ("random_subset",)),
                ("random rows of equal norms, or random detectors", ("random-norm_matched", "random")),
                ("random rows with the covariance of the activations", ("random-covariance_matched",)),
                (_COMPONENTS, ("principal_components",)),
            )
        ),
        Claim(
            f"{of_which}, an SAE with the core explains more than one that keeps nothing, at equal measured L0.",
            OURS,
            "confirmation",
            f"variance explained by the core's SAE less that of an unconstrained one, {_FRESH}",
            partial(confirmed_gain, what=what),
        ),
    )
)
"""Where the search looks best, on seeds and text outside it."""

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

_by_judge = partial(over_msae_at_smallest, method="dense", measure="detection", figure="detection_balanced")

CLAIMS = (
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
    Claim(
        "A distilled core stays in use while a randomly initialised one of equal size decays.",
        PAPER,
        "random-core",
        f"{_USE}; random rows have norm 1, as at initialisation",
        lambda figures: stays_in_use(figures, "unit"),
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
        "Reconstruction loss falls as τ rises, throughout training.",
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
        "The first core, frozen as in the paper, costs less than random directions of equal norms.",
        OURS,
        "paper",
        "price of the random core less price of the core, each against SAEs of its own L0",
        lambda figures: price_saved(figures, "dense", "random-norm_matched-dense"),
    ),
    Claim(
        "An SAE with the first core, frozen as in the paper, explains more than one that keeps nothing, at equal L0.",
        OURS,
        "paper",
        "variance explained by the core's SAE less that of an unconstrained one",
        lambda figures: negative(row_of(figures, "dense"), "price"),
    ),
    Claim(
        "With the first core, frozen as in the paper, the model predicts better than with an SAE that keeps nothing.",
        OURS,
        "paper",
        "next-token loss with the unconstrained SAE in place less that with the core's, in nats, at equal L0",
        lambda figures: negative(row_of(figures, "dense"), "price_loss"),
    ),
    Claim(
        "The first core, frozen as in the paper, costs less than random directions with the activations' covariance.",
        OURS,
        "paper",
        "price of the random core less price of the core, each against SAEs of its own L0",
        lambda figures: price_saved(figures, "dense", "random-covariance_matched-dense"),
    ),
    Claim(
        "Detectors of the first core beat random detectors of equal rates and means.",
        OURS,
        "paper",
        "price of random detectors less price of the core",
        lambda figures: price_saved(figures, "detector", "random-detector"),
    ),
    Claim(
        "An SAE with detectors of the first core explains as much as one that keeps nothing, at equal measured L0.",
        OURS,
        "paper",
        "0.005 less the variance explained that the detectors cost",
        lambda figures: None if (lost := negative(row_of(figures, "detector"), "price")) is None else 0.005 + lost,
    ),
    Claim(
        "With detectors of the first core the model predicts as well as with an SAE that keeps nothing, at equal L0.",
        OURS,
        "paper",
        "0.01 nats less what the detectors add to the next-token loss",
        lambda figures: None if (lost := negative(row_of(figures, "detector"), "price_loss")) is None else 0.01 + lost,
    ),
    Claim(
        "An SAE with detectors explains as much as one that keeps nothing and trains twice as long, at equal L0.",
        OURS,
        "longer",
        "0.005 less the variance explained that the detectors lack",
        lambda figures: None if figures.get("price") is None else 0.005 - figures["price"],
    ),
    Claim(
        "With detectors the model predicts as well as with an SAE that keeps nothing and trains twice as long.",
        OURS,
        "longer",
        "0.01 nats less what the detectors add to the next-token loss, at equal L0",
        lambda figures: None if figures.get("price_loss") is None else 0.01 - figures["price_loss"],
    ),
    Claim(
        "Detectors that fire seldom beat random detectors of equal rates and means.",
        OURS,
        "capped",
        "price of random detectors less price of the core",
        lambda figures: price_saved(figures, "detector", "random-detector"),
    ),
    Claim(
        "Attribution chooses better detectors than firing rate.",
        OURS,
        "capped",
        "price of the core by firing rate less price of the core by attribution",
        lambda figures: price_saved(figures, "detector", "firing_rate-detector"),
    ),
    Claim(
        "Attribution chooses better detectors than mean activation.",
        OURS,
        "capped",
        "price of the core by mean activation less price of the core by attribution",
        lambda figures: price_saved(figures, "detector", "mean_activation-detector"),
    ),
    Claim(
        "Attribution chooses better detectors than chance does from the same candidates.",
        OURS,
        "capped",
        "price of a random subset less price of the core by attribution",
        lambda figures: price_saved(figures, "detector", "random_subset-detector"),
    ),
    Claim(
        "The latents that attribution prefers matter more to the loss than those that fire most.",
        OURS,
        "selection",
        "share of all ablation effect in the preferred half, attribution less firing rate",
        partial(effect, than="firing_rate"),
    ),
    Claim(
        "The latents that attribution prefers matter more to the loss than those with the largest mean activation.",
        OURS,
        "selection",
        "share of all ablation effect in the preferred half, attribution less mean activation",
        partial(effect, than="mean_activation"),
    ),
    Claim(
        "Detectors persist across cycles, more than random detectors do.",
        OURS,
        "cycles",
        "share of the first core in the last core, selected start less random start",
        lambda figures: persists(figures, "detector"),
    ),
    *_PRICES,
    *_RULES,
    *_REGIMES,
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
