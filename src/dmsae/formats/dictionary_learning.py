"""Checkpoints of dictionary_learning, which SAEBench publishes: `trainer_i/{ae.pt, config.json}`.

Matryoshka BatchTopK: `W_enc [D, K]`, `W_dec [K, D]`, `b_enc`, `b_dec`, `k`, `threshold`, `group_sizes [G]` (in some
files only in the config). BatchTopK: `encoder.weight [K, D]`, `encoder.bias`, `decoder.weight [D, K]`, `b_dec`, `k`,
`threshold`. Both subtract `b_dec` from the input.
"""

import pickle
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from dmsae.config import Json
from dmsae.errors import CheckpointError, first_line
from dmsae.formats.imported import Imported, Weights, build, read_config, require_tensors, stated_or_given

WEIGHTS_NAME = "ae.pt"
_CONFIG_NAME = "config.json"
_KINDS = ("MatryoshkaBatchTopKSAE", "BatchTopKSAE")


def load(path: Path, k: int | None = None, prefixes: Sequence[int] | None = None) -> Imported:
    """Return the SAE in a trainer's directory."""
    state = _read_state(path / WEIGHTS_NAME)
    trainer = _read_trainer(path / _CONFIG_NAME)
    if (kind := trainer.get("dict_class")) not in (None, *_KINDS):
        raise CheckpointError(f"{path} holds a {kind}; only {' and '.join(_KINDS)} can be read.")
    weights = _weights(path, state)
    stated_k = int(state["k"]) if "k" in state else trainer.get("k")
    groups = state["group_sizes"].tolist() if "group_sizes" in state else trainer.get("group_sizes")
    if groups is None and "W_enc" not in state:
        groups = [len(weights.b_enc_K)]
    stated_prefixes = None if groups is None else list(accumulate(int(size) for size in groups))
    notes = _provenance(trainer)
    return build(
        path / WEIGHTS_NAME,
        "dictionary_learning",
        weights,
        k=stated_or_given(path, "k", stated_k, k, notes),
        prefixes=stated_or_given(path, "prefixes", stated_prefixes, list(prefixes) if prefixes else None, notes),
        center_input=True,
        notes=notes,
    )


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


def _read_state(path: Path) -> Json:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read as plain tensors, and nothing else is loaded: {first_line(error)}."
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}; expected the tensors of an SAE by name.")
    return state


def _weights(path: Path, state: Json) -> Weights:
    if "W_enc" in state:
        require_tensors(path / WEIGHTS_NAME, state, ("W_enc", "b_enc", "W_dec", "b_dec", "threshold"))
        encoder, bias, decoder = state["W_enc"].T, state["b_enc"], state["W_dec"]
    else:
        require_tensors(
            path / WEIGHTS_NAME, state, ("encoder.weight", "encoder.bias", "decoder.weight", "b_dec", "threshold")
        )
        encoder, bias, decoder = state["encoder.weight"], state["encoder.bias"], state["decoder.weight"].T
    threshold: Tensor = state["threshold"]
    if threshold.numel() != 1:
        raise CheckpointError(
            f"{path / WEIGHTS_NAME}: threshold has shape {tuple(threshold.shape)}; expected a scalar."
        )
    return Weights(encoder, bias, decoder, state["b_dec"], threshold.expand(bias.shape))
