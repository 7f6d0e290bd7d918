"""Which model activations come from, and at which hook: recorded in everything that is made from them."""

from dataclasses import dataclass
from typing import Self

from dmsae.disk.files import canonical_hash
from dmsae.errors import ConfigError

_IMPORTED = "imported"


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """A model and a hook point in it."""

    name: str
    """As it was given: a bundled model, a directory or a Hub id."""
    revision: str
    """The version of a bundled model, the commit of a Hub model, else empty."""
    weights_sha256: str
    """Hash of the config and all weight files."""
    tokenizer_sha256: str
    """Hash of the tokenizer's files."""
    hook: str
    """Dotted path of the hooked module."""
    dtype: str
    """The arithmetic that the model ran in."""

    @classmethod
    def imported(cls, name: str) -> Self:
        """Return what stands for the model when activations were imported: those of the same name match."""
        return cls(
            name=name,
            revision="",
            weights_sha256=canonical_hash({_IMPORTED: name}),
            tokenizer_sha256="",
            hook=_IMPORTED,
            dtype="",
        )

    def require_same(
        self,
        other: "ModelIdentity",
        ours: str,
        theirs: str,
        remedy: str = "Choose a store of the same model and hook.",
    ) -> None:
        """Raise unless both are the same weights at the same hook; `ours` and `theirs` say what has each of them."""
        if (self.weights_sha256, self.hook) != (other.weights_sha256, other.hook):
            raise ConfigError(
                f"The models differ: {ours} is of {self._described()}, but {theirs} is of {other._described()}. "
                f"{remedy}"
            )

    def _described(self) -> str:
        if self.hook == _IMPORTED:
            return f"imported activations named {self.name!r}"
        return f"{self.name} at {self.hook} (weights_sha256 {self.weights_sha256[:12]}…)"
