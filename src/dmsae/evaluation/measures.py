"""Every measure of a dictionary by name: its function, its settings, and which of its figures tables show.

A measure takes subjects and gives one result, a NamedTuple, for each of them in order. It knows nothing of nulls, which
are subjects too. To add one, write the function and its config in a module of their own and add a line to `MEASURES`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from dmsae.evaluation.activity import ActivityConfig, activity
from dmsae.evaluation.fidelity import FidelityConfig, measure_fidelity
from dmsae.evaluation.redundancy import RedundancyConfig, redundancy
from dmsae.evaluation.splice import SpliceConfig, splice


class Score(NamedTuple):
    """A figure that tables show beside its nulls."""

    figure: str
    """Where it is in a result: the name of a field; dots lead into fields of fields, keys and places in lists."""
    ceiling: float | str | None = None
    """What a perfect dictionary gets: a number, or where in the result it is. None: nothing is perfect."""
    null: str = ""
    """Where in the result the null of this figure is, if it has one of its own besides the null subjects."""


class Measure(NamedTuple):
    """A measure, and what calls and shows it."""

    about: str
    """What it measures, in a few words."""
    function: Callable[..., Sequence[Any]]
    """Called as `function(subjects, **what it takes, config=…, progress=…)`."""
    config: type[Any]
    """Its settings: a frozen dataclass with defaults, which become flags `--<measure>.<setting>`."""
    takes: tuple[Literal["store", "model", "cache"], ...]
    """What else it is called with: the store, the base model, a directory for what does not depend on the subjects."""
    scores: tuple[Score, ...]
    version: int = 1
    """Raise it when the same settings give other numbers than before: kept results are then measured again."""
    by_default: bool = True
    """Whether it runs when no measures are named."""


MEASURES: dict[str, Measure] = {
    "fidelity": Measure(
        "reconstruction of held-out activations: variance explained (per prefix too), cosine, L0",
        measure_fidelity,
        FidelityConfig,
        ("store",),
        (Score("fve", ceiling=1.0), Score("fve_prefixes.0", ceiling=1.0), Score("cosine", ceiling=1.0), Score("l0")),
    ),
    "activity": Measure(
        "how latents fire: L0 at inference and under BatchTopK, dead and always-on latents, firing rates",
        activity,
        ActivityConfig,
        ("store",),
        (Score("l0.core"), Score("l0_batchtopk.total"), Score("share_dead"), Score("share_always_on")),
    ),
    "splice": Measure(
        "next-token prediction with the reconstruction spliced in: loss recovered, cross-entropy, KL",
        splice,
        SpliceConfig,
        ("store", "model", "cache"),
        (
            Score("loss_recovered_zero", ceiling=1.0),
            Score("loss_recovered_mean", ceiling=1.0),
            Score("kl", ceiling=0.0),
        ),
    ),
    "redundancy": Measure(
        "near copies among decoder rows, beside what chance gives, and what a meta-SAE explains of them",
        redundancy,
        RedundancyConfig,
        (),
        (Score("mean_max_cosine", null="mean_max_cosine_null"), Score("share_above_07"), Score("meta_fve")),
    ),
}
