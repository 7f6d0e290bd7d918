"""What `torch.save` writes, read without trusting it: plain dense tensors, and numbers and names beside them.

A file of `torch.save` is a zip archive with a pickle and one stored record for each storage. `torch.load` allocates
what the pickle claims. Here every claim is first held against the archive: records are stored as they are, never
compressed; a storage is as long as its record; a tensor lies inside its storage and is not larger than it. The pickle
can name the types below and nothing else, so no code runs and no other kind of tensor is made.
"""

import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmsae.config import Json
from dmsae.disk.files import open_regular
from dmsae.errors import CheckpointError, first_line

_PICKLE_BYTES = 1 << 20
"""How large a pickle may be. That of an SAE has a few kilobytes."""
_RECORDS = 4096
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class _Storage(NamedTuple):
    """A storage that the pickle names: the bytes of a record, as elements of a type."""

    data: Tensor


def read_torch_file(path: Path) -> Json:
    """Return the dictionary in a file of `torch.save`; anything but tensors and plain values in it is an error."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            records = _records(archive, os.fstat(file.fileno()).st_size)
            name = next((name for name in records if name == "data.pkl" or name.endswith("/data.pkl")), None)
            if name is None or records[name].file_size > _PICKLE_BYTES:
                raise ValueError("it holds no pickle of a usual size")
            prefix = name.removesuffix("data.pkl")
            if prefix + "byteorder" in records and archive.read(records[prefix + "byteorder"]) != b"little":
                raise ValueError("its numbers are not little-endian")
            with archive.open(records[name]) as pickled:
                state = _Unpickler(pickled, lambda key: archive.read(records[f"{prefix}data/{key}"])).load()
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{path} is not an archive of torch.save: {first_line(error)}. If torch before 1.6 wrote it, load it with "
            "torch and save it again."
        ) from error
    except Exception as error:  # a damaged pickle can raise anything at all
        raise CheckpointError(
            f"{path} cannot be read as plain tensors, and nothing else is loaded: {first_line(error)}."
        ) from error
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise CheckpointError(f"{path} holds a {type(state).__name__}; expected the tensors of an SAE by name.")
    return dict(state)


def _records(archive: zipfile.ZipFile, size_bytes: int) -> dict[str, zipfile.ZipInfo]:
    """Return the records by name, having checked that none is larger than what is stored of it."""
    infos = archive.infolist()
    if len(infos) > _RECORDS:
        raise ValueError(f"it holds {len(infos)} records; those of an SAE are few")
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise ValueError(f"the record {info.filename!r} is compressed, which torch.save never does")
    if sum(info.file_size for info in infos) > size_bytes:
        raise ValueError("its records overlap")
    return {info.filename: info for info in infos}


class _Unpickler(pickle._Unpickler):  # the one in C would allocate a memo of any size that is claimed
    """Makes tensors that lie inside the records of the archive, and plain values."""

    def __init__(self, file: Any, read_record: Callable[[str], bytes]) -> None:
        super().__init__(file, encoding="utf-8")
        self._read_record = read_record
        self._read: dict[str, bytearray] = {}

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case "collections", "OrderedDict":
                return OrderedDict
            case "torch._utils", "_rebuild_tensor_v2":
                return _tensor
            case "torch._utils", "_rebuild_parameter":
                return _parameter
            case "torch", _ if name in _STORAGES:
                return _STORAGES[name]
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _device, n_elements = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or type(key) is not str:
            raise pickle.UnpicklingError(f"it refers to something that is no storage: {kind!r}")
        if key not in self._read:
            self._read[key] = bytearray(self._read_record(key))
        data = self._read[key]
        if type(n_elements) is not int or n_elements < 0 or n_elements * dtype.itemsize != len(data):
            raise pickle.UnpicklingError(f"storage {key!r} has {len(data)} bytes, but claims {n_elements!r} elements")
        if not data:
            return _Storage(torch.empty(0, dtype=dtype))
        return _Storage(torch.frombuffer(data, dtype=dtype))


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Tensor:
    """Return a tensor that views a storage, unless it reaches outside or is larger than all of it."""
    if not isinstance(storage, _Storage) or not _whole([offset]) or not _whole(size) or not _whole(stride):
        raise pickle.UnpicklingError("a tensor is not described by whole numbers")
    n_held, n_claimed = len(storage.data), prod(size)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if n_claimed else offset
    if n_claimed > n_held or last >= max(n_held, 1):
        raise pickle.UnpicklingError(f"a tensor of shape {tuple(size)} does not fit its storage of {n_held} elements")
    return storage.data.as_strided(tuple(size), tuple(stride), offset)


def _whole(values: Sequence[Any]) -> bool:
    return (
        isinstance(values, tuple | list)
        and len(values) <= 8
        and all(type(n) is int and 0 <= n < 1 << 62 for n in values)
    )


def _parameter(data: Any, *_: Any) -> Tensor:
    if not isinstance(data, Tensor):
        raise pickle.UnpicklingError("a parameter is not a tensor")
    return data
