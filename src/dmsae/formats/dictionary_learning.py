"""Checkpoints of dictionary_learning, which SAEBench publishes: `trainer_i/{ae.pt, config.json}`.

Matryoshka BatchTopK: `W_enc [D, K]`, `W_dec [K, D]`, `b_enc`, `b_dec`, `k`, `threshold`, `group_sizes [G]` (in some
files only in the config). BatchTopK: `encoder.weight [K, D]`, `encoder.bias`, `decoder.weight [D, K]`, `b_dec`, `k`,
`threshold`. Both subtract `b_dec` from the input.
"""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from torch import Tensor

from dmsae.config import Json
from dmsae.errors import CheckpointError
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
from dmsae.formats.torch_file import read_torch_file

WEIGHTS_NAME = "ae.pt"
_CONFIG_NAME = "config.json"
_KINDS = ("MatryoshkaBatchTopKSAE", "BatchTopKSAE")


def load(path: Path, k: int | None = None, prefixes: Sequence[int] | None = None) -> Imported:
    """Return the SAE in a trainer's directory."""
    state = read_torch_file(path / WEIGHTS_NAME)
    trainer = _read_trainer(path / _CONFIG_NAME)
    if (kind := trainer.get("dict_class")) not in (None, *_KINDS):
        raise CheckpointError(f"{path} holds a {kind}; only {' and '.join(_KINDS)} can be read.")
    weights = _weights(path, state)
    stated_k = whole_number(path, "k", state.get("k", trainer.get("k")))
    groups = whole_numbers(path, "group_sizes", state.get("group_sizes", trainer.get("group_sizes")))
    if groups is None and "W_enc" not in state:
        groups = [weights.b_enc_K.numel()]
    stated_prefixes = None if groups is None else list(accumulate(groups))
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


def _weights(path: Path, state: Json) -> Weights:
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
    if threshold.numel() != 1:
        raise CheckpointError(
            f"{path / WEIGHTS_NAME}: threshold has shape {tuple(threshold.shape)}; expected a scalar."
        )
    return Weights(encoder, bias, decoder, state["b_dec"], threshold.reshape(()).expand(bias.shape))
