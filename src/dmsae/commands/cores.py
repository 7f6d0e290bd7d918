"""`dmsae core …`: look at cores."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.table import Table
from rich.text import Text

from dmsae.commands.output import number, out, plain_table
from dmsae.commands.terminal import TERMINAL
from dmsae.errors import DmsaeError

if TYPE_CHECKING:  # the commands import what they need: `--help` does not wait for torch
    from dmsae.cores.compare import Nearest
    from dmsae.cores.core import Core
    from dmsae.evaluation.examples import Example

Place = Annotated[Path, tyro.conf.Positional]


def core_show(place: Place, top: int = 12, examples: int = 2, root: Path | None = None) -> None:
    """Show a core: its latents by attribution, where they came from, and the text that fires them most.

    Args:
        place: A distillation run, or a directory with a core in it.
        top: How many latents to show.
        examples: Texts per latent; needs the run that the core came from, and its store.
        root: Directory of stores.
    """
    from dmsae.cores.core import Core

    core = Core.load(place)
    model = core.provenance.model
    out.print(f"Core of {len(core)} latents, selected after cycle {core.cycle}", style="bold")
    out.print(f"model  {model.name} {model.revision} at {model.hook}; store {core.provenance.store}")
    out.print("born   " + ", ".join(f"cycle {cycle}: {count}" for cycle, count in core.births().items()))
    shown = _examples(place, core, top, examples, root) if examples else []
    for i, (lineage, score) in enumerate(zip(core.lineage[:top], core.scores_C.tolist(), strict=False)):
        out.print(
            f"\n{i + 1}. attribution {score:.3g}, born in cycle {lineage.birth_cycle} as latent "
            f"{lineage.birth_index}, selected {len(lineage.selected_in)} times"
        )
        for example in shown[i] if shown else []:
            out.print(_line(example))


def core_diff(first: Place, second: Place, pairs: int = 10) -> None:
    """Compare two cores: which latents they share, and how near the others are.

    Args:
        first: A distillation run, or a directory with a core in it.
        second: Another one.
        pairs: How many latents of the first to list, by attribution, with their nearest in the second.
    """
    from dmsae.cores.compare import carry_over, n_identical_rows, nearest_in
    from dmsae.cores.controls import RandomKind, random_core
    from dmsae.cores.core import Core

    a, b = Core.load(first), Core.load(second)
    if a.provenance == b.provenance:
        kept = carry_over(b, a)
        out.print(
            f"Same run: of {len(a)} latents {kept.kept} were kept and {kept.dropped} dropped; {kept.new} are new."
        )
    out.print(f"Encoder rows identical to the bit: {n_identical_rows(a, b)} of {len(a)} and {len(b)}.")
    if not (len(a) and len(b)):
        return
    nearest = nearest_in(a, b)
    chance = nearest_in(a, random_core(b, RandomKind.UNIT, seed=0))
    columns = (nearest.cosine_C, nearest_in(b, a).cosine_C, chance.cosine_C)
    table = plain_table("best cosine", "first in second", "second in first", "first in as many random directions")
    for bound in (0.99, 0.9, 0.7, 0.5):
        table.add_row(f"≥ {bound}", *(f"{100 * float((best >= bound).float().mean()):.0f} %" for best in columns))
    table.add_row("median", *(f"{best.median():.2f}" for best in columns))
    out.print(table)
    if pairs > 0:
        out.print(_pairs_table(a, b, nearest, pairs))


def _pairs_table(a: "Core", b: "Core", nearest: "Nearest", n_pairs: int) -> Table:
    """Return the first latents of one core, by attribution, beside their nearest in the other."""
    table = plain_table("first", "born", "nearest in second", "born", "cosine")
    for i, (cosine, j) in enumerate(zip(nearest.cosine_C[:n_pairs].tolist(), nearest.index_C.tolist(), strict=False)):
        born = [f"cycle {core.lineage[at].birth_cycle}" for core, at in ((a, i), (b, j))]
        table.add_row(str(i + 1), born[0], str(j + 1), born[1], f"{cosine:.3f}")
    return table


def core_ablate(
    run: Place, cycle: int | None = None, latents: int = 32, contexts: int = 24, root: Path | None = None
) -> None:
    """Measure latents of a distillation by ablation, and say how far that agrees with gradient × activation.

    Subtracts each latent from the model's activations and measures the change of the next-token loss: more direct than
    the gradient, and far more expensive. The scores and the agreement are kept beside the cycle's attribution.

    Args:
        run: Directory of a distillation.
        cycle: Which cycle's SAE. Default: the last one.
        latents: How many latents to ablate: those with the highest attribution. 0: all candidates.
        contexts: How many contexts to measure them on.
        root: Directory of stores.
    """
    from dmsae.cores.ablation import AblationConfig
    from dmsae.distillation.inspection import ablate_cycle

    done = ablate_cycle(run, cycle, AblationConfig(contexts, latents or None), root, TERMINAL)
    agreed = done.agreement
    out.print(
        f"Cycle {done.cycle}: {agreed.n_latents} latents ablated in {done.measured.facts['n_contexts']} contexts."
    )
    out.print(f"Spearman correlation with gradient × activation: {number(agreed.spearman)}")
    out.print(
        f"At coverage {done.coverage} among these, gradient × activation selects {agreed.n_first}, ablation "
        f"{agreed.n_second}, both {agreed.n_both} (Jaccard {agreed.jaccard:.2f})."
    )


def _examples(place: Path, core: "Core", top: int, n_examples: int, root: Path | None) -> "list[list[Example]]":
    """Return the texts that fire the first latents, or nothing (and say why) when what is needed is not there."""
    from dmsae.distillation.inspection import core_examples

    try:
        return core_examples(place, core, top, n_examples, root)
    except DmsaeError as error:
        TERMINAL.note(f"No example texts: {error}")
        return []


def _line(example: "Example") -> Text:
    before, token, after = (part.replace("\n", "⏎") for part in example[1:])
    return Text.assemble(f"   {number(example.activation, 1):>7}  {before}", (f"»{token}«", "bold"), after)


COMMANDS = {"show": core_show, "diff": core_diff, "ablate": core_ablate}
