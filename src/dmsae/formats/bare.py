"""One file of safetensors, `model.safetensors`, that any program can read.

`W_enc [K, D]`, `b_enc [K]`, `W_dec [K, D]`, `b_dec [D]`, `threshold [K]`. The activation of latent j on x is
`W_enc[j]·x + b_enc[j]` where that is above `threshold[j]`, else 0, and the reconstruction is `f @ W_dec + b_dec`: b_dec
has been folded into the biases. The header says so, and holds what dmsae needs to make the same SAE of it again.

A file of another program with these names can be read if the caller says what it does not.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from dmsae.disk.files import parse_json, write_tensors
from dmsae.errors import CheckpointError, first_line
from dmsae.formats.imported import Given, Imported, Weights, build, require_matrices, require_tensors, stated_or_given
from dmsae.formats.plain import KEY, folded, own_facts, read_own_facts, require_holdable
from dmsae.formats.tensor_file import read_tensors
from dmsae.sae.config import SAEConfig

WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = ""
"""There is none: what there is to say is in the header."""
_NAMES = ("W_enc", "b_enc", "W_dec", "b_dec")
_FORMULA = "pre = x @ W_enc.T + b_enc; f = pre * (pre > threshold); x_hat = f @ W_dec + b_dec"


def read(path: Path, given: Given) -> Imported:
    """Return the SAE in a directory."""
    file = path / WEIGHTS_NAME
    tensors, header = read_tensors(file)
    require_tensors(file, tensors, _NAMES)
    require_matrices(file, tensors, ("W_enc", "W_dec"))
    facts = _facts(file, header)
    ours, model = read_own_facts(file, {KEY: facts})
    if ours is not None:
        require_tensors(file, tensors, ("threshold",))
        weights = Weights(*(tensors[name] for name in (*_NAMES, "threshold")))
        return build(file, "safetensors", weights, ours, (), model).agreeing(path, given)
    notes: list[str] = []
    k = stated_or_given(path, "k", None, given.k, notes)
    prefixes = stated_or_given(path, "prefixes", None, given.prefix_list, notes)
    center = stated_or_given(path, "center_input", None, given.center_input, notes)
    bias_K = tensors["b_enc"]
    threshold_K = tensors.get("threshold", torch.zeros_like(bias_K))
    if "threshold" in tensors:
        require_tensors(file, tensors, ("threshold",))
        threshold_K = threshold_K.expand(bias_K.shape) if threshold_K.numel() == 1 else threshold_K
    else:
        notes.append("The file holds no threshold; every positive activation passes.")
    matrices = (_by_row(file, name, tensors[name], len(bias_K.flatten())) for name in ("W_enc", "W_dec"))
    W_enc_KD, W_dec_KD = matrices
    return build(
        file,
        "safetensors",
        Weights(W_enc_KD, bias_K, W_dec_KD, tensors["b_dec"], threshold_K),
        lambda width, d_model: SAEConfig(d_model, width, k, tuple(prefixes), center_input=center),
        notes,
    )


def _facts(file: Path, header: dict[str, str]) -> object:
    if KEY not in header:
        return None
    try:
        return parse_json(header[KEY])
    except ValueError as error:
        raise CheckpointError(f"{file}: {KEY} in its header is not JSON: {first_line(error)}. Export again.") from error


def _by_row(file: Path, name: str, matrix: Tensor, width: int) -> Tensor:
    """Return a matrix with a row for each latent, whichever way round it was."""
    if matrix.shape[0] == matrix.shape[1]:
        raise CheckpointError(
            f"{file}: {name} has shape {tuple(matrix.shape)}, so nothing tells its rows from its columns. Save it "
            "again with another width, or in another format."
        )
    return matrix if matrix.shape[0] == width else matrix.T


def write(one: Imported, directory: Path) -> list[str]:
    """Write an SAE into a directory, and return what should be known of it."""
    require_holdable(one.sae, "safetensors", negative=True)
    weights = folded(one.sae)
    tensors = dict(zip((*_NAMES, "threshold"), weights, strict=True))
    header = {"format": "pt", "formula": _FORMULA, KEY: json.dumps(own_facts(one, center_input=False))}
    write_tensors(directory / WEIGHTS_NAME, tensors, header)
    return [f"Codes: {_FORMULA}."]
