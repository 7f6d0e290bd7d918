"""Results on disk that are checked when they are read: sealed JSON, and artifacts of tensors and sealed facts.

A seal is a checksum of the facts in the same file. A sealed file can also be bound to others, such as scores to the SAE
that they are of: it records their seals by relative path, and is refused when one of them is there and is another. One
that is not there is not missed, so results can be copied to another place.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dmsae.config import Json
from dmsae.disk import layout
from dmsae.disk.files import canonical_hash, read_json_value, sha256_of, write_json, write_tensors
from dmsae.disk.tensor_stream import TensorStream, write_stream
from dmsae.errors import CheckpointError, first_line

if TYPE_CHECKING:  # so that commands which read no tensors do not wait for torch
    from torch import Tensor

_TENSORS_SEAL, _FACTS_SEAL, _BOUND = "tensors_sha256", "facts_sha256", "bound_to"

Bound = Mapping[str, str]
"""Seals of other files, by their path relative to the folder of the file that is bound."""


def write_sealed(path: Path, facts: Json, bound_to: Bound | None = None) -> None:
    """Write facts as JSON with a checksum of them, bound to other files."""
    sealed: Json = json.loads(json.dumps(facts))  # as they will be read: keys that were numbers sort otherwise as text
    sealed |= {_BOUND: dict(bound_to)} if bound_to else {}
    write_json(path, sealed | {_FACTS_SEAL: canonical_hash(sealed)})


def read_sealed(path: Path, remedy: str = "Restore it.", must_be_sealed: bool = True) -> Json:
    """Return sealed facts, or raise `CheckpointError` when they, or what they were made from, are not as they were.

    Without `must_be_sealed`, facts without a seal are accepted: an earlier version wrote them.
    """
    facts = _json_object(path, remedy)
    seal = facts.pop(_FACTS_SEAL, None)
    if seal is None and not must_be_sealed:
        return facts
    if seal is None:
        raise CheckpointError(f"{path} is not the JSON of a saved {path.stem}: it has no {_FACTS_SEAL}. {remedy}")
    if canonical_hash(facts) != seal:
        raise CheckpointError(f"{path} has changed since it was written. {remedy}")
    for name, expected in facts.pop(_BOUND, {}).items():
        other = path.parent / name
        if other.is_file() and seal_of(other) != expected:
            raise CheckpointError(
                f"{path} was made for another {os.path.normpath(other)} than the one that is there now. Restore both; "
                f"or remove {path.name} and run the same command again, which makes it again."
            )
    return facts


def seal_of(path: Path) -> str:
    """Return the checksum of the facts in a JSON file, sealed or not."""
    facts = _json_object(path, "Restore it.")
    facts.pop(_FACTS_SEAL, None)
    return canonical_hash(facts)


def bound(directory: Path, *others: Path) -> dict[str, str]:
    """Return what binds a file in a directory to others, which are JSON."""
    return {os.path.relpath(other, directory): seal_of(other) for other in others}


def write_artifact(
    directory: Path,
    name: str,
    tensors: "Mapping[str, Tensor] | TensorStream",
    facts: Json,
    bound_to: Bound | None = None,
) -> None:
    """Write tensors and JSON facts, the facts last, sealed with the checksums of both."""
    path = directory / f"{name}.safetensors"
    if isinstance(tensors, TensorStream):
        digest = write_stream(path, tensors)
    else:
        digest = write_tensors(path, {key: tensor.detach().cpu() for key, tensor in tensors.items()})
    write_sealed(directory / f"{name}.json", {**facts, _TENSORS_SEAL: digest}, bound_to)


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
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def read_facts(directory: Path, name: str) -> Json:
    """Return the facts of an artifact alone; its tensors are neither read nor checked."""
    facts = _read_facts(directory / f"{name}.json")
    del facts[_TENSORS_SEAL]
    return facts


def _read_facts(path: Path) -> Json:
    facts = read_sealed(path)
    if not isinstance(facts.get(_TENSORS_SEAL), str):
        raise CheckpointError(f"{path} is not the JSON of a saved {path.stem}: it has no {_TENSORS_SEAL}.")
    _require_format(path, facts)
    return facts


def _require_format(path: Path, facts: Json) -> None:
    """Raise unless an artifact is of a version of the format that can be read; the first did not say its version."""
    version = facts.get("format", 1)
    if type(version) is not int or not 1 <= version <= layout.FORMAT:
        raise CheckpointError(
            f"{path} is of format {str(version)[:20]}; this version of dmsae reads up to {layout.FORMAT}. Update dmsae."
        )


def _json_object(path: Path, remedy: str) -> Json:
    try:
        facts: Json = read_json_value(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: {path.parent} holds no saved {path.stem}.") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{path} is not the JSON of a saved {path.stem}: {first_line(error)}. {remedy}"
        ) from error
    if not isinstance(facts, dict):
        raise CheckpointError(
            f"{path} is not the JSON of a saved {path.stem}: it holds a {type(facts).__name__}. {remedy}"
        )
    return facts
