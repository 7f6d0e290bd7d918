"""`dmsae export`: an SAE in the format of another package."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dmsae.commands.output import out


@dataclass(frozen=True)
class ExportCommand:
    """Write an SAE in the format of another package, in which it gives the same codes.

    What a format cannot hold is refused before anything is written, with the name of a format that can.
    """

    sae: Annotated[Path, tyro.conf.Positional]
    """A distillation (the SAE that its core was selected from), or the directory of an SAE in any known format."""
    out: Path
    """Where to write it: a new directory."""
    to: Literal["saelens", "dictionary_learning", "sparsify", "safetensors"] = "saelens"
    """The format. SAEBench reads that of dictionary_learning."""


def command(_recipe: str) -> ExportCommand:
    """Return the command; a recipe has nothing to say about it."""
    return ExportCommand(sae=tyro.MISSING, out=tyro.MISSING)


def run(command: ExportCommand) -> None:
    """Export, and print what was written."""
    from dmsae.distillation.inspection import find_sae
    from dmsae.formats.exchange import export_sae

    exported = export_sae(find_sae(command.sae).directory, command.to, command.out)
    for note in exported.notes:
        out.print(note)
    out.print(f"{command.to}: {', '.join(exported.files)} in {exported.directory}")
