"""Directories of SAELens 6 and later: `{sae_weights.safetensors, cfg.json}`.

`W_enc [D, K]`, `W_dec [K, D]`, `b_enc`, `b_dec` and, for the architecture `jumprelu`, `threshold [K]`: that is how
trained BatchTopK and Matryoshka BatchTopK SAEs are saved, with k and the prefixes in the metadata. The training
architectures `batchtopk` and `matryoshka_batchtopk` have one scalar `topk_threshold` instead. A normalisation that
SAELens has folded in shows as decoder rows of another norm than 1, and is undone by bringing them to unit norm.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dmsae.config import Json
from dmsae.errors import CheckpointError
from dmsae.formats.imported import Imported, Weights, build, read_config, require_tensors, stated_or_given

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
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path / WEIGHTS_NAME} cannot be read as safetensors: {error}") from error
    require_tensors(path / WEIGHTS_NAME, tensors, ("W_enc", "b_enc", "W_dec", "b_dec"))
    details = {**config, **(config["metadata"].get("training_architecture_details") or {})}
    notes: list[str] = []
    stated_k = details.get("k")
    if isinstance(stated_k, float):
        if stated_k != round(stated_k):
            notes.append(f"k was {stated_k}; it was rounded.")
        stated_k = round(stated_k)
    stated_prefixes = _prefixes(details, len(tensors["b_enc"])) if stated_k is not None else None
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
    major = re.match(r"\d+", str(version))
    if major is None or int(major.group()) < 6:
        raise CheckpointError(
            f"{path / _CONFIG_NAME} was written by SAELens {version or 'before 6'}. Load it with SAELens 6 and save it "
            "again."
        )
    if (architecture := config.get("architecture")) not in (_INFERENCE, *_TRAINING):
        known = ", ".join((_INFERENCE, *_TRAINING))
        raise CheckpointError(f"{path} holds an SAE of architecture {architecture!r}; those that can be read: {known}.")
    if (normalisation := config.get("normalize_activations", "none")) != "none":
        raise CheckpointError(
            f"{path} expects activations normalised by {normalisation!r}, and does not hold what that was. Fold the "
            "normalisation into the weights with SAELens (fold_activation_norm_scaling_factor) and save it again."
        )
    if (reshaping := config.get("reshape_activations", "none")) != "none":
        raise CheckpointError(f"{path} reshapes activations ({reshaping!r}); only SAEs on plain vectors can be read.")


def _prefixes(details: Json, width: int) -> list[int]:
    """Return the Matryoshka prefixes; SAELens adds the full width when it was left out."""
    widths = [int(size) for size in details.get("matryoshka_widths") or []]
    return widths if widths and widths[-1] == width else [*widths, width]


def _threshold(path: Path, config: Json, tensors: dict[str, Tensor]) -> Tensor:
    """Return the threshold of each latent, in units of its pre-activation."""
    if config["architecture"] == _INFERENCE:
        require_tensors(path / WEIGHTS_NAME, tensors, ("threshold",))
        return tensors["threshold"]
    require_tensors(path / WEIGHTS_NAME, tensors, ("topk_threshold",))
    threshold = tensors["topk_threshold"].expand(tensors["b_enc"].shape)
    scaled = config.get("rescale_acts_by_decoder_norm", True)
    return threshold.div(tensors["W_dec"].double().norm(dim=1).clamp(min=1e-8)) if scaled else threshold
