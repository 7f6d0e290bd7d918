"""`dmsae core show`: the latents of a core or an SAE."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.text import Text

from dmsae.commands.output import number, out
from dmsae.commands.terminal import TERMINAL
from dmsae.errors import DmsaeError
from dmsae.text.visible import visible

if TYPE_CHECKING:  # `--help` does not wait for torch
    from dmsae.distillation.description import DescriptionConfig, LatentFacts
    from dmsae.evaluation.examples import Example
    from dmsae.evaluation.logit_lens import TokenEffect


def core_show(
    place: Annotated[Path, tyro.conf.Positional],
    top: int = 12,
    examples: int = 2,
    random_examples: int = 2,
    tokens: int = 5,
    latents: tuple[int, ...] = (),
    store: str = "",
    root: Path | None = None,
) -> None:
    """Show a core: its latents by attribution, where they came from, what fires them, and which tokens they promote.

    Of a directory that holds an SAE and no core, or with --latents, shows latents of the SAE. Firing rates, means and
    texts are of held-out text. Promoted and suppressed tokens are approximate: those whose logits the decoder row moves
    through the model's final norm and unembedding, as if no block after the hook read it.

    Args:
        place: A distillation run, a directory with a core in it, or a directory with an SAE in it.
        top: How many latents to show.
        examples: Texts per latent on which it fires most; needs the store.
        random_examples: Texts per latent drawn from all those on which it fires.
        tokens: Promoted and suppressed tokens per latent. 0: none, and the model is not loaded, which takes seconds.
        latents: Show these latents of the SAE, by index. Of a distillation: of the SAE that its core was selected from.
        store: Key of the store with the text. Default: the one that the SAE was made from.
        root: Directory of stores. Default: the one that the run used.
    """
    from dmsae.distillation.description import DescriptionConfig
    from dmsae.distillation.inspection import has_core

    wanted = DescriptionConfig(n_examples=examples, n_random_examples=random_examples, n_tokens=tokens)
    if latents or not has_core(place):
        _show_sae(place, latents, top, wanted, store, root)
    else:
        _show_core(place, top, wanted, root)


def _show_core(place: Path, top: int, wanted: "DescriptionConfig", root: Path | None) -> None:
    """Print what a core is, and what is known of its first latents."""
    from dmsae.cores.core import Core
    from dmsae.distillation.description import describe_core

    core = Core.load(place)
    model = core.provenance.model
    out.print(f"Core of {len(core)} latents, selected after cycle {core.cycle}", style="bold")
    out.print(f"model  {model.name} {model.revision} at {model.hook}; store {core.provenance.store}")
    out.print("born   " + ", ".join(f"cycle {cycle}: {count}" for cycle, count in core.births().items()))
    facts: Sequence[LatentFacts | None] = [None] * min(top, len(core))
    try:
        facts = describe_core(place, core, top, wanted, root, TERMINAL)
    except DmsaeError as error:
        TERMINAL.note(f"No more is known of these latents: {error}")
    for i, one in enumerate(facts):
        lineage, score = core.lineage[i], float(core.scores_C[i])
        _print_latent(
            f"latent {int(core.slots_C[i])} (number {i} of the core): attribution {score:.3g}, {lineage.told()}",
            one,
        )
    out.print(
        f"\nA latent's index is that in the SAE of cycle {core.cycle}, which the core was selected from; 'dmsae read' "
        "and 'dmsae steer' take it.\nIts number is its index in every SAE trained from this core."
    )
    _print_legend(facts)


def _show_sae(
    place: Path, latents: tuple[int, ...], top: int, wanted: "DescriptionConfig", store: str, root: Path | None
) -> None:
    """Print what an SAE is, and what is known of some of its latents: those given, or the first."""
    from dmsae.distillation.description import describe_found
    from dmsae.distillation.inspection import find_sae, require_latents_of

    one = find_sae(place)
    config = one.sae.config
    chosen = list(latents) or list(range(min(top, config.width)))
    require_latents_of(one.sae, chosen)
    out.print(f"SAE of {config.width:,} latents, k = {config.k}, in {one.directory}", style="bold")
    out.print(f"core   {config.n_core or 'none'}; prefixes {', '.join(map(str, config.prefixes))}")
    if model := one.made_from.get("model"):
        out.print(f"model  {model['name']} {model['revision']} at {model['hook']}")
    facts = describe_found(one, chosen, wanted, store, root, TERMINAL)
    for latent in facts:
        _print_latent(f"latent {latent.latent}, in {_group(config.n_core, config.prefixes, latent.latent)}", latent)
    _print_legend(facts)


def _group(n_core: int, prefixes: tuple[int, ...], latent: int) -> str:
    if latent < n_core:
        return "the core"
    return f"prefix {next(i for i, size in enumerate(prefixes) if latent < size)}"


def _print_latent(title: str, facts: "LatentFacts | None") -> None:
    """Print what is known of a latent below its title."""
    out.print(f"\n{title}{_activity(facts) if facts else ''}")
    if facts is None:
        return
    for name, effects in (("promotes", facts.promoted), ("suppresses", facts.suppressed)):
        if effects:
            out.print(f"   {name:<10}  {', '.join(map(_effect, effects))}")
    for name, texts in (("top", facts.top), ("random", facts.random)):
        for i, example in enumerate(texts):
            out.print(_line("" if i else name, example))


def _activity(facts: "LatentFacts") -> str:
    """Return how often and how strongly a latent fires, in words; one that is on most of the time is marked."""
    if facts.firing_rate is None or facts.mean_activation is None:
        return ""
    if not facts.firing_rate:
        return "; fires on no token"
    mark = " (ON MOST TOKENS)" if facts.is_mostly_on else ""
    return f"; fires on {100 * facts.firing_rate:.1f} % of tokens, mean {facts.mean_activation:.1f}{mark}"


def _effect(effect: "TokenEffect") -> str:
    return f"»{visible(effect.token)}« {effect.logit:+.2f}"


def _line(name: str, example: "Example") -> Text:
    before, token, after = map(visible, (example.before, example.token, example.after))
    return Text.assemble(f"   {name:<6}  {number(example.activation, 1):>7}  {before}", (f"»{token}«", "bold"), after)


def _print_legend(facts: "Sequence[LatentFacts | None]") -> None:
    """Say how tokens were found, when there are any."""
    if any(one and one.promoted for one in facts):
        out.print(
            "\nTokens are approximate: what the decoder row does to their logits through the final norm and the "
            "unembedding alone,\nper unit of activation, less the mean over all tokens, where the norm divides by 1. "
            "The more blocks lie between,\nthe less they say."
        )
