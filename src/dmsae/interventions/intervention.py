"""What is done to a latent while a model runs: it is ablated, clamped to a value, or scaled."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from dmsae.config import require, require_whole
from dmsae.errors import ConfigError
from dmsae.sae.config import SAEConfig

Kind = Literal["ablate", "clamp", "scale"]
"""Ablate: the latent never fires. Clamp: it has one value everywhere. Scale: where it fires, times a factor."""


@dataclass(frozen=True, slots=True)
class Intervention:
    """What is done to one latent, at every position that counts.

    >>> dmsae.Intervention(12, "clamp", 20.0)
    Intervention(latent=12, kind='clamp', value=20.0)
    >>> dmsae.Intervention(12, "ablate").value is None
    True
    """

    latent: int
    """Its index in the SAE."""
    kind: Kind
    """`ablate`: it never fires. `clamp`: it has `value` everywhere. `scale`: where it fires, it is multiplied."""
    value: float | None = None
    """What it is clamped to or multiplied by; may be negative. Nothing for `ablate`."""

    def __post_init__(self) -> None:
        require_whole("latent", self.latent, 0)
        require(self.kind in get_args(Kind), "kind", self.kind, f"be one of {', '.join(get_args(Kind))}")
        if self.kind == "ablate":
            require(self.value is None, "value", self.value, "be left out, because the latent is ablated")
        else:
            is_number = isinstance(self.value, int | float) and not isinstance(self.value, bool)
            require(
                is_number and math.isfinite(self.value or 0),
                "value",
                self.value,
                f"be a finite number to {self.kind} the latent with",
            )

    def apply(self, f: Tensor) -> Tensor:
        """Return what the latent's activations become."""
        if self.value is None:
            return torch.zeros_like(f)
        return torch.full_like(f, self.value) if self.kind == "clamp" else f * self.value


def require_fitting(interventions: Sequence[Intervention], config: SAEConfig) -> None:
    """Raise unless an SAE has every latent that is intervened on, and each is named once."""
    latents = [one.latent for one in interventions]
    config.require_latents(latents)
    if twice := sorted({latent for latent in latents if latents.count(latent) > 1}):
        raise ConfigError(f"latents = {twice}; each can be changed in one way only. Name it once.")
