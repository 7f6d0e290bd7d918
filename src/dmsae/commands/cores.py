"""`dmsae core …`: look at cores."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.table import Table

from dmsae.commands.latents import core_show
from dmsae.commands.output import number, out, plain_table
from dmsae.commands.selection import core_select
from dmsae.commands.survival import core_survival
from dmsae.commands.terminal import TERMINAL
from dmsae.errors import DmsaeError

if TYPE_CHECKING:  # the commands import what they need: `--help` does not wait for torch
    from torch import Tensor

    from dmsae.cores.compare import Nearest
    from dmsae.cores.core import Core

Place = Annotated[Path, tyro.conf.Positional]


def core_diff(first: Place, second: Place, pairs: int = 10, root: Path | None = None) -> None:
    """Compare two cores of one model and hook: which latents they share, and how near the others are.

    Beside it stands what chance gives: as many random directions with the covariance of the activations.

    Args:
        first: A distillation run, or a directory with a core in it.
        second: Another one.
        pairs: How many latents of the first to list, by attribution, with their nearest in the second.
        root: Directory of stores. Default: the one that the run used.
    """
    from dmsae.cores.compare import carry_over, n_identical_rows, nearest_in, nearest_rows, require_comparable
    from dmsae.cores.core import Core

    a, b = Core.load(first), Core.load(second)
    require_comparable(a, b)
    if a.provenance == b.provenance:
        kept = carry_over(b, a)
        out.print(
            f"Same run: of {len(a)} latents {kept.kept} were kept and {kept.dropped} dropped; {kept.new} are new."
        )
    out.print(f"Encoder rows identical to the bit: {n_identical_rows(a, b)} of {len(a)} and {len(b)}.")
    if not (len(a) and len(b)):
        return
    nearest = nearest_in(a, b)
    name, random_rows = _chance(second, b, root)
    columns = (nearest.cosine_C, nearest_in(b, a).cosine_C, nearest_rows(a.encoder_CD, random_rows).cosine_C)
    table = plain_table("best cosine", "first in second", "second in first", f"first in as many {name}")
    for bound in (0.99, 0.9, 0.7, 0.5):
        table.add_row(f"≥ {bound}", *(f"{100 * float((best >= bound).float().mean()):.0f} %" for best in columns))
    table.add_row("median", *(f"{best.median():.2f}" for best in columns))
    out.print(table)
    if pairs > 0:
        out.print(_pairs_table(a, b, nearest, pairs))


def _chance(place: Path, core: "Core", root: Path | None) -> "tuple[str, Tensor]":
    """Return as many random directions as a core has, and their name: like the activations if their store is here."""
    from dmsae.cores.controls import RandomKind, random_core
    from dmsae.cores.null import covariance_matched_rows
    from dmsae.distillation.matching import open_store_of

    try:
        store = open_store_of(place, core.provenance.store, root)
    except DmsaeError as error:
        TERMINAL.warn(
            "Chance is shown for isotropic directions, and would be higher for directions like the activations, whose "
            f"store is not here: {error}"
        )
        return "isotropic directions", random_core(core, RandomKind.UNIT, seed=0).encoder_CD
    return "random directions of the activations' covariance", covariance_matched_rows(store, len(core), seed=0)


def _pairs_table(a: "Core", b: "Core", nearest: "Nearest", n_pairs: int) -> Table:
    """Return the first latents of one core, by attribution, beside their nearest in the other; both count from 0."""
    table = plain_table("first", "born", "nearest in second", "born", "cosine")
    for i, (cosine, j) in enumerate(zip(nearest.cosine_C[:n_pairs].tolist(), nearest.index_C.tolist(), strict=False)):
        born = [f"cycle {core.lineage[at].birth_cycle}" for core, at in ((a, i), (b, j))]
        table.add_row(str(i), born[0], str(j), born[1], f"{cosine:.3f}")
    if len(a) > n_pairs:
        table.caption = f"{n_pairs} of {len(a)}; all with --pairs {len(a)}"
    return table


def core_ablate(
    run: Place, cycle: int | None = None, latents: int = 32, contexts: int = 128, root: Path | None = None
) -> None:
    """Measure latents of a distillation by ablation, and say how far that agrees with gradient × activation.

    Subtracts each latent from the model's activations and measures the change of the next-token loss: more direct than
    the gradient, and far more expensive. The scores and the agreement are kept beside the cycle's attribution.

    Args:
        run: Directory of a distillation.
        cycle: Which cycle's SAE. Default: the last one that was scored.
        latents: How many latents to ablate, spread over the whole range of attribution. 0: all candidates.
        contexts: How many contexts to measure them on, at most. A quantile q needs well over 1 / (1 − q) of them.
        root: Directory of stores. Default: the one that the run used.
    """
    from dmsae.cores.ablation import AblationConfig
    from dmsae.distillation.inspection import ablate_cycle

    done = ablate_cycle(run, cycle, AblationConfig(contexts, latents or None), root, TERMINAL)
    agreed, facts = done.agreement, done.measured.facts
    n_contexts, quantile = facts["n_contexts"], facts["config"]["quantile"]
    out.print(f"Cycle {done.cycle}: {agreed.n_latents} latents, from all ranks, ablated in {n_contexts} contexts.")
    out.print(f"Spearman correlation with gradient × activation: {number(agreed.spearman)}")
    cap = "" if done.max_rate is None else f" and max_rate {done.max_rate}"
    out.print(
        f"At coverage {done.coverage}{cap} among these, gradient × activation selects {agreed.n_first}, ablation "
        f"{agreed.n_second}, both {agreed.n_both} (Jaccard {number(agreed.jaccard, 2)})."
    )
    if (1 - quantile) * n_contexts < 1:
        TERMINAL.warn(
            f"A score is the {quantile} quantile over contexts, and of {n_contexts} none lies above it: it is nearly "
            f"the largest change seen. {_more_contexts(n_contexts, contexts)}"
        )


def _more_contexts(n_contexts: int, asked: int) -> str:
    if n_contexts < asked:
        return "The store's pairs hold no more contexts: harvest with more pair_tokens."
    return "Give more --contexts."


COMMANDS = {
    "show": core_show,
    "diff": core_diff,
    "select": core_select,
    "survival": core_survival,
    "ablate": core_ablate,
}
