"""A small result on disk: `<name>.safetensors` and `<name>.json`, each written whole, each checked when read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dmsae.config import Json
from dmsae.disk.files import canonical_hash, sha256_of, write_json, write_tensors
from dmsae.errors import CheckpointError

if TYPE_CHECKING:  # so that commands which read no tensors do not wait for torch
    from torch import Tensor

_TENSORS_SEAL, _FACTS_SEAL = "tensors_sha256", "facts_sha256"


def write_artifact(directory: Path, name: str, tensors: "Mapping[str, Tensor]", facts: Json) -> None:
    """Write tensors and JSON facts, the facts last, sealed with the checksums of both."""
    digest = write_tensors(directory / f"{name}.safetensors", {key: t.detach().cpu() for key, t in tensors.items()})
    sealed = {**facts, _TENSORS_SEAL: digest}
    write_json(directory / f"{name}.json", {**sealed, _FACTS_SEAL: canonical_hash(sealed)})


def read_artifact(directory: Path, name: str) -> "tuple[dict[str, Tensor], Json]":
    """Return what was written, or raise `CheckpointError` when anything about it has changed."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    facts = _read_facts(directory / f"{name}.json")
    path = directory / f"{name}.safetensors"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, although {name}.json is there. Restore it.")
    if sha256_of(path) != facts.pop(_TENSORS_SEAL):
        raise CheckpointError(f"{path} is not the file that {name}.json was written for. Restore it.")
    try:
        return load_file(path), facts
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def read_facts(directory: Path, name: str) -> Json:
    """Return the facts of an artifact alone; its tensors are neither read nor checked."""
    facts = _read_facts(directory / f"{name}.json")
    del facts[_TENSORS_SEAL]
    return facts


def _read_facts(path: Path) -> Json:
    try:
        facts: Json = json.loads(path.read_text(encoding="utf8"))
        seal = facts.pop(_FACTS_SEAL)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: {path.parent} holds no saved {path.stem}.") from None
    except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
        raise CheckpointError(f"{path} is not the JSON of a saved {path.stem}: {error!r}.") from error
    if canonical_hash(facts) != seal:
        raise CheckpointError(f"{path} has changed since it was written. Restore it.")
    return facts
