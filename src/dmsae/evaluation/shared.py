"""What evaluations compute once: tensors kept in a file whose name is a hash of all that they depend on."""

from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dmsae.disk.files import exclusive_lock, write_tensors
from dmsae.errors import BusyError


def kept_tensors(file: Path | None, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors in a file; those that are not there are made and kept, unless there is no file to keep them.

    A file that cannot be read is made again. Of several processes that make the same, one writes it.
    """
    if file is None:
        return make()
    if file.is_file():
        try:
            return load_file(file)
        except (SafetensorError, OSError):
            pass
    tensors = make()
    try:
        with exclusive_lock(file.with_suffix(".lock"), str(file)):
            write_tensors(file, tensors)
    except BusyError:
        pass
    return tensors
