"""`dmsae core survival`: what became of a core in the SAEs trained from it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from dmsae.commands.output import number, out, plain_table
from dmsae.commands.terminal import TERMINAL

if TYPE_CHECKING:  # `--help` does not wait for torch
    from dmsae.distillation.survivors import Survivor


def core_survival(
    core: Annotated[Path, tyro.conf.Positional],
    saes: Annotated[tuple[Path, ...], tyro.conf.Positional],
    store: str = "",
    root: Path | None = None,
) -> None:
    """Say what is left of a core in SAEs that carry it: when its latents fire, how strongly, and what they write.

    A random core comes from no SAE: given two SAEs that carry the same one, they are compared with each other.

    Args:
        core: A distillation run, or a directory with a core in it.
        saes: Directories of SAEs, as `dmsae transfer` makes them.
        store: Key of the store whose held-out activations are used. Default: the one that the core was distilled from.
        root: Directory of stores. Default: the one that the run used.
    """
    from dmsae.cores.core import Core
    from dmsae.distillation.matching import open_store_of
    from dmsae.distillation.survivors import survivors

    loaded = Core.load(core)
    held_in = open_store_of(core, store or loaded.provenance.store, root)
    print_survivors(survivors(core, loaded, saes, held_in, TERMINAL))


def print_survivors(rows: "Sequence[Survivor]") -> None:
    """Print medians over the latents of each core."""
    table = plain_table(
        "core in", "and in", "rate", "rate there", "Jaccard", "by chance", "correlation", "decoder", "top 20", "silent"
    )
    for before, after, summary in rows:
        rates = (number(summary.rate_before), number(summary.rate_after))
        firing = (number(summary.jaccard, 2), number(summary.jaccard_chance, 2), number(summary.correlation, 2))
        writes = (number(summary.decoder_cosine, 2), number(summary.top_overlap, 2), str(summary.n_silent_after))
        table.add_row(before, after, *rates, *firing, *writes)
    out.print(table)
    out.print("Medians over the core's latents on held-out activations. Rate: share of tokens on which a latent fires.")
    out.print("Jaccard and correlation: of its firing in both SAEs. Decoder: cosine. Top 20: strongest tokens shared.")
