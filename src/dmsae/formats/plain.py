"""An SAE of ours in the terms of other packages: one encoder, one bias, one threshold for each latent.

With `pre = W_enc x + b_enc` a code is `pre` where it is above its latent's threshold, else 0. Our encoder may see
x − b_dec instead, and detectors never do, so biases are rewritten for the one or the other convention. What the others
have no place for (core, prefixes, the model) is written beside it under the name `dmsae`, and read again from there.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dmsae import __version__
from dmsae.activations.identity import ModelIdentity
from dmsae.config import Json, from_dict, to_dict
from dmsae.disk.files import without_places
from dmsae.errors import CheckpointError, ConfigError, ExportError
from dmsae.formats.imported import Imported, Weights
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE

KEY = "dmsae"
"""Where a foreign config keeps what only dmsae knows."""
_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,4})$")


def folded(sae: SAE) -> Weights:
    """Return the weights for an encoder that sees x itself: b_dec has been folded into the biases."""
    return _weights(sae, sae.W_enc.double() @ sae.b_dec.double(), centred=False)


def centred(sae: SAE) -> Weights:
    """Return the weights for an encoder that sees x − b_dec."""
    return _weights(sae, sae.W_enc.double() @ sae.b_dec.double(), centred=True)


def _weights(sae: SAE, shift_K: Tensor, centred: bool) -> Weights:
    n = sae.config.n_detectors
    bias_K = sae.b_enc.new_zeros(sae.config.width).double()
    bias_K[:n] = sae.offset.double() + (shift_K[:n] if centred else 0.0)
    bias_K[n:] = sae.b_enc.double()
    if centred != sae.config.center_input:
        bias_K[n:] += shift_K[n:] if centred else -shift_K[n:]
    weights = Weights(sae.W_enc, bias_K, sae.W_dec, sae.b_dec, sae.threshold)
    return Weights(*(tensor.detach().float().cpu().contiguous() for tensor in weights))


def require_holdable(sae: SAE, kind: str, negative: bool = False) -> None:
    """Raise `ExportError` unless a format with a ReLU and a threshold for each latent can hold an SAE."""
    for name, tensor in sae.state_dict().items():
        if not tensor.isfinite().all():
            raise ExportError(
                f"{name} is not finite. An SAE that diverged cannot be used anywhere; nothing is written."
            )
    n_below = int((sae.threshold[: sae.config.n_detectors] < 0).sum())
    if n_below and not negative:
        raise ExportError(
            f"{n_below} of {sae.config.n_detectors} detectors have a threshold below 0 and so give negative codes, "
            f"which the ReLU of {kind} cuts off. Nothing is written. The format that can hold it: safetensors."
        )


def own_facts(one: Imported, center_input: bool) -> Json:
    """Return what only dmsae knows of an SAE, as its config reads with another convention for the input."""
    config = to_dict(one.sae.config) | {"center_input": center_input}
    model = without_places(to_dict(one.model)) if one.model else None
    return {"version": __version__, "config": config, "model": model}


def read_own_facts(path: Path, holder: Mapping[str, Any]) -> tuple[SAEConfig | None, ModelIdentity | None]:
    """Return the config and the model in a foreign config that dmsae has written; None for what it does not say."""
    facts = holder.get(KEY)
    if facts is None:
        return None, None
    if not isinstance(facts, dict):
        raise CheckpointError(f"{path}: {KEY} is not an object. Leave it out, or export the SAE again.")
    try:
        config, model = facts.get("config"), facts.get("model")
        return (
            from_dict(SAEConfig, config) if config is not None else None,
            from_dict(ModelIdentity, model) if model is not None else None,
        )
    except ConfigError as error:
        raise CheckpointError(
            f"{path}: {KEY} does not describe an SAE: {error} Leave it out, or export again."
        ) from error


def layer_of(model: ModelIdentity | None) -> int | None:
    """Return the number of the block whose output the hook takes; None for other hooks."""
    found = _BLOCK.search(model.hook) if model else None
    return int(found.group(1)) if found else None


def model_name(model: ModelIdentity | None) -> str | None:
    """Return what a model is called elsewhere: a Hub id, or of a directory only its name."""
    name: str | None = without_places(model.name) if model else None
    return name
