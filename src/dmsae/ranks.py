"""Processes that work together: what the ranks along one side of a mesh can say to each other.

One process is the axis of one rank, `ONE`. That of several is in `training/mesh.py`.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

from dmsae.errors import DmsaeError

if TYPE_CHECKING:  # so that commands which need no tensors do not wait for torch
    from torch import Tensor

T = TypeVar("T")


class Axis(Protocol):
    """The ranks along one side of a mesh, or all of them. All of them make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This rank's place among them."""

    @property
    def size(self) -> int:
        """How many there are."""

    def sum_(self, tensor: "Tensor") -> "Tensor":
        """Replace a tensor by its sum over the ranks, and return it."""

    def holding(self, like: "Iterable[Tensor]") -> "tuple[Axis, list[Tensor]]":
        """Return this axis, and zeros like some tensors, which its `sum_` does not send where all ranks see them."""

    def min_(self, tensor: "Tensor") -> "Tensor":
        """Replace a tensor by its smallest over the ranks, entry by entry, and return it."""

    def max_(self, tensor: "Tensor") -> "Tensor":
        """Replace a tensor by its largest over the ranks, entry by entry, and return it."""

    def gather(self, tensor: "Tensor") -> "list[Tensor]":
        """Return the tensors of all ranks in their order; they may differ in their number of rows."""

    def of_first(self, value: T) -> T:
        """Return what the first rank gave."""

    def of_each(self, value: T) -> list[T]:
        """Return what each rank gave, in their order."""

    def settle(self, error: DmsaeError | None) -> None:
        """Raise on every rank when there is an error on one: its own there, elsewhere one that names rank and cause."""


class _One:
    """The axis of one rank: there is nobody to talk to."""

    rank, size = 0, 1

    def sum_(self, tensor: "Tensor") -> "Tensor":
        return tensor

    def holding(self, like: "Iterable[Tensor]") -> "tuple[Axis, list[Tensor]]":
        return self, [tensor.new_zeros(tensor.shape) for tensor in like]

    def min_(self, tensor: "Tensor") -> "Tensor":
        return tensor

    def max_(self, tensor: "Tensor") -> "Tensor":
        return tensor

    def gather(self, tensor: "Tensor") -> "list[Tensor]":
        return [tensor]

    def of_first(self, value: T) -> T:
        return value

    def of_each(self, value: T) -> list[T]:
        return [value]

    def settle(self, error: DmsaeError | None) -> None:
        if error is not None:
            raise error


ONE: Axis = _One()
"""The axis of one process."""


@contextmanager
def settled(axis: Axis, patiently: bool = False) -> Iterator[None]:
    """Let an error of ours on one rank end the block on all of them. Ranks must not talk inside the block.

    Patiently: however long the first rank takes, while the others wait.
    """
    error: DmsaeError | None = None
    try:
        yield
    except DmsaeError as raised:
        error = raised
    if patiently:
        axis.of_first(None)
    axis.settle(error)
