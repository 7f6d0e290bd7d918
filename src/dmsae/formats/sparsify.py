"""Directories of sparsify (EleutherAI): `{sae.safetensors, cfg.json}`.

`encoder.weight [K, D]`, `encoder.bias`, `W_dec [K, D]`, `b_dec`. The encoder sees x − b_dec, and of each token's
positive activations the k largest are kept. Ours have a threshold for each latent instead, so the two formats hold the
same SAE only if nothing is left out: thresholds 0 here, k = K there.

One that keeps fewer is read if activations are given: the threshold is then set so that k latents fire per token on
average. Codes are close to those of sparsify, not the same, and a note says how close.
"""

from pathlib import Path

import torch
from torch import Tensor

from dmsae.config import Json
from dmsae.disk.files import write_json, write_tensors
from dmsae.errors import CheckpointError, ConfigError, ExportError
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
)
from dmsae.formats.plain import KEY, centred, own_facts, read_own_facts, require_holdable
from dmsae.formats.tensor_file import read_tensors
from dmsae.sae.config import SAEConfig

WEIGHTS_NAME = "sae.safetensors"
CONFIG_NAME = "cfg.json"
_TENSORS = ("encoder.weight", "encoder.bias", "W_dec", "b_dec")
_SAMPLED = 4096
"""Activations that a threshold is set on, at most."""


def read(path: Path, given: Given) -> Imported:
    """Return the SAE in a directory."""
    config = read_config(path / CONFIG_NAME)
    _require_readable(path / CONFIG_NAME, config)
    tensors, _ = read_tensors(path / WEIGHTS_NAME)
    require_tensors(path / WEIGHTS_NAME, tensors, _TENSORS)
    require_matrices(path / WEIGHTS_NAME, tensors, ("encoder.weight", "W_dec"))
    encoder, bias, decoder, b_dec = (tensors[name] for name in _TENSORS)
    weights = Weights(encoder, bias, decoder, b_dec, torch.zeros_like(bias))
    ours, model = read_own_facts(path / CONFIG_NAME, config)
    kept = whole_number(path, "k", config.get("k"))
    if kept is None or kept < 1:
        raise CheckpointError(f"{path / CONFIG_NAME}: k is {kept}; expected how many latents are kept for each token.")
    if ours is not None and kept >= bias.numel():
        if not ours.center_input or ours.n_detectors:
            raise CheckpointError(f"{path / CONFIG_NAME}: {KEY} contradicts what sparsify computes. Export it again.")
        return build(path / WEIGHTS_NAME, "sparsify", weights, ours, (), model).agreeing(path, given)
    notes: list[str] = []
    prefixes = stated_or_given(path, "prefixes", [bias.numel()], given.prefix_list, notes)
    stated_or_given(path, "k", kept, given.k, notes)
    imported = build(
        path / WEIGHTS_NAME,
        "sparsify",
        weights,
        lambda width, d_model: SAEConfig(d_model, width, min(kept, width), tuple(prefixes)),
        notes,
    )
    return imported if kept >= bias.numel() else _with_threshold(path, imported, kept, given.activations)


def _require_readable(path: Path, config: Json) -> None:
    for name, wanted in (("activation", "topk"), ("skip_connection", False), ("transcode", False)):
        if (found := config.get(name, wanted)) != wanted:
            raise CheckpointError(f"{path}: {name} is {repr(found)[:80]}; only SAEs with {name} {wanted} can be read.")


@torch.no_grad()
def _with_threshold(path: Path, imported: Imported, k: int, activations: Tensor | None) -> Imported:
    """Return the SAE with the threshold at which k latents fire per token, on average over activations."""
    sae = imported.sae
    if activations is None:
        raise CheckpointError(
            f"{path} keeps the {k} largest activations of each token. An SAE of dmsae has thresholds, which have to be "
            "set on activations: give some (--store of 'dmsae import'). Codes will be close to those of sparsify, not "
            "the same."
        )
    if activations.ndim != 2 or activations.shape[1] != sae.config.d_model:
        raise ConfigError(
            f"The activations given have shape {tuple(activations.shape)}; {path} takes [n, {sae.config.d_model}]."
        )
    f_BK = sae.encode(activations[:_SAMPLED].float())
    n_keep = min(k * len(f_BK), f_BK.numel())
    theta = float(f_BK.flatten().kthvalue(f_BK.numel() - n_keep + 1).values)
    theirs_BK = torch.zeros_like(f_BK).scatter(1, (top := f_BK.topk(k, dim=1)).indices, top.values)
    sae.set_threshold_(theta)
    ours_BK = f_BK * (f_BK > theta)
    same = float(((ours_BK > 0) & (theirs_BK > 0)).sum()) / max(1, int(((ours_BK > 0) | (theirs_BK > 0)).sum()))
    note = (
        f"sparsify keeps the {k} largest activations of each token; here those above {theta:.4g} fire, "
        f"{float((ours_BK > 0).sum(1).float().mean()):.1f} per token on {len(f_BK)} activations. {same:.1%} of the "
        "codes that are not 0 in either are not 0 in both, and those are equal."
    )
    return imported._replace(notes=(*imported.notes, note))


def write(one: Imported, directory: Path) -> list[str]:
    """Write an SAE into a directory, and return what should be known of it."""
    require_holdable(one.sae, "sparsify")
    config, n_above = one.sae.config, int((one.sae.threshold != 0).sum())
    if n_above:
        raise ExportError(
            f"{n_above} of {config.width} latents have a threshold, and sparsify has none: it keeps the k largest "
            "activations of each token. Nothing is written. Formats that can hold it: saelens, dictionary_learning, "
            "safetensors."
        )
    weights = centred(one.sae)
    named = (weights.W_enc_KD, weights.b_enc_K, weights.W_dec_KD, weights.b_dec_D)
    cfg = {
        "activation": "topk",
        "expansion_factor": max(1, config.width // config.d_model),
        "normalize_decoder": True,
        "num_latents": config.width,
        "k": config.width,
        "multi_topk": False,
        "skip_connection": False,
        "transcode": False,
        "d_in": config.d_model,
        KEY: own_facts(one, center_input=True),
    }
    if config.n_detectors:
        del cfg[KEY]  # their offsets cannot be told apart from b_dec there
    write_tensors(directory / WEIGHTS_NAME, dict(zip(_TENSORS, named, strict=True)))
    write_json(directory / CONFIG_NAME, cfg)
    return [f"Nothing is left out in sparsify: k is the width, {config.width}."]
