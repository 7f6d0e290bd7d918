"""Export and import: an SAE of ours in the format of another package, and the other way round."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from dmsae.config import Json, require, to_dict
from dmsae.disk import layout
from dmsae.disk.files import user_path
from dmsae.errors import ConfigError
from dmsae.formats import FORMATS, Imported, load_any, locate
from dmsae.sae.sae import SAE


class Exported(NamedTuple):
    """What was written."""

    directory: Path
    files: tuple[str, ...]
    notes: tuple[str, ...]
    """What should be known of it, a sentence each."""


def export_sae(sae: SAE | Path | str, to: str, out: Path | str) -> Exported:
    """Write an SAE in the format of another package: `saelens`, `dictionary_learning`, `sparsify` or `safetensors`.

    `sae` is an SAE, or the directory of one in any known format. It gives the same codes there; what a format cannot
    hold is an `ExportError` that names one that can, and nothing is written.

    >>> exported = dmsae.export_sae(run / "cycle-1" / "sae", "saelens", "exported")
    >>> exported.files
    ('sae_weights.safetensors', 'cfg.json')
    """
    require(to in FORMATS, "to", to, f"be one of {', '.join(FORMATS)}")
    one = _given(sae)
    directory = new_directory(out)
    notes = FORMATS[to].write(one, directory)
    names = (FORMATS[to].WEIGHTS_NAME, FORMATS[to].CONFIG_NAME)
    return Exported(directory, tuple(name for name in names if name), tuple(notes))


def import_sae(
    source: Path | str,
    out: Path | str | None = None,
    k: int | None = None,
    prefixes: Sequence[int] | None = None,
    center_input: bool | None = None,
    activations: Tensor | None = None,
) -> Imported:
    """Return the SAE in a directory of any known format, or at `hub:owner/name/folder`; with `out`, save it there.

    `k`, `prefixes` and `center_input` are for checkpoints that do not say them. `activations` [n, D] are for those of
    sparsify, which have no threshold. No code in a checkpoint runs.

    >>> _ = dmsae.export_sae(run / "cycle-1" / "sae", "dictionary_learning", "theirs")
    >>> imported = dmsae.import_sae("theirs", "ours")
    >>> imported.kind, imported.sae.config.n_core == dmsae.SAE.load("ours").config.n_core
    ('dictionary_learning', True)
    """
    directory = None if out is None else new_directory(out)
    imported = load_any(locate(str(source)), k, prefixes, center_input, activations)
    if directory is not None:
        imported.sae.save(directory, made_from(imported, str(source)))
    return imported


def made_from(imported: Imported, source: str) -> Json:
    """Return what an imported SAE records of where it came from."""
    origin: Json = {"source": source, "kind": imported.kind, "sha256": imported.sha256, "notes": list(imported.notes)}
    return {"imported_from": origin, "model": to_dict(imported.model)}


def new_directory(out: Path | str) -> Path:
    """Return a directory to write to, unless something is in it."""
    directory = user_path(str(out))
    if directory.is_file() or (directory.is_dir() and any(directory.iterdir())):
        raise ConfigError(f"{directory} is there already, and not empty. Choose a directory that is new.")
    return directory


def _given(sae: SAE | Path | str) -> Imported:
    if isinstance(sae, SAE):
        return Imported(sae, "dmsae", (), "", sae.sample.tokens.model if sae.sample else None)
    directory = user_path(str(sae))
    inside = directory / layout.SAE
    return load_any(inside if layout.has_artifact(inside, layout.SAE) else directory)
