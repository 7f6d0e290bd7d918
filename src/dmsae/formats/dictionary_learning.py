"""Checkpoints of dictionary_learning, which SAEBench publishes: `trainer_i/{ae.pt, config.json}`.

Matryoshka BatchTopK: `W_enc [D, K]`, `W_dec [K, D]`, `b_enc`, `b_dec`, `k`, `threshold`, `group_sizes [G]` (in some
files only in the config). BatchTopK: `encoder.weight [K, D]`, `encoder.bias`, `decoder.weight [D, K]`, `b_dec`, `k`,
`threshold`. Both subtract `b_dec` from the input, and have one threshold for all latents. JumpReLU: `W_enc`, `b_enc`,
`W_dec`, `b_dec`, `threshold [K]`; it does not subtract `b_dec`.

Ours are written as one of the first two if they have one threshold and see x − b_dec, else as JumpReLU.
"""

import io
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

from dmsae.config import Json
from dmsae.disk.files import write_bytes, write_json
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
from dmsae.formats.torch_file import read_torch_file
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE

WEIGHTS_NAME = "ae.pt"
CONFIG_NAME = "config.json"
_TRAINERS = {
    "MatryoshkaBatchTopKSAE": "MatryoshkaBatchTopKTrainer",
    "BatchTopKSAE": "BatchTopKTrainer",
    "JumpReluAutoEncoder": "JumpReluTrainer",
}
"""The classes that can be read and written, and those that train them, by which SAEBench tells them apart."""
_MATRYOSHKA, _BATCH, _JUMP = _TRAINERS


def read(path: Path, given: Given) -> Imported:
    """Return the SAE in a trainer's directory."""
    state = read_torch_file(path / WEIGHTS_NAME)
    trainer = _read_trainer(path / CONFIG_NAME)
    if (kind := trainer.get("dict_class")) not in (None, *_TRAINERS):
        shown = str(kind)[:80]
        raise CheckpointError(f"{path} holds a {shown}; only {', '.join(_TRAINERS)} can be read.")
    weights, jumps = _weights(path, state)
    ours, model = read_own_facts(path / CONFIG_NAME, trainer)
    if ours is not None:
        if ours.center_input == jumps:
            raise CheckpointError(f"{path / CONFIG_NAME}: {KEY} contradicts the class of the weights. Export it again.")
        return build(path / WEIGHTS_NAME, "dictionary_learning", weights, ours, (), model).agreeing(path, given)
    stated_k = whole_number(path, "k", state.get("k", trainer.get("k")))
    groups = whole_numbers(path, "group_sizes", state.get("group_sizes", trainer.get("group_sizes")))
    if groups is None and "W_enc" not in state:
        groups = [weights.b_enc_K.numel()]
    stated_prefixes = None if groups is None else list(accumulate(groups))
    notes = _provenance(trainer)
    k = stated_or_given(path, "k", stated_k, given.k, notes)
    prefixes = stated_or_given(path, "prefixes", stated_prefixes, given.prefix_list, notes)
    return build(
        path / WEIGHTS_NAME,
        "dictionary_learning",
        weights,
        lambda width, d_model: SAEConfig(d_model, width, k, tuple(prefixes), center_input=not jumps),
        notes,
    )


def write(one: Imported, directory: Path) -> list[str]:
    """Write an SAE into a directory, and return what should be known of it."""
    require_holdable(one.sae, "dictionary_learning")
    kind = _class_of(one.sae)
    config, weights = one.sae.config, folded(one.sae) if kind == _JUMP else centred(one.sae)
    state = _state(kind, config, weights)
    trainer: Json = {
        "trainer_class": _TRAINERS[kind],
        "dict_class": kind,
        "activation_dim": config.d_model,
        "dict_size": config.width,
        "k": config.k,
        "layer": layer_of(one.model),
        "lm_name": model_name(one.model),
        "submodule_name": one.model.hook if one.model else None,
        KEY: own_facts(one, center_input=kind != _JUMP),
    }
    if kind == _MATRYOSHKA:
        trainer["group_sizes"] = state["group_sizes"].tolist()
    file = io.BytesIO()
    torch.save(state, file)
    write_bytes(directory / WEIGHTS_NAME, file.getvalue())
    write_json(directory / CONFIG_NAME, {"trainer": trainer, "buffer": {}})
    notes = [f"Written as {kind}."]
    if config.width < config.d_model:
        notes.append(f"SAEBench's loader wants at least as many latents as the width {config.d_model}; it will refuse.")
    return notes


def _class_of(sae: SAE) -> str:
    """Return the class that holds an SAE exactly."""
    one_threshold = bool((sae.threshold == sae.threshold[0]).all())
    if not (one_threshold and sae.config.center_input) or sae.config.n_detectors:
        return _JUMP
    return _MATRYOSHKA if len(sae.config.prefixes) > 1 else _BATCH


def _state(kind: str, config: SAEConfig, weights: Weights) -> dict[str, Tensor]:
    if kind == _JUMP:
        whole = {"threshold": weights.threshold_K}
    else:
        whole = {"k": torch.tensor(config.k, dtype=torch.int32), "threshold": weights.threshold_K[0].clone()}
    if kind == _BATCH:
        return whole | {
            "encoder.weight": weights.W_enc_KD,
            "encoder.bias": weights.b_enc_K,
            "decoder.weight": weights.W_dec_KD.T.contiguous(),
            "b_dec": weights.b_dec_D,
        }
    if kind == _MATRYOSHKA:
        whole["group_sizes"] = torch.tensor([high - low for low, high in pairwise((0, *config.prefixes))])
    return whole | {
        "W_enc": weights.W_enc_KD.T.contiguous(),
        "b_enc": weights.b_enc_K,
        "W_dec": weights.W_dec_KD,
        "b_dec": weights.b_dec_D,
    }


def _provenance(trainer: Json) -> list[str]:
    """Return, as a note, the model and layer that the checkpoint says it was trained on."""
    said = [
        f"{name} {trainer[name]}" for name in ("lm_name", "layer", "submodule_name") if trainer.get(name) is not None
    ]
    return [f"The checkpoint says of itself: {', '.join(said)}."] if said else []


def _read_trainer(path: Path) -> Json:
    """Return what the config says of the trainer; nothing when there is no config, which the weights can do without."""
    if not path.is_file():
        return {}
    trainer = read_config(path).get("trainer")
    if not isinstance(trainer, dict):
        raise CheckpointError(f"{path} does not describe a trainer: it is not a config of dictionary_learning.")
    return trainer


def _weights(path: Path, state: Json) -> tuple[Weights, bool]:
    """Return the weights, and whether they are those of a JumpReLU."""
    if "W_enc" in state:
        require_tensors(path / WEIGHTS_NAME, state, ("W_enc", "b_enc", "W_dec", "b_dec", "threshold"))
        require_matrices(path / WEIGHTS_NAME, state, ("W_enc", "W_dec"))
        encoder, bias, decoder = state["W_enc"].T, state["b_enc"], state["W_dec"]
    else:
        require_tensors(
            path / WEIGHTS_NAME, state, ("encoder.weight", "encoder.bias", "decoder.weight", "b_dec", "threshold")
        )
        require_matrices(path / WEIGHTS_NAME, state, ("encoder.weight", "decoder.weight"))
        encoder, bias, decoder = state["encoder.weight"], state["encoder.bias"], state["decoder.weight"].T
    threshold: Tensor = state["threshold"]
    if threshold.ndim == 1 and threshold.shape == bias.shape and "k" not in state and "W_enc" in state:
        return Weights(encoder, bias, decoder, state["b_dec"], threshold), True
    if threshold.numel() != 1:
        raise CheckpointError(
            f"{path / WEIGHTS_NAME}: threshold has shape {tuple(threshold.shape)}; expected a scalar, or in a "
            "JumpReluAutoEncoder one for each latent."
        )
    return Weights(encoder, bias, decoder, state["b_dec"], threshold.reshape(()).expand(bias.shape)), False
