"""Every measure of a dictionary by name: its function, its settings, and which of its figures tables show.

A measure takes subjects and gives one result, a NamedTuple, for each of them in order. It knows nothing of nulls, which
are subjects too. To add one, write the function and its config in a module of their own and add a line to `MEASURES`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from dmsae.config import Json
from dmsae.evaluation import absorption, concept_removal, detection, disentanglement, lexical, probing
from dmsae.evaluation.activity import ActivityConfig, activity
from dmsae.evaluation.beside import Better
from dmsae.evaluation.fidelity import FidelityConfig, measure_fidelity
from dmsae.evaluation.labelled import own_tables
from dmsae.evaluation.nulls import NullKind
from dmsae.evaluation.redundancy import RedundancyConfig, redundancy
from dmsae.evaluation.splice import SpliceConfig, splice

_SAME_CODES = frozenset({NullKind.PERMUTED_DECODER})
_SAME_DECODER = frozenset({NullKind.PERMUTED_DECODER, NullKind.RANDOM_FIRING})


class Score(NamedTuple):
    """A figure that tables show beside its nulls."""

    figure: str
    """Where it is in a result: the name of a field; dots lead into fields of fields, keys and places in lists."""
    label: str
    """What a figure's axis calls it, with its unit."""
    ceiling: float | str | None = None
    """What a perfect dictionary gets: a number, or where in the result it is. None: nothing is perfect."""
    null: str = ""
    """Where in the result the null of this figure is, if it has one of its own besides the null subjects."""
    better: Better = ""
    """Which way is better where there is no ceiling."""

    @property
    def lower_is_better(self) -> bool:
        return self.better == "lower" or self.ceiling == 0


def _probing_scores(settings: Json) -> tuple[Score, ...]:
    """Return the accuracy for every number of latents that was probed."""
    return tuple(
        Score(f"accuracy.{k}", f"accuracy of a probe on\n{_latents(k)}", ceiling="dense_accuracy")
        for k in dict.fromkeys(settings.get("k", probing.ProbingConfig().k))
    )


def _concept_removal_scores(settings: Json) -> tuple[Score, ...]:
    """Return SCR and TPP for 20 latents, as is usual; where other numbers were asked for, for each of these."""
    default = concept_removal.ConceptRemovalConfig().n_ablated
    asked_for = tuple(dict.fromkeys(settings.get("n_ablated", default)))
    ablated = (20,) if asked_for == default else asked_for
    scr = [Score(f"scr.{n}", f"SCR, {_latents(n)}", ceiling=1.0) for n in ablated]
    return (*scr, *(Score(f"tpp.{n}", f"TPP, {_latents(n)}", better="higher") for n in ablated))


def _latents(n: int) -> str:
    return f"{n} latent{'s' * (n > 1)}"


def _no_files(config: Any) -> Mapping[str, str]:
    return {}


def _no_reason(result: Json, settings: Json) -> str:
    return ""


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
    """What tables show of it by default."""
    same_nulls: frozenset[NullKind] = frozenset()
    """Nulls that are the SAE itself in all that this measure reads. They are left out."""
    version: int = 1
    """Raise it when the same settings give other numbers than before, because a bundled asset has changed for example:
    kept results are then measured again."""
    by_default: bool = True
    """Whether it runs when no measures are named."""
    files: Callable[[Any], Mapping[str, str]] = _no_files
    """Given its settings, the SHA-256 of each file of the user's that it reads: its results depend on them too."""
    scores_under: Callable[[Json], tuple[Score, ...]] | None = None
    """What tables show under settings as `evaluation.json` holds them, if it depends on them."""
    caveat: str = ""
    """What whoever reads its scores has to know; tables say it below them."""
    why_no_score: Callable[[Json, Json], str] = _no_reason
    """Given a result and the settings, why the result has no scores; empty if it has."""

    def shown(self, settings: Json) -> tuple[Score, ...]:
        """Return the figures that tables show of results with these settings."""
        return self.scores_under(settings) if self.scores_under else self.scores


MEASURES: dict[str, Measure] = {
    "fidelity": Measure(
        "reconstruction of held-out activations: variance explained (per prefix too), cosine, L0",
        measure_fidelity,
        FidelityConfig,
        ("store",),
        (
            Score("fve", "variance explained", ceiling=1.0),
            Score("fve_prefixes.0", "variance explained\nby the smallest prefix", ceiling=1.0),
            Score("cosine", "cosine of x\nand reconstruction", ceiling=1.0),
            Score("l0", "active latents per token"),
        ),
    ),
    "activity": Measure(
        "how latents fire: L0 at inference and under BatchTopK, dead and always-on latents, firing rates",
        activity,
        ActivityConfig,
        ("store",),
        (
            Score("l0.core", "active core latents\nper token"),
            Score("l0_batchtopk.total", "active latents per token\nunder BatchTopK"),
            Score("share_dead", "share of latents\nthat never fire"),
            Score("share_always_on", "share of latents\nthat are always on"),
        ),
        same_nulls=_SAME_CODES,
    ),
    "splice": Measure(
        "next-token prediction with the reconstruction spliced in: loss recovered, cross-entropy, KL",
        splice,
        SpliceConfig,
        ("store", "model", "cache"),
        (
            Score("loss_recovered_zero", "loss recovered,\nagainst x set to zero", ceiling=1.0),
            Score("loss_recovered_mean", "loss recovered,\nagainst x set to its mean", ceiling=1.0),
            Score("kl", "KL of predictions (nats)", ceiling=0.0),
        ),
    ),
    "redundancy": Measure(
        "near copies among decoder rows, beside what chance gives, and what a meta-SAE explains of them",
        redundancy,
        RedundancyConfig,
        (),
        (
            Score(
                "mean_max_cosine", "mean largest cosine\nof decoder rows", null="mean_max_cosine_null", better="lower"
            ),
            Score("share_above_07", "share of decoder rows\nwith one above 0.7", better="lower"),
            Score("meta_fve", "variance of them that\na meta-SAE explains", better="lower"),
        ),
        same_nulls=_SAME_DECODER,
    ),
    "probing": Measure(
        "k-sparse probing: how well a few latents tell two classes of text apart, beside a dense probe",
        probing.measure,
        probing.ProbingConfig,
        ("model", "cache"),
        _probing_scores({}),
        same_nulls=_SAME_CODES,
        version=2,
        files=lambda config: own_tables(config.labelled.tables),
        scores_under=_probing_scores,
    ),
    "absorption": Measure(
        f"words on which the latent of their first letter stays silent; meant for {absorption.MEANT_FOR}",
        absorption.measure,
        absorption.AbsorptionConfig,
        ("model", "cache"),
        (
            Score("full", "full absorption\n(share of words)", ceiling=0.0),
            Score("fraction", "absorption fraction", ceiling=0.0),
            Score("fraction_v032", "fraction as defined up\nto SAEBench 0.3.2", ceiling=0.0),
        ),
        version=2,
        caveat=f"meant for {absorption.MEANT_FOR}; of smaller ones it says little",
        why_no_score=absorption.why_no_score,
    ),
    "disentanglement": Measure(
        "whether a city's country, continent, language or time zone can be exchanged alone, as probes read them",
        disentanglement.measure,
        disentanglement.DisentanglementConfig,
        ("model", "cache"),
        (
            Score("score", "disentanglement", ceiling=1.0),
            Score("cause", "cause\n(share of pairs)", ceiling=1.0),
            Score("isolation", "isolation\n(share of pairs)", ceiling=1.0),
        ),
        version=2,
        caveat=disentanglement.CAVEAT,
    ),
    "concept_removal": Measure(
        f"SCR and TPP, the effect of ablating a concept's latents; {concept_removal.CAVEAT}",
        concept_removal.measure,
        concept_removal.ConceptRemovalConfig,
        ("model", "cache"),
        _concept_removal_scores({}),
        version=3,
        files=lambda config: own_tables(config.concepts.tables),
        scores_under=_concept_removal_scores,
        caveat=concept_removal.CAVEAT,
    ),
    "lexical_predictability": Measure(
        "how well firing is predicted from the tokens of a latent's top examples, with no judge",
        lexical.measure,
        lexical.LexicalConfig,
        ("store",),
        (Score("lexical_predictability", "lexical predictability", ceiling=1.0, null="shuffled"),),
        same_nulls=_SAME_CODES,
        caveat=lexical.CAVEAT,
    ),
    "detection": Measure(
        "how well a language model, at --detection.judge.url, tells from an explanation where a latent fires",
        detection.measure,
        detection.DetectionConfig,
        ("store", "model", "cache"),
        (
            Score("detection", "detection accuracy", ceiling=1.0),
            Score("detection_balanced", "detection accuracy,\nbalanced", ceiling=1.0),
        ),
        same_nulls=_SAME_CODES,
        by_default=False,
        why_no_score=detection.why_no_score,
    ),
}
