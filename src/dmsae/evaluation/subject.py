"""What is evaluated: a dictionary under a name, be it a trained SAE or a null that shows what a worthless one gets."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.errors import ConfigError, StoreError
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


def require_heldout(store: Store, subjects: Sequence[Subject]) -> int:
    """Return how many held-out activations a store holds; raise if it has none, or of another width than a subject."""
    for name, dictionary, *_ in subjects:
        if dictionary.config.d_model != store.d_model:
            raise ConfigError(
                f"The store {store.key} holds activations of width {store.d_model}; {name} takes "
                f"{dictionary.config.d_model}. Choose a store of the model and hook that it was trained on."
            )
    if not (n_tokens := store.n_rows(Split.HELDOUT)):
        raise StoreError(f"The store {store.key} holds no held-out activations. Harvest with heldout_tokens > 0.")
    return n_tokens
