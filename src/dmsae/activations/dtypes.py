"""The floating-point formats that models run in and activations are stored in."""

from typing import TYPE_CHECKING, Literal, get_args

from dmsae.errors import StoreError

if TYPE_CHECKING:  # torch is slow to import, and commands that only name a dtype do not need it
    import torch
    from torch import Tensor

DtypeName = Literal["float32", "bfloat16", "float16"]
DTYPE_NAMES: tuple[str, ...] = get_args(DtypeName)


def torch_dtype(name: DtypeName) -> "torch.dtype":
    """Return the torch dtype of that name."""
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


def to_stored(tensor: "Tensor", dtype: DtypeName, what: str, remedy: str) -> "Tensor":
    """Return finite values in the dtype that they are stored in; one that does not fit is an error, never infinity."""
    stored = tensor.to(torch_dtype(dtype))
    if not stored.isfinite().all():
        largest = float(tensor.abs().max())
        raise StoreError(f"{what} does not fit into {dtype}: its largest value is {largest:.3g}. {remedy}")
    return stored
