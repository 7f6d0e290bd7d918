"""Directories of SAELens 6 and later: `{sae_weights.safetensors, cfg.json}`.

`W_enc [D, K]`, `W_dec [K, D]`, `b_enc`, `b_dec` and, for the architecture `jumprelu`, `threshold [K]`: that is how
trained BatchTopK and Matryoshka BatchTopK SAEs are saved, with k and the prefixes in the metadata. The training
architectures `batchtopk` and `matryoshka_batchtopk` have one scalar `topk_threshold` instead. A normalisation that
SAELens has folded in shows as decoder rows of another norm than 1, and is undone by bringing them to unit norm.
The architecture `standard` is a ReLU: its thresholds are 0.

Ours are written as `jumprelu`. A dense core is one whose thresholds are 0. Detectors see x and not x − b_dec, so an SAE
that has some is written for x, with b_dec folded into the biases of all other latents.
"""

import re
from math import isfinite
from pathlib import Path

from torch import Tensor, zeros_like

from dmsae.config import Json
from dmsae.disk.files import write_json, write_tensors
from dmsae.errors import CheckpointError
from dmsae.formats.imported import (
    Given,
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
from dmsae.formats.plain import (
    KEY,
    centred,
    folded,
    layer_of,
    model_name,
    own_facts,
    read_own_facts,
    require_holdable,
)
from dmsae.formats.tensor_file import read_tensors
from dmsae.sae.config import SAEConfig

WEIGHTS_NAME = "sae_weights.safetensors"
CONFIG_NAME = "cfg.json"
_INFERENCE = ("jumprelu", "standard")
_TRAINING = ("batchtopk", "matryoshka_batchtopk")
_VERSION = "6.0.0"
"""The first version of SAELens whose format this is. Without one, its loader takes the config for an older one."""


def read(path: Path, given: Given) -> Imported:
    """Return the SAE in a directory."""
    config = read_config(path / CONFIG_NAME)
    _require_readable(path, config)
    tensors, _ = read_tensors(path / WEIGHTS_NAME)
    require_tensors(path / WEIGHTS_NAME, tensors, ("W_enc", "b_enc", "W_dec", "b_dec"))
    require_matrices(path / WEIGHTS_NAME, tensors, ("W_enc", "W_dec"))
    threshold_K = _threshold(path, config, tensors)
    weights = Weights(tensors["W_enc"].T, tensors["b_enc"], tensors["W_dec"], tensors["b_dec"], threshold_K)
    ours, model = read_own_facts(path / CONFIG_NAME, config.get("metadata", {}))
    if ours is not None:
        if ours.center_input != bool(config.get("apply_b_dec_to_input", True)):
            raise CheckpointError(f"{path / CONFIG_NAME}: apply_b_dec_to_input contradicts {KEY}. Export it again.")
        return build(path / WEIGHTS_NAME, "saelens", weights, ours, (), model).agreeing(path, given)
    details = config.get("metadata", {}).get("training_architecture_details") or {}
    if not isinstance(details, dict):
        raise CheckpointError(f"{path / CONFIG_NAME}: training_architecture_details is not an object.")
    details = {**config, **details}
    notes: list[str] = []
    stated_k = details.get("k")
    if isinstance(stated_k, float) and isfinite(stated_k):
        if stated_k != round(stated_k):
            notes.append(f"k was {stated_k}; it was rounded.")
        stated_k = round(stated_k)
    stated_k = whole_number(path, "k", stated_k)
    stated_prefixes = _prefixes(path, details, tensors["b_enc"].numel()) if stated_k is not None else None
    k = stated_or_given(path, "k", stated_k, given.k, notes)
    prefixes = stated_or_given(path, "prefixes", stated_prefixes, given.prefix_list, notes)
    center = bool(config.get("apply_b_dec_to_input", True))
    return build(
        path / WEIGHTS_NAME,
        "saelens",
        weights,
        lambda width, d_model: SAEConfig(d_model, width, k, tuple(prefixes), center_input=center),
        notes,
    )


def write(one: Imported, directory: Path) -> list[str]:
    """Write an SAE into a directory, and return what should be known of it."""
    config = one.sae.config
    require_holdable(one.sae, "saelens")
    center = config.center_input and not config.n_detectors
    weights = centred(one.sae) if center else folded(one.sae)
    tensors = {
        "W_enc": weights.W_enc_KD.T,
        "b_enc": weights.b_enc_K,
        "W_dec": weights.W_dec_KD,
        "b_dec": weights.b_dec_D,
        "threshold": weights.threshold_K,
    }
    cfg = {
        "architecture": _INFERENCE[0],
        "d_in": config.d_model,
        "d_sae": config.width,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": center,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": _metadata(one, center),
    }
    write_tensors(directory / WEIGHTS_NAME, tensors)
    write_json(directory / CONFIG_NAME, cfg)
    return []


def _metadata(one: Imported, center: bool) -> Json:
    config, layer = one.sae.config, layer_of(one.model)
    metadata: Json = {
        "sae_lens_version": _VERSION,
        "training_architecture": _TRAINING[len(config.prefixes) > 1],
        "training_architecture_details": {"k": config.k, "matryoshka_widths": list(config.prefixes)},
        KEY: own_facts(one, center),
    }
    if one.model is not None:
        hook = one.model.hook if layer is None else f"blocks.{layer}.hook_resid_post"
        metadata |= {"model_name": model_name(one.model), "hook_name": hook, "hf_hook_name": one.model.hook}
    return metadata


def _require_readable(path: Path, config: Json) -> None:
    metadata = config.get("metadata")
    version = metadata.get("sae_lens_version") if isinstance(metadata, dict) else None
    major = re.match(r"\d{1,9}(?=\D|$)", str(version)) if isinstance(version, str) else None
    if major is None or int(major.group()) < 6:
        raise CheckpointError(
            f"{path / CONFIG_NAME} was written by SAELens {str(version)[:80] if version else 'before 6'}. Load it "
            "with SAELens 6 and save it again."
        )
    if (architecture := config.get("architecture")) not in [*_INFERENCE, *_TRAINING]:
        known = ", ".join((*_INFERENCE, *_TRAINING))
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
    if config["architecture"] == "standard":
        return zeros_like(tensors["b_enc"])
    if config["architecture"] == "jumprelu":
        require_tensors(path / WEIGHTS_NAME, tensors, ("threshold",))
        return tensors["threshold"]
    require_tensors(path / WEIGHTS_NAME, tensors, ("topk_threshold",))
    if tensors["topk_threshold"].numel() != 1:
        shape = tuple(tensors["topk_threshold"].shape)
        raise CheckpointError(f"{path / WEIGHTS_NAME}: topk_threshold has shape {shape}; expected a scalar.")
    threshold = tensors["topk_threshold"].reshape(()).expand(tensors["b_enc"].shape)
    scaled = config.get("rescale_acts_by_decoder_norm", True)
    return threshold.div(tensors["W_dec"].double().norm(dim=1).clamp(min=1e-8)) if scaled else threshold
