"""Latents on a page: scores, lineage, what they do to the next token, and text with their activations shaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dmsae.cores.attribution import Attribution
from dmsae.cores.core import Core
from dmsae.disk import layout
from dmsae.distillation.description import DescriptionConfig, LatentFacts, describe_core
from dmsae.distillation.inspection import sae_of
from dmsae.distillation.matching import open_store_of
from dmsae.distillation.survivors import since_last_cycle
from dmsae.errors import DmsaeError
from dmsae.evaluation.examples import Example
from dmsae.evaluation.logit_lens import TokenEffect
from dmsae.progress import SILENT, Progress
from dmsae.report.markup import Markup, tag

Figures = dict[str, float | None]
"""What became of a latent, by the names of `Survival`."""

_SHOWN = DescriptionConfig(n_examples=3, n_random_examples=3, n_tokens=6, n_around=12)


class Scored(NamedTuple):
    """The score of a core latent and its 95 % interval over resampled contexts, when there is one."""

    score: float
    low: float | None
    high: float | None


def latent_cards(place: Path, core: Core, n: int, root: Path | None = None, progress: Progress = SILENT) -> Markup:
    """Return the first latents of a core, a card each."""
    facts = describe_core(place, core, n, _SHOWN, root, progress)
    scores, since = scores_of(place, core)[:n], survival_of(place, core, root)[:n]
    return Markup.join_all([card(i, core, *known) for i, known in enumerate(zip(facts, scores, since, strict=True))])


def survival_of(place: Path, core: Core, root: Path | None) -> list[Figures | None]:
    """Return what became of each latent since the cycle before; None where that cannot be said."""
    try:
        found = since_last_cycle(place, core, open_store_of(place, core.provenance.store, root))
    except DmsaeError:
        found = None
    return [None] * len(core) if found is None else list(found.rows())


def scores_of(place: Path, core: Core) -> list[Scored]:
    """Return the scores of a core's latents, with intervals if they were resampled."""
    plain = [Scored(score, None, None) for score in core.scores_C.tolist()]
    here = sae_of(place, core).parent
    scored = Attribution.load(here) if layout.has_artifact(here, layout.ATTRIBUTION) else None
    if scored is None or scored.bootstrap_XP is None or not len(scored.bootstrap_XP):
        return plain
    low_P, high_P = scored.interval()
    places = {latent: i for i, latent in enumerate(scored.latents_P.tolist())}
    at = [places.get(slot) for slot in core.slots_C.tolist()]
    return [
        one if i is None else Scored(one.score, float(low_P[i]), float(high_P[i]))
        for one, i in zip(plain, at, strict=True)
    ]


def card(place: int, core: Core, facts: LatentFacts, scored: Scored, since: Figures | None = None) -> Markup:
    """Return all that is known of one core latent."""
    lineage = core.lineage[place]
    interval = "" if scored.low is None else f" (95 % interval {scored.low:.3g} to {scored.high:.3g})"
    told = f"attribution {scored.score:.3g}{interval}; {lineage.told()}"
    activity: list[object] = []
    if facts.firing_rate is not None and facts.mean_activation is not None:
        activity.append(f"fires on {100 * facts.firing_rate:.2g} % of tokens, mean {facts.mean_activation:.3g} ")
    if facts.is_mostly_on:
        activity.append(tag("span", "ON MOST TOKENS", class_="always"))
    return tag(
        "article",
        tag("h3", f"latent {facts.latent} (number {place} of the core)"),
        tag("p", told, class_="soft"),
        tag("p", *activity, class_="soft"),
        _survived(since),
        _tokens("promotes", facts.promoted),
        _tokens("suppresses", facts.suppressed),
        _examples("fires most on", facts.top),
        _examples("random places where it fires", facts.random),
        class_="latent",
    )


def _survived(since: Figures | None) -> Markup:
    """Return what became of a latent since the cycle before, in words."""
    if since is None:
        return Markup("")
    jaccard, chance, cosine = (since[name] for name in ("jaccard", "jaccard_chance", "decoder_cosine"))
    firing = "silent in both" if jaccard is None or chance is None else f"Jaccard {jaccard:.2f}, by chance {chance:.2f}"
    decoder = "" if cosine is None else f"; decoder cosine {cosine:.2f}"
    return tag("p", f"since the cycle before: firing {firing}{decoder}", class_="soft")


def _tokens(verb: str, effects: Sequence[TokenEffect]) -> Markup:
    if not effects:
        return Markup("")
    return tag("p", f"{verb} (approximately): ", *(tag("code", one.token) for one in effects), class_="tokens")


def _examples(heading: str, examples: Sequence[Example]) -> Markup:
    if not examples:
        return Markup("")
    most = max((value or 0.0 for one in examples for value in one.activations), default=0.0) or 1.0
    lines = [_example(one, most) for one in examples]
    return tag("div", tag("p", heading, class_="soft"), *lines)


def _example(example: Example, most: float) -> Markup:
    """Return a stretch of text whose tokens are shaded by activation, in shares of the strongest shown."""
    pieces = []
    for i, (token, activation) in enumerate(zip(example.tokens, example.activations, strict=True)):
        share = max(0.0, min(1.0, (activation or 0.0) / most))
        style = f"background: rgb(var(--warm) / {0.65 * share:.2f})" if share else None
        title = f"{activation:.3g}" if activation else None
        pieces.append(tag("span", token, style=style, title=title, class_="centre" if i == example.centre else None))
    return tag("p", *pieces, class_="example")
