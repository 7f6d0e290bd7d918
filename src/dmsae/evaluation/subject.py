"""What is evaluated: a dictionary under a name, be it a trained SAE or a null that shows what a worthless one gets."""

from typing import NamedTuple, Protocol

from torch import Tensor

from dmsae.sae.config import SAEConfig


class Dictionary(Protocol):
    """What a measure may ask of a subject. An SAE has all of it; a null need not be an SAE."""

    @property
    def config(self) -> SAEConfig:
        """Sizes, prefixes and core."""

    @property
    def W_enc(self) -> Tensor:
        """Encoder rows, [K, D]."""

    @property
    def W_dec(self) -> Tensor:
        """Decoder rows, [K, D], of unit norm."""

    @property
    def b_dec(self) -> Tensor:
        """Decoder bias, [D]."""

    def encode(self, x: Tensor) -> Tensor:
        """Return the activations [..., K] of raw activations [..., D] at inference."""

    def decode(self, f: Tensor, prefix: int | None = None) -> Tensor:
        """Return the reconstruction [..., D] from one prefix or all latents."""


class Subject(NamedTuple):
    """A dictionary to evaluate."""

    name: str
    dictionary: Dictionary
    null_of: str = ""
    """Name of the subject that this is a null for; empty for a subject in its own right."""
    null_kind: str = ""
    """What kind of null it is."""
