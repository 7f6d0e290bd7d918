"""The sparse autoencoder: a frozen core, then Matryoshka prefixes, with per-latent thresholds for inference.

`f(x) = ReLU(W_enc (x − b_dec) + b_enc)`, `x̂_m = b_dec + Σ_{j<m} f_j W_dec[j]`. The core's latents come
first, so every prefix holds them. No core gives a Matryoshka SAE; one prefix besides gives a BatchTopK SAE.

Shapes: B tokens, D model width, K dictionary width, C core latents, N = K − C non-core latents, G prefixes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from dmsae.config import from_dict, to_dict
from dmsae.disk.artifact import read_artifact, write_artifact
from dmsae.errors import CheckpointError, ConfigError
from dmsae.sae.sparse import Active, select_top

_NAME = "sae"
_FRACTIONS = (1 / 32, 1 / 16, 1 / 8, 1 / 4)


class CoreMode(StrEnum):
    """How the core takes part in BatchTopK."""

    DENSE = "dense"
    """The core fires freely; only non-core latents compete."""
    SPARSE = "sparse"
    """The core competes like any other latent."""


@dataclass(frozen=True, slots=True)
class SAEConfig:
    """What an SAE is, apart from its weights."""

    d_model: int
    """Width D of the activations."""
    width: int
    """Number K of latents, the core included."""
    k: int
    """Latents that BatchTopK keeps per token on average: non-core ones for a dense core, else any."""
    prefixes: tuple[int, ...]
    """Cumulative sizes of the nested reconstructions, the core included; the last is `width`."""
    n_core: int = 0
    """Number C of frozen core latents; they are latents 0 … C−1."""
    core_mode: CoreMode = CoreMode.DENSE
    """Whether the core fires freely or competes."""
    center_input: bool = True
    """Whether the encoder sees x − b_dec rather than x."""

    def __post_init__(self) -> None:
        for name, low in (("d_model", 1), ("width", 1), ("k", 1), ("n_core", 0)):
            _require_int(name, getattr(self, name), low)
        if not isinstance(self.core_mode, CoreMode):
            raise ConfigError(f"core_mode is {self.core_mode!r}; allowed: {', '.join(map(repr, CoreMode))}.")
        if self.n_core >= self.width:
            raise ConfigError(f"n_core is {self.n_core}; it must be smaller than width ({self.width}).")
        _check_prefixes(self.prefixes, self.width, self.n_core)
        if self.k > self.n_competing:
            raise ConfigError(f"k is {self.k}; BatchTopK can keep at most the {self.n_competing} competing latents.")

    @property
    def n_free(self) -> int:
        """Number N of non-core latents."""
        return self.width - self.n_core

    @property
    def n_unmasked(self) -> int:
        """Number of leading latents that bypass BatchTopK: the core when it is dense, else none."""
        return self.n_core if self.core_mode is CoreMode.DENSE else 0

    @property
    def n_competing(self) -> int:
        """Number of latents that compete in BatchTopK."""
        return self.width - self.n_unmasked

    def check_core_rows(self, core_rows: Tensor | None) -> None:
        """Raise unless encoder rows are such as this SAE's core needs."""
        given = (0, self.d_model) if core_rows is None else tuple(core_rows.shape)
        if given != (self.n_core, self.d_model):
            raise ConfigError(f"core_rows has shape {given}; n_core and d_model ask for {(self.n_core, self.d_model)}.")
        if core_rows is not None and not (finite := core_rows.isfinite().all(1)).all():
            row = int((~finite).nonzero()[0])
            raise ConfigError(f"core_rows is not finite in row {row}. Check where the core came from.")


def matryoshka_prefixes(width: int) -> tuple[int, ...]:
    """Return the published nesting: groups of 1/32, 1/16, 1/8, 1/4 of `width` and the rest, as cumulative sizes."""
    _require_int("width", width, 32)
    sizes = [int(fraction * width) for fraction in _FRACTIONS]
    return (*accumulate(sizes), width)


def core_first(prefixes: tuple[int, ...], n_core: int) -> tuple[int, ...]:
    """Return a nesting with the core before its groups; the last group gives up the room that the core takes."""
    if len(prefixes) > 1 and prefixes[-2] + n_core >= prefixes[-1]:
        raise ConfigError(
            f"n_core is {n_core}, but width {prefixes[-1]} with prefixes {prefixes} leaves room for at most "
            f"{prefixes[-1] - prefixes[-2] - 1} core latents. Choose a larger width, or smaller prefixes."
        )
    return (*(size + n_core for size in prefixes[:-1]), prefixes[-1])


class SAE(nn.Module):
    """A sparse autoencoder whose core encoder rows are a buffer, and so out of reach of any optimiser."""

    W_enc_core: Tensor
    threshold: Tensor

    def __init__(self, config: SAEConfig) -> None:
        """Allocate zero weights; `init` and `load_sae` give them values."""
        super().__init__()
        self.config = config
        self.register_buffer("W_enc_core", torch.zeros(config.n_core, config.d_model))
        self.W_enc_free = nn.Parameter(torch.zeros(config.n_free, config.d_model))
        self.b_enc = nn.Parameter(torch.zeros(config.width))
        self.W_dec = nn.Parameter(torch.zeros(config.width, config.d_model))
        self.b_dec = nn.Parameter(torch.zeros(config.d_model))
        self.register_buffer("threshold", torch.zeros(config.width))

    @classmethod
    @torch.no_grad()
    def init(cls, config: SAEConfig, generator: torch.Generator, core_rows: Tensor | None = None) -> Self:
        """Return a fresh SAE: random unit decoder rows, new encoder rows equal to them, biases 0."""
        config.check_core_rows(core_rows)
        sae = cls(config)
        sae.W_dec.normal_(generator=generator)
        sae.renormalise_()
        sae.W_enc_free.copy_(sae.W_dec[config.n_core :])
        if core_rows is not None:
            sae.W_enc_core.copy_(core_rows)
        return sae

    @property
    def W_enc(self) -> Tensor:
        """All encoder rows [K, D], the core's first."""
        return torch.cat([self.W_enc_core, self.W_enc_free]) if self.config.n_core else self.W_enc_free

    def pre_activations(self, x: Tensor) -> Tensor:
        """Return `W_enc (x − b_dec) + b_enc`, [..., K], before any mask."""
        centered = x - self.b_dec if self.config.center_input else x
        return nn.functional.linear(centered, self.W_enc, self.b_enc)

    def train_codes(self, input_BD: Tensor, warm_start: float | None = None) -> tuple[Active, Tensor | None]:
        """Return the activations under the training-time mask: what BatchTopK keeps, and a dense core's [B, C].

        `input_BD` is what the encoder sees; all latents that compete do, whatever prefix they are in.
        """
        n_unmasked = self.config.n_unmasked
        encoders = (self.W_enc_free,) if n_unmasked else (self.W_enc_core, self.W_enc_free)
        n_keep = self.config.k * len(input_BD)
        active = select_top(input_BD, encoders, self.b_enc[n_unmasked:], n_keep, warm_start)
        active.latents_S.add_(n_unmasked)
        if not n_unmasked:
            return active, None
        return active, torch.addmm(self.b_enc[:n_unmasked], input_BD, self.W_enc_core.T).relu_()

    def encode(self, x: Tensor) -> Tensor:
        """Return the activations [..., K] at inference: those above their latent's threshold."""
        f = self.pre_activations(x).relu()
        return f * (f > self.threshold)

    def decode(self, f: Tensor, prefix: int | None = None) -> Tensor:
        """Return the reconstruction [..., D] from one prefix (an index into `prefixes`) or all latents."""
        size = self.config.width if prefix is None else self.config.prefixes[prefix]
        return f[..., :size] @ self.W_dec[:size] + self.b_dec

    def forward(self, x: Tensor) -> Tensor:
        """Return the full reconstruction of x at inference thresholds."""
        return self.decode(self.encode(x))

    @torch.no_grad()
    def set_threshold_(self, theta: float) -> None:
        """Give every competing latent the inference threshold θ; a dense core keeps 0."""
        self.threshold[self.config.n_unmasked :] = theta

    @torch.no_grad()
    def renormalise_(self) -> None:
        """Scale every decoder row to unit norm."""
        # In blocks, so that the second pass over a block finds it in cache. The floor keeps a zero row zero.
        for rows in torch.split(self.W_dec, 1024):
            norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
            rows.div_(norms.clamp_min_(torch.finfo(rows.dtype).tiny))

    @torch.no_grad()
    def fold_scale_(self, scale: float) -> None:
        """Turn an SAE trained on x / scale into the same SAE on x; no encoder or decoder row changes."""
        for tensor in (self.b_enc, self.b_dec, self.threshold):
            tensor.mul_(scale)


def save_sae(sae: SAE, directory: Path, made_from: Mapping[str, Any] | None = None) -> None:
    """Write an SAE as `sae.safetensors` and `sae.json`, with what it was made from."""
    tensors = {name: getattr(sae, name) for name in _shapes(sae.config)}
    write_artifact(directory, _NAME, tensors, {"config": to_dict(sae.config), "made_from": made_from or {}})


def load_sae(directory: Path) -> SAE:
    """Return a saved SAE, or raise `CheckpointError` when anything about it is not as it was written."""
    tensors, facts = read_artifact(directory, _NAME)
    try:
        config = from_dict(SAEConfig, facts["config"])
    except (KeyError, ConfigError) as error:
        raise CheckpointError(f"{directory / _NAME}.json is not the config of a saved SAE: {error}") from error
    expected = _shapes(config)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != expected:
        raise CheckpointError(f"{directory / _NAME}.safetensors holds {found}; its config asks for {expected}.")
    sae = SAE(config).to(tensors["W_dec"].dtype)
    W_enc = tensors.pop("W_enc")
    tensors["W_enc_core"], tensors["W_enc_free"] = W_enc[: config.n_core], W_enc[config.n_core :]
    sae.load_state_dict(tensors)
    return sae


def read_made_from(directory: Path) -> dict[str, Any]:
    """Return what a saved SAE says it was made from."""
    made_from: dict[str, Any] = read_artifact(directory, _NAME)[1].get("made_from", {})
    return made_from


def _shapes(config: SAEConfig) -> dict[str, tuple[int, ...]]:
    return {
        "W_enc": (config.width, config.d_model),
        "b_enc": (config.width,),
        "W_dec": (config.width, config.d_model),
        "b_dec": (config.d_model,),
        "threshold": (config.width,),
    }


def _require_int(name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least {low}.")


def _check_prefixes(prefixes: tuple[int, ...], width: int, n_core: int) -> None:
    allowed = f"allowed: whole numbers that rise from above n_core ({n_core}) to width ({width})"
    if not isinstance(prefixes, tuple) or not all(type(size) is int for size in prefixes):
        raise ConfigError(f"prefixes is {prefixes!r}; {allowed}.")
    if not prefixes or prefixes[-1] != width:
        raise ConfigError(f"prefixes is {prefixes}; the last one must be width ({width}); {allowed}.")
    if any(low >= high for low, high in zip((n_core, *prefixes), prefixes, strict=False)):
        raise ConfigError(f"prefixes is {prefixes}; {allowed}.")
