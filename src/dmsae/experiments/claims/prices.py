"""Claims on what it costs to keep latents, and on which rule chooses them."""

from functools import partial

from dmsae.experiments.parts.regime import ANY, HOLDING
from dmsae.experiments.statistics import LAST, confirmed_gain, confirmed_margin, effect, negative, price_saved, row_of
from dmsae.experiments.verdicts import OURS, Claim

_DIRECTIONS = "random directions of equal norms"
_COVARIANCE = "random directions with the activations' covariance"
_COMPONENTS = "as many principal components"

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
        *(
            ("prices", f"The distilled {what}", f"{LAST}{mode}", _COVARIANCE, f"{LAST}random-covariance_matched-{mode}")
            for what, mode in (("dense core", "dense"), ("dense core, kept in sparse mode,", "sparse"))
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


PRICES = (
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
    *_PRICES,
    *_RULES,
    *_REGIMES,
)
