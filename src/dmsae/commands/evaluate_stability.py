"""`dmsae evaluate stability`: what SAEs, or cores, that were trained apart have in common."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from dmsae.commands.output import number, plain_table
from dmsae.commands.output import out as printed
from dmsae.commands.terminal import TERMINAL
from dmsae.disk import layout

if TYPE_CHECKING:  # `--help` does not wait for torch
    from dmsae.evaluation.core_stability import CorePairStability
    from dmsae.evaluation.stability import GroupStability, PairStability, StabilityConfig


def evaluate_stability(
    places: Annotated[tuple[Path, ...], tyro.conf.Positional],
    cores: bool = False,
    out: Path = Path("stability"),
    min_cosine: float = 0.7,
    seed: int = 0,
    store: str = "",
    root: Path | None = None,
) -> None:
    """Compare latents of SAEs that were trained apart, such as seeds: matched one to one, beside random ones.

    Core and other latents are compared separately. PW-MCC is the mean cosine of matched rows, signed or by size; shared
    are latents with one partner by encoder and by decoder; Jaccard and correlation say whether partners fire on the
    same held-out tokens. Frequent latents are shared more, so figures are also given as means over bins of firing rate,
    that of both partners. Everything, each bin too, is in stability.json.

    Args:
        places: Directories of two or more SAEs of one model and hook; with --cores of distillations or cores.
        cores: Compare cores by their encoder rows and, within one run, by their lineage.
        out: Directory for stability.json.
        min_cosine: Shared latents are above this cosine by encoder and by decoder.
        seed: Decides the random directions of the nulls.
        store: Key of the store on whose held-out activations SAEs fire. Default: the one that all of them name.
        root: Directory of stores.
    """
    from dmsae.config import to_dict
    from dmsae.disk.artifact import write_sealed
    from dmsae.evaluation.scores import as_json
    from dmsae.evaluation.stability import StabilityConfig

    config = StabilityConfig(min_cosine=min_cosine, seed=seed)
    pairs = _compare_cores(places, config) if cores else _compare_saes(places, config, store, root)
    kind = "cores" if cores else "saes"
    write_sealed(out / layout.STABILITY, {"kind": kind, "settings": to_dict(config), "pairs": as_json(pairs)})
    printed.print(f"Everything is in {out / layout.STABILITY}.")


def _compare_saes(
    places: Sequence[Path], config: "StabilityConfig", store: str, root: Path | None
) -> "Sequence[PairStability]":
    from dmsae.commands.found import find_saes, store_of
    from dmsae.evaluation.stability import stability

    found = find_saes(places)
    held_in = store_of(found, store, root)
    saes = {name: one.sae for name, one in found.items()}
    pairs = stability(saes, held_in, config, layout.evaluation_cache(), TERMINAL)
    _print_saes(pairs)
    return pairs


def _compare_cores(places: Sequence[Path], config: "StabilityConfig") -> "Sequence[CorePairStability]":
    from dmsae.cores.core import Core
    from dmsae.evaluation.core_stability import core_stability

    cores = {str(place): Core.load(place) for place in places}
    pairs = core_stability(cores, config, layout.evaluation_cache(), TERMINAL)
    _print_cores(pairs)
    return pairs


_MCC = ("decoder", "|decoder|", "null", "part", "encoder", "|encoder|", "null", "part", "|random|")
_FIRING = ("shared", "null", "part", "Jaccard", "by chance", "null", "part", "correlation", "null", "part")
_BINS_ROWS = ("decoder", "null", "part", "encoder", "null", "part", "shared", "null", "part")
_BINS_FIRING = ("Jaccard", "null", "part", "correlation", "null", "part")


def _print_saes(pairs: "Sequence[PairStability]") -> None:
    """Print the SAEs by number, and tables of a line for each group of latents of each pair."""
    names = list(dict.fromkeys(name for pair in pairs for name in (pair.first, pair.second)))
    for i, name in enumerate(names, 1):
        printed.print(f"{i}  {name}")
    printed.print("\nPW-MCC, the mean cosine of matched rows:", style="bold")
    _print_groups(pairs, names, _MCC, _mcc)
    printed.print("decoder, encoder: signed; |decoder|, |encoder|: absolute, with the best match by size.")
    printed.print(
        "null: signed, of random directions with the covariance of these rows. part: of the way from it to 1."
    )
    printed.print("|random|: absolute, of directions drawn evenly.")
    printed.print("\nShared latents, and firing of partners:", style="bold")
    _print_groups(pairs, names, _FIRING, _firing)
    printed.print("null: of random partners that fire as often. by chance: the Jaccard if both fired independently.")
    printed.print("part: of the way from the null to 1, here and below.")
    printed.print("\nMeans over bins of firing rate, each counting once:", style="bold")
    _print_groups(pairs, names, _BINS_ROWS, _rows_over_bins)
    printed.print("decoder, encoder: signed cosines of partners. null: of random partners that fire as often.")
    _print_groups(pairs, names, _BINS_FIRING, _firing_over_bins)
    if len(pairs) > 1:
        printed.print("Pairs share SAEs and depend on each other: their mean has no interval.")


def _print_groups(
    pairs: "Sequence[PairStability]",
    names: Sequence[str],
    columns: Sequence[str],
    figures: "Callable[[GroupStability], tuple[float | None, ...]]",
) -> None:
    """Print figures of the core and of the other latents of each pair, and their means over pairs."""
    table = plain_table("pair", "latents", "matched", *columns)
    for name in ("core", "noncore"):
        groups = [(pair, group) for pair in pairs if (group := getattr(pair, name)) is not None]
        for pair, group in groups:
            numbers = f"{names.index(pair.first) + 1}, {names.index(pair.second) + 1}"
            shown = "core, the same rows" if name == "core" and pair.same_core else name.replace("non", "non-")
            table.add_row(numbers, shown, str(group.all.n), *map(number, figures(group)))
        if len(groups) > 1:
            means = map(_mean, zip(*(figures(group) for _, group in groups), strict=True))
            table.add_row("mean", name.replace("non", "non-"), "", *map(number, means))
    printed.print(table)


def _mcc(group: "GroupStability") -> tuple[float | None, ...]:
    mcc = group.mcc
    decoder, *decoder_beside = _beside(mcc.decoder_signed, group.null_decoder)
    encoder, *encoder_beside = _beside(mcc.encoder_signed, group.null_encoder)
    return (
        decoder, mcc.decoder_absolute, *decoder_beside,
        encoder, mcc.encoder_absolute, *encoder_beside,
        group.null_isotropic.absolute,
    )  # fmt: skip


def _firing(group: "GroupStability") -> tuple[float | None, ...]:
    means, null = group.all, group.null_all
    jaccard, *jaccard_beside = _beside(means.jaccard, null.jaccard)
    return (
        *_beside(means.shared, null.shared),
        jaccard, means.jaccard_chance, *jaccard_beside,
        *_beside(means.correlation, null.correlation),
    )  # fmt: skip


def _rows_over_bins(group: "GroupStability") -> tuple[float | None, ...]:
    bins, null = group.over_bins, group.null_over_bins
    cosines = (*_beside(bins.decoder, null.decoder), *_beside(bins.encoder, null.encoder))
    return (*cosines, *_beside(bins.shared, null.shared))


def _firing_over_bins(group: "GroupStability") -> tuple[float | None, ...]:
    bins, null = group.over_bins, group.null_over_bins
    return (*_beside(bins.jaccard, null.jaccard), *_beside(bins.correlation, null.correlation))


def _beside(score: float | None, null: float | None) -> tuple[float | None, ...]:
    """Return a score, its null, and the part of the way from that to 1."""
    from dmsae.evaluation.beside import part_of_the_way

    return score, null, part_of_the_way(score, null, 1.0)


def _print_cores(pairs: "Sequence[CorePairStability]") -> None:
    """Print a line for each pair of cores."""
    table = plain_table(
        "first", "second", "latents", "and", "encoder", "null", "part", "absolute", "|random|",
        "shared", "null", "part", "identical", "kept by lineage",
    )  # fmt: skip
    for pair in pairs:
        matched = _beside(pair.encoder_signed, pair.null_encoder)
        absolute = (pair.encoder_absolute, pair.null_isotropic.absolute)
        figures = (*matched, *absolute, *_beside(pair.shared, pair.null_shared))
        carried = str(pair.carried.kept) if pair.carried else "–"
        sizes = (str(pair.n_first), str(pair.n_second))
        table.add_row(pair.first, pair.second, *sizes, *map(number, figures), str(pair.n_identical), carried)
    printed.print(table)
    printed.print("encoder: PW-MCC, signed. null: that of random directions with the covariance of the rows.")
    printed.print("part: of the way from the null to 1.")
    printed.print("absolute: with the best match by size. |random|: that of directions drawn evenly.")
    printed.print("identical: rows the same to the bit. Only cores of one run have a lineage in common.")


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
