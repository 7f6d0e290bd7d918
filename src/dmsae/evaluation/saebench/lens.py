"""Models through TransformerLens. Runs in SAEBench's environment."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from transformer_lens import HookedTransformer, supported_models

from dmsae.evaluation.saebench.job import JobModel


def register(model: JobModel) -> str:
    """Make TransformerLens accept a model, and return the name under which it loads it.

    A model that it knows by its Hub id keeps the name that published results carry. For any other, it has to be told
    that the directory is an official one.
    """
    known = {name.lower(): name for name in supported_models.OFFICIAL_MODEL_NAMES}
    if official := known.get(model.name.lower()):
        aliases = supported_models.MODEL_ALIASES.get(official, [])
        return str(aliases[0]) if aliases else official
    path = str(model.path)
    if path not in supported_models.OFFICIAL_MODEL_NAMES:
        supported_models.OFFICIAL_MODEL_NAMES.append(path)
        supported_models.MODEL_ALIASES[path] = [model.alias]
    return model.alias


@contextmanager
def loaded_once(first_n_layers: int | None = None) -> Iterator[None]:
    """Let the package load each model once while the block runs, and no more of it than its first blocks.

    It is the package that asks for the model, for every SAE anew. An eval that reads only activations below a block
    would pay for all blocks and the unembedding; what it reads from a shorter model is the same.
    """
    load = HookedTransformer.from_pretrained_no_processing
    models: dict[tuple[str, str], Any] = {}

    def cached(name: str, *args: Any, dtype: Any = torch.float32, **kwargs: Any) -> Any:
        if (name, str(dtype)) not in models:
            if first_n_layers is not None:
                kwargs["first_n_layers"] = first_n_layers
            model = load(name, *args, dtype=dtype, **kwargs)
            if first_n_layers is not None:
                model.unembed = torch.nn.Identity()
            models[name, str(dtype)] = model
        return models[name, str(dtype)]

    with patch.object(HookedTransformer, "from_pretrained_no_processing", cached):
        yield
