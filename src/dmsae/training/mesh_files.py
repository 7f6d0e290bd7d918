"""The files in which the ranks of a mesh keep what they own: safetensors, by torch.distributed.checkpoint."""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from dmsae.disk.checkpoint import checksum
from dmsae.errors import CheckpointError, first_line
from dmsae.ranks import Axis
from dmsae.training.mesh import Group, talking

_LARGE_BYTES = 1 << 20

REMEDY = "Remove it to resume from an earlier one, or from the beginning."


def write_parts(folder: Path, tensors: Mapping[str, Tensor], everyone: Axis) -> None:
    """Write what each rank gives to a folder, synced to the disk; of what several give under one name, one copy."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    assert isinstance(everyone, Group)
    files = _files(everyone.of_each({key: tensor.nbytes for key, tensor in tensors.items()}))
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files, save_distributed=True)
    try:
        with talking():
            save(dict(tensors), storage_writer=writer, process_group=everyone.process_group)
    except (CheckpointException, OSError) as error:
        raise CheckpointError(
            f"{folder} could not be written: {_cause(error)}. Make room on the disk and run the same command again: it "
            "resumes from the last checkpoint, if there is one."
        ) from error


def _files(sizes: list[dict[str, int]]) -> dict[str, int]:
    """Return the number of the file that each tensor goes into: large ones each have one of their own.

    While a file is written, torch.distributed.checkpoint holds two copies of all that is in it.
    """
    large = sorted({key for one in sizes for key, size in one.items() if size >= _LARGE_BYTES})
    numbers = {key: 1 for one in sizes for key in one}
    return numbers | {key: number for number, key in enumerate(large, start=2)}


def read_parts(folder: Path, keys: list[str], sums: Mapping[str, int]) -> list[Tensor]:
    """Return tensors of a folder, having checked every byte of them."""
    # Imported here, as above, because it takes long and one process does without.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        known = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        tensors: dict[str, Tensor] = {}
        for key in keys:
            stored = known[key]
            assert isinstance(stored, TensorStorageMetadata)
            tensors[key] = torch.empty(stored.size, dtype=stored.properties.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except (CheckpointException, SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder} cannot be read: {_cause(error)}. {REMEDY}") from error
    if damaged := [key for key, tensor in tensors.items() if checksum(tensor) != sums[key]]:
        raise CheckpointError(f"{folder} is damaged: {damaged[0]} is not what was written. {REMEDY}")
    return list(tensors.values())


def _cause(error: BaseException) -> str:
    """Return the cause in few words; torch.distributed.checkpoint gives one for each rank that failed."""
    failures = getattr(error, "failures", None)
    if not failures:
        return first_line(error)
    rank, (cause, _) = next(iter(failures.items()))
    return f"rank {rank}: {first_line(cause)}"
