"""From the tensors of a foreign checkpoint to one of our SAEs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmsae.activations.identity import ModelIdentity
from dmsae.config import Json
from dmsae.disk.files import read_json_value, sha256_of
from dmsae.errors import CheckpointError, ConfigError, first_line
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE

_NORM_TOLERANCE = 1e-4
"""Decoder rows within this of unit norm are left alone, bit for bit."""
_MOST_PREFIXES = 4096


class Imported(NamedTuple):
    """An SAE from elsewhere."""

    sae: SAE
    """The SAE, in float32 and frozen, for activations as the model puts them out."""
    kind: str
    """Where it came from: `dmsae`, or the name of another format."""
    notes: tuple[str, ...]
    """What was changed or assumed, a sentence each."""
    sha256: str
    """Of the file that holds its weights."""
    model: ModelIdentity | None = None
    """The model it was trained on, when the checkpoint holds an identity that can be checked."""

    def agreeing(self, path: Path, given: "Given") -> "Imported":
        """Return this, unless it contradicts what was said of it."""
        config = self.sae.config
        require_agreement(path, "k", config.k, given.k)
        require_agreement(path, "prefixes", list(config.prefixes), given.prefix_list)
        require_agreement(path, "center_input", config.center_input, given.center_input)
        return self


class Given(NamedTuple):
    """What the caller says of a checkpoint, for formats that do not say it. What is said must not be contradicted."""

    k: int | None = None
    prefixes: Sequence[int] | None = None
    center_input: bool | None = None
    """Whether the encoder sees x − b_dec."""
    activations: Tensor | None = None
    """Raw activations [n, D] on which a threshold is set, for an SAE that has none."""

    @property
    def prefix_list(self) -> list[int] | None:
        """The prefixes as a checkpoint would state them."""
        return list(self.prefixes) if self.prefixes else None


class Weights(NamedTuple):
    """What every format has, under whatever names."""

    W_enc_KD: Tensor
    b_enc_K: Tensor
    W_dec_KD: Tensor
    b_dec_D: Tensor
    threshold_K: Tensor


def build(
    file: Path,
    kind: str,
    weights: Weights,
    config: SAEConfig | Callable[[int, int], SAEConfig],
    notes: Sequence[str],
    model: ModelIdentity | None = None,
) -> Imported:
    """Return an SAE from foreign weights, its decoder rows brought to unit norm.

    `config` is what it is, or a function of its width and that of the activations which returns that.
    """
    path = file.parent
    weights = Weights(*(tensor.detach().float() for tensor in weights))
    width, d_model = _require_shapes(path, weights)
    for name, tensor in weights._asdict().items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{path}: {name} is not finite. The checkpoint cannot be used.")
    try:
        config = config if isinstance(config, SAEConfig) else config(width, d_model)
    except ConfigError as error:
        raise CheckpointError(f"{path} does not make an SAE: {error}") from error
    if (config.width, config.d_model) != (width, d_model):
        raise CheckpointError(
            f"{path}: the config is of {config.width} latents on activations {config.d_model} wide; the weights are of "
            f"{width} latents, {d_model} wide."
        )
    weights, changes = _with_unit_rows(weights)
    for name, tensor in weights._asdict().items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(
                f"{path}: {name} is not finite once decoder rows have unit norm: the norms are too large for float32."
            )
    n = config.n_detectors
    if (weights.threshold_K[n:] < 0).any():
        changes.append("Thresholds below 0 were set to 0: every positive activation passes, as before.")
        low_K = torch.zeros_like(weights.threshold_K)
        low_K[:n] = -torch.inf  # a detector may have one: it gives negative codes
        weights = weights._replace(threshold_K=weights.threshold_K.maximum(low_K))
    return Imported(_sae(config, weights), kind, (*notes, *changes), sha256_of(file), model)


@torch.no_grad()
def _sae(config: SAEConfig, weights: Weights) -> SAE:
    sae, n = SAE(config), config.n_detectors
    sae.W_enc_core.copy_(weights.W_enc_KD[: config.n_core])
    sae.W_enc_noncore.copy_(weights.W_enc_KD[config.n_core :])
    sae.b_enc.copy_(weights.b_enc_K[n:])
    sae.W_dec.copy_(weights.W_dec_KD)
    sae.b_dec.copy_(weights.b_dec_D)
    sae.threshold.copy_(weights.threshold_K)
    shift_C = sae.W_enc_core[:n].double() @ sae.b_dec.double() if config.center_input else 0.0
    sae.offset.copy_(weights.b_enc_K[:n].double() - shift_C)
    return sae.requires_grad_(False)


def _require_shapes(path: Path, weights: Weights) -> tuple[int, int]:
    if weights.W_enc_KD.ndim != 2:
        raise CheckpointError(
            f"{path}: the encoder has shape {tuple(weights.W_enc_KD.shape)}; expected two dimensions."
        )
    width, d_model = weights.W_enc_KD.shape
    expected = Weights._make(((width, d_model), (width,), (width, d_model), (d_model,), (width,)))
    shapes = Weights._make(tuple(tensor.shape) for tensor in weights)
    if shapes != expected:
        raise CheckpointError(f"{path}: the shapes are {shapes._asdict()}; expected {expected._asdict()}.")
    return width, d_model


def _with_unit_rows(weights: Weights) -> tuple[Weights, list[str]]:
    """Move the norm of each decoder row into its encoder row, bias and threshold: the reconstruction stays the same."""
    norms_K = weights.W_dec_KD.double().norm(dim=1)
    off = ((norms_K - 1).abs() > _NORM_TOLERANCE) & (norms_K > 0)
    if not off.any():
        return weights, []
    scale_K = norms_K.where(off, 1.0)
    note = (
        f"{int(off.sum())} of {len(norms_K)} decoder rows had norms from {float(norms_K[off].min()):.4g} to "
        f"{float(norms_K[off].max()):.4g}; they were scaled to 1, and encoder rows, biases and thresholds to match. "
        "Reconstructions are the same, activations are scaled, and BatchTopK may choose others."
    )
    return Weights(
        W_enc_KD=(weights.W_enc_KD * scale_K[:, None]).float(),
        b_enc_K=(weights.b_enc_K * scale_K).float(),
        W_dec_KD=(weights.W_dec_KD / scale_K[:, None]).float(),
        b_dec_D=weights.b_dec_D,
        threshold_K=(weights.threshold_K * scale_K).float(),
    ), [note]


def require_tensors(path: Path, tensors: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise `CheckpointError` unless all tensors are there."""
    if missing := [name for name in names if not isinstance(tensors.get(name), Tensor)]:
        held = sorted(tensors)
        shown = ", ".join(held[:12]) + (f" and {len(held) - 12} more" if len(held) > 12 else "")
        raise CheckpointError(f"{path} lacks {', '.join(missing)}; it holds {shown or 'nothing'}.")
    for name in names:
        if not tensors[name].is_floating_point():
            raise CheckpointError(f"{path}: {name} has dtype {tensors[name].dtype}; expected floating point.")


def require_matrices(path: Path, tensors: Mapping[str, Tensor], names: Sequence[str]) -> None:
    """Raise `CheckpointError` unless tensors have two dimensions."""
    for name in names:
        if tensors[name].ndim != 2:
            raise CheckpointError(f"{path}: {name} has shape {tuple(tensors[name].shape)}; expected two dimensions.")


def whole_number(path: Path, name: str, value: Any) -> int | None:
    """Return a whole number that a checkpoint states, as a number or a tensor of one; None when it states none."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is not None and type(value) is not int:
        raise CheckpointError(f"{path}: {name} is {_shown(value)}; expected a whole number.")
    return value


def whole_numbers(path: Path, name: str, value: Any) -> list[int] | None:
    """Return the whole numbers that a checkpoint states, as a list or a tensor; None when it states none."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value or len(value) > _MOST_PREFIXES:
        raise CheckpointError(f"{path}: {name} is {_shown(value)}; expected a list of whole numbers.")
    numbers = [whole_number(path, f"{name}[{i}]", one) for i, one in enumerate(value)]
    if None in numbers:
        raise CheckpointError(f"{path}: {name} is {_shown(value)}; expected a list of whole numbers.")
    return [number for number in numbers if number is not None]


def _shown(value: object) -> str:
    text = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return text if len(text) < 80 else f"{text[:80]}…"


def require_agreement(path: Path, name: str, said: Any, asked: Any) -> None:
    """Raise `ConfigError` when a checkpoint states one thing and the caller another."""
    if None not in (said, asked) and said != asked:
        raise ConfigError(
            f"{name} is given as {asked}, but {path} says that it is {said}. Leave it out, and it is taken from there."
        )


def stated_or_given(path: Path, name: str, said: Any, asked: Any, notes: list[str]) -> Any:
    """Return what a checkpoint states about itself, or else what the caller gave, which is added to the notes."""
    require_agreement(path, name, said, asked)
    if said is not None:
        return said
    if asked is None:
        raise CheckpointError(
            f"{path} does not say its {name}, and nothing is assumed. Give it: --k, --prefixes and --center-input of "
            "'dmsae import', or cycle0.k and cycle0.nesting of a distillation."
        )
    notes.append(f"The checkpoint does not say its {name}; {asked} was given.")
    return asked


def read_config(path: Path) -> Json:
    """Return the JSON object in a file."""
    try:
        config = read_json_value(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {first_line(error)}.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds a {type(config).__name__}; expected a JSON object.")
    return config
