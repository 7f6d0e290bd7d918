"""SAEs in the formats of other packages, and in ours: told apart by their files, read into ours, written from ours."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from dmsae.activations.identity import ModelIdentity
from dmsae.config import from_dict
from dmsae.disk import layout
from dmsae.disk.files import sha256_of, user_path
from dmsae.errors import CheckpointError, ConfigError
from dmsae.formats import bare, dictionary_learning, saelens, sparsify
from dmsae.formats.imported import Given, Imported
from dmsae.sae.sae import SAE, read_made_from
from dmsae.text.hub import download

__all__ = ["FORMATS", "Given", "Imported", "format_of", "load_any", "locate", "require_checkpoint"]


class Format(Protocol):
    """A format of another package: a module with its two directions."""

    WEIGHTS_NAME: str
    """The file that holds the weights."""
    CONFIG_NAME: str
    """The file beside it; empty if there is none."""

    def read(self, path: Path, given: Given) -> Imported:
        """Return the SAE in a directory; anything that is not as it should be is a `CheckpointError`."""

    def write(self, one: Imported, directory: Path) -> list[str]:
        """Write an SAE, and return what should be known of it; what cannot be held is an `ExportError` before that."""


FORMATS: dict[str, Format] = {
    "saelens": saelens,
    "dictionary_learning": dictionary_learning,
    "sparsify": sparsify,
    "safetensors": bare,
}
"""Every format but ours. SAEBench takes those of dictionary_learning."""

_OURS = f"{layout.SAE}.json"
_NAMES = (_OURS, *(one.WEIGHTS_NAME for one in FORMATS.values()))
"""The file by which each format is known."""


def format_of(path: Path) -> str | None:
    """Return the format of the SAE in a directory, `dmsae` for ours; None when there is none."""
    if layout.has_artifact(path, layout.SAE):
        return "dmsae"
    for name, one in FORMATS.items():
        if (path / one.WEIGHTS_NAME).is_file() and (one is not sparsify or (path / one.CONFIG_NAME).is_file()):
            return name
    return None


def locate(source: str) -> Path:
    """Return the directory of a checkpoint: a local path, or `hub:owner/name/folder`, downloaded."""
    if not source.startswith("hub:"):
        return user_path(source)
    owner, _, rest = source.removeprefix("hub:").partition("/")
    name, _, folder = rest.partition("/")
    if not (owner and name) or ".." in folder.split("/"):
        raise ConfigError(f"{source!r} is not a Hub checkpoint: expected hub:owner/name or hub:owner/name/folder.")
    known = {file for one in FORMATS.values() for file in (one.WEIGHTS_NAME, one.CONFIG_NAME) if file}
    known |= {f"{artifact}.{suffix}" for artifact in (layout.SAE, layout.SAMPLE) for suffix in ("json", "safetensors")}
    patterns = [f"{folder}/{file}" if folder else file for file in sorted(known)]
    return download(f"{owner}/{name}", patterns, CheckpointError) / folder


def load_any(
    path: Path,
    k: int | None = None,
    prefixes: Sequence[int] | None = None,
    center_input: bool | None = None,
    activations: Tensor | None = None,
) -> Imported:
    """Return the SAE in a directory of any known format, and what had to be changed in it.

    `k`, `prefixes` and `center_input` are for checkpoints that do not say them; what a checkpoint says must not be
    contradicted. On `activations` [n, D] a threshold is set for an SAE that has none.
    """
    given = Given(k, prefixes, center_input, activations)
    match format_of(path):
        case None:
            raise _no_checkpoint(path)
        case "dmsae":
            return _read_ours(path).agreeing(path, given)
        case name:
            return FORMATS[name].read(path, given)


def _read_ours(path: Path) -> Imported:
    sae, digest = SAE.load(path), sha256_of(path / f"{layout.SAE}.safetensors")
    model = read_made_from(path).get("model")
    try:
        identity = from_dict(ModelIdentity, model) if model else None
    except ConfigError as error:
        raise CheckpointError(f"{path / layout.SAE}.json does not say what model it is of: {error}") from error
    return Imported(sae, "dmsae", (), digest, identity)


def require_checkpoint(source: str) -> None:
    """Raise when a source is a local path at which there is no checkpoint; nothing is read or downloaded."""
    path = user_path(source)
    if not source.startswith("hub:") and format_of(path) is None:
        raise _no_checkpoint(path)


def _no_checkpoint(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} holds no SAE of a known format. {_look_around(path)}")


def _look_around(path: Path) -> str:
    """Return what to do about a path that is not a checkpoint directory."""
    if not path.exists():
        return "There is nothing at this path."
    if path.is_file():
        return f"It is a file; give the directory that holds it: {path.parent}."
    if below := sorted({file.parent for name in _NAMES for file in path.glob(f"*/{name}")}):
        return f"Give one of the directories below it: {', '.join(str(directory) for directory in below[:12])}."
    others = ", ".join(f"{one.WEIGHTS_NAME} ({name})" for name, one in FORMATS.items())
    return f"Expected {_OURS} (ours) or one of {others} in it."
