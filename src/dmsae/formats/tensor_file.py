"""A file of safetensors from a stranger: read if it is a plain file and as long as its header says, else an error."""

from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from dmsae.disk.files import open_regular
from dmsae.errors import CheckpointError, first_line


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors in a file and the strings in its header; both together are no larger than the file."""
    try:
        open_regular(path).close()  # a pipe would be waited for
        with safe_open(path, framework="pt") as file:
            names: list[str] = file.keys()
            return {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})
    except Exception as error:  # what a damaged file raises depends on the version of safetensors
        raise CheckpointError(f"{path} cannot be read as safetensors: {first_line(error)}.") from error
