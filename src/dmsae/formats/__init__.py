"""SAEs in other formats: dictionary_learning / SAEBench and SAELens directories, read into ours."""

from collections.abc import Sequence
from pathlib import Path

from dmsae.activations.identity import ModelIdentity
from dmsae.config import from_dict
from dmsae.disk import layout
from dmsae.disk.files import sha256_of, user_path
from dmsae.errors import CheckpointError, ConfigError
from dmsae.formats import dictionary_learning, saelens
from dmsae.formats.imported import Imported
from dmsae.sae.sae import SAE, read_made_from
from dmsae.text.hub import download

__all__ = ["Imported", "load_any", "locate", "require_checkpoint"]

_NAMES = (f"{layout.SAE}.json", dictionary_learning.WEIGHTS_NAME, saelens.WEIGHTS_NAME)
"""The file by which each format is known."""


def locate(source: str) -> Path:
    """Return the directory of a checkpoint: a local path, or `hub:owner/name/folder`, downloaded."""
    if not source.startswith("hub:"):
        return user_path(source)
    owner, _, rest = source.removeprefix("hub:").partition("/")
    name, _, folder = rest.partition("/")
    if not (owner and name):
        raise ConfigError(f"{source!r} is not a Hub checkpoint: expected hub:owner/name or hub:owner/name/folder.")
    return download(f"{owner}/{name}", [f"{folder}/*" if folder else "*"], CheckpointError) / folder


def load_any(path: Path, k: int | None = None, prefixes: Sequence[int] | None = None) -> Imported:
    """Return the SAE in a directory of any known format, and what had to be changed in it.

    `k` and `prefixes` are for checkpoints that do not say them; what a checkpoint says must not be contradicted.
    """
    if layout.has_artifact(path, layout.SAE):
        sae, digest = SAE.load(path), sha256_of(path / f"{layout.SAE}.safetensors")
        model = read_made_from(path).get("model")
        try:
            identity = from_dict(ModelIdentity, model) if model else None
        except ConfigError as error:
            raise CheckpointError(f"{path / layout.SAE}.json does not say what model it is of: {error}") from error
        return Imported(sae, "dmsae", (), digest, identity).agreeing(path, k, prefixes)
    if (path / dictionary_learning.WEIGHTS_NAME).is_file():
        return dictionary_learning.load(path, k, prefixes)
    if (path / saelens.WEIGHTS_NAME).is_file():
        return saelens.load(path, k, prefixes)
    raise _no_checkpoint(path)


def require_checkpoint(source: str) -> None:
    """Raise when a source is a local path at which there is no checkpoint; nothing is read or downloaded."""
    path = user_path(source)
    if not source.startswith("hub:") and not any((path / name).is_file() for name in _NAMES):
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
    return f"Expected {_NAMES[0]} (ours), {_NAMES[1]} (dictionary_learning, SAEBench) or {_NAMES[2]} (SAELens) in it."
