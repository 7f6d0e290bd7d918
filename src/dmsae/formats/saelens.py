"""Directories of SAELens 6 and later: `{sae_weights.safetensors, cfg.json}`.

`W_enc [D, K]`, `W_dec [K, D]`, `b_enc`, `b_dec` and, for the architecture `jumprelu`, `threshold [K]`: that is how
trained BatchTopK and Matryoshka BatchTopK SAEs are saved, with k and the prefixes in the metadata. The training
architectures `batchtopk` and `matryoshka_batchtopk` have one scalar `topk_threshold` instead. A normalisation that
SAELens has folded in shows as decoder rows of another norm than 1, and is undone by bringing them to unit norm.
"""

import re
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from dmsae.config import Json
from dmsae.errors import CheckpointError, first_line
from dmsae.formats.imported import (
    Imported,
    Weights,
    build,
    read_config,
    require_matrices,
    require_tensors,
    stated_or_given,
    whole_number,
    whole_numbers,
)

WEIGHTS_NAME = "sae_weights.safetensors"
_CONFIG_NAME = "cfg.json"
_INFERENCE = "jumprelu"
_TRAINING = ("batchtopk", "matryoshka_batchtopk")


def load(path: Path, k: int | None = None, prefixes: Sequence[int] | None = None) -> Imported:
    """Return the SAE in a directory."""
    config = read_config(path / _CONFIG_NAME)
    _require_readable(path, config)
    try:
        tensors = load_file(path / WEIGHTS_NAME)
    except Exception as error:  # what a damaged file raises depends on the version of safetensors
        raise CheckpointError(f"{path / WEIGHTS_NAME} cannot be read as safetensors: {first_line(error)}.") from error
    require_tensors(path / WEIGHTS_NAME, tensors, ("W_enc", "b_enc", "W_dec", "b_dec"))
    require_matrices(path / WEIGHTS_NAME, tensors, ("W_enc", "W_dec"))
    details = config.get("metadata", {}).get("training_architecture_details") or {}
    if not isinstance(details, dict):
        raise CheckpointError(f"{path / _CONFIG_NAME}: training_architecture_details is not an object.")
    details = {**config, **details}
    notes: list[str] = []
    stated_k = details.get("k")
    if isinstance(stated_k, float) and isfinite(stated_k):
        if stated_k != round(stated_k):
            notes.append(f"k was {stated_k}; it was rounded.")
        stated_k = round(stated_k)
    stated_k = whole_number(path, "k", stated_k)
    stated_prefixes = _prefixes(path, details, tensors["b_enc"].numel()) if stated_k is not None else None
    return build(
        path / WEIGHTS_NAME,
        "saelens",
        Weights(
            tensors["W_enc"].T, tensors["b_enc"], tensors["W_dec"], tensors["b_dec"], _threshold(path, config, tensors)
        ),
        k=stated_or_given(path, "k", stated_k, k, notes),
        prefixes=stated_or_given(path, "prefixes", stated_prefixes, list(prefixes) if prefixes else None, notes),
        center_input=bool(config.get("apply_b_dec_to_input", True)),
        notes=notes,
    )


def _require_readable(path: Path, config: Json) -> None:
    metadata = config.get("metadata")
    version = metadata.get("sae_lens_version") if isinstance(metadata, dict) else None
    major = re.match(r"\d{1,9}(?=\D|$)", str(version)) if isinstance(version, str) else None
    if major is None or int(major.group()) < 6:
        raise CheckpointError(
            f"{path / _CONFIG_NAME} was written by SAELens {str(version)[:80] if version else 'before 6'}. Load it "
            "with SAELens 6 and save it again."
        )
    if (architecture := config.get("architecture")) not in [_INFERENCE, *_TRAINING]:
        known = ", ".join((_INFERENCE, *_TRAINING))
        shown = repr(architecture)[:80]
        raise CheckpointError(f"{path} holds an SAE of architecture {shown}; those that can be read: {known}.")
    if (normalisation := config.get("normalize_activations", "none")) != "none":
        raise CheckpointError(
            f"{path} expects activations normalised by {repr(normalisation)[:80]}, and does not hold what that was. "
            "Fold the normalisation into the weights with SAELens (fold_activation_norm_scaling_factor), and save it "
            "again."
        )
    if (reshaping := config.get("reshape_activations", "none")) != "none":
        raise CheckpointError(
            f"{path} reshapes activations ({repr(reshaping)[:80]}); only SAEs on plain vectors can be read."
        )


def _prefixes(path: Path, details: Json, width: int) -> list[int]:
    """Return the Matryoshka prefixes; SAELens adds the full width when it was left out."""
    widths = whole_numbers(path, "matryoshka_widths", details.get("matryoshka_widths") or None) or []
    return widths if widths and widths[-1] == width else [*widths, width]


def _threshold(path: Path, config: Json, tensors: dict[str, Tensor]) -> Tensor:
    """Return the threshold of each latent, in units of its pre-activation."""
    if config["architecture"] == _INFERENCE:
        require_tensors(path / WEIGHTS_NAME, tensors, ("threshold",))
        return tensors["threshold"]
    require_tensors(path / WEIGHTS_NAME, tensors, ("topk_threshold",))
    if tensors["topk_threshold"].numel() != 1:
        shape = tuple(tensors["topk_threshold"].shape)
        raise CheckpointError(f"{path / WEIGHTS_NAME}: topk_threshold has shape {shape}; expected a scalar.")
    threshold = tensors["topk_threshold"].reshape(()).expand(tensors["b_enc"].shape)
    scaled = config.get("rescale_acts_by_decoder_norm", True)
    return threshold.div(tensors["W_dec"].double().norm(dim=1).clamp(min=1e-8)) if scaled else threshold
