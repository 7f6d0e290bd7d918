"""`dmsae import`: an SAE of another package becomes one of ours."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from dmsae.commands.output import out


@dataclass(frozen=True)
class ImportCommand:
    """Read an SAE of another package, and save it as one of ours.

    Formats: SAELens 6 and later, dictionary_learning and SAEBench, sparsify, bare safetensors. They are told apart by
    their files. Nothing in a checkpoint is run.
    """

    source: Annotated[str, tyro.conf.Positional]
    """The directory of the SAE, or `hub:owner/name/folder`."""
    out: Path
    """Where to save it: a new directory."""
    k: int | None = None
    """Active latents per token that it was trained for, if it does not say."""
    prefixes: tuple[int, ...] = ()
    """Cumulative sizes of its nested prefixes, the last one its width, if it does not say."""
    center_input: bool | None = None
    """Whether its encoder sees x − b_dec, if it does not say."""
    store: str = ""
    """Key of a store of the same model and hook, to set a threshold on if it has none (sparsify)."""
    root: Path | None = None
    """Where that store is, if not in the default directory."""


def command(_recipe: str) -> ImportCommand:
    """Return the command; a recipe has nothing to say about it."""
    return ImportCommand(source=tyro.MISSING, out=tyro.MISSING)


def run(command: ImportCommand) -> None:
    """Import, and print what was found."""
    from dmsae.activations.splits import Split
    from dmsae.activations.store import open_store
    from dmsae.formats.exchange import import_sae

    activations = None
    if command.store:
        store = open_store(command.store, command.root)
        split = Split.HELDOUT if store.n_rows(Split.HELDOUT) else Split.TRAIN
        activations = next(store.batches(split, 4096))["x"]
    imported = import_sae(
        command.source, command.out, command.k, command.prefixes or None, command.center_input, activations
    )
    config = imported.sae.config
    for note in imported.notes:
        out.print(note)
    core = f", a {config.core.kind} core of {config.n_core}" if config.core else ""
    out.print(
        f"{imported.kind}: {config.width:,} latents on activations {config.d_model} wide, k = {config.k}{core}. Saved "
        f"in {command.out}"
    )
    if imported.sae.sample is None:
        out.print("It holds no token sample: whether a model is the one it was made from cannot be checked.")
