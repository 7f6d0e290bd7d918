"""Models through TransformerLens. Runs in SAEBench's environment."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from transformer_lens import HookedTransformer, supported_models
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dmsae.evaluation.saebench.job import JobModel


def register(model: JobModel) -> str:
    """Make TransformerLens accept a model, and return the name under which it loads it.

    A model that it knows by its Hub id keeps the name that published results carry; `from_directory` makes its files
    those of the job. For any other, it has to be told that the directory is an official one.
    """
    if official := _official_name(model):
        aliases = supported_models.MODEL_ALIASES.get(official, [])
        return str(aliases[0]) if aliases else official
    path = str(model.path)
    if path not in supported_models.OFFICIAL_MODEL_NAMES:
        supported_models.OFFICIAL_MODEL_NAMES.append(path)
        supported_models.MODEL_ALIASES[path] = [model.alias]
    return model.alias


def _official_name(model: JobModel) -> str:
    """Return the Hub id by which TransformerLens knows a model; empty when it does not."""
    known = {name.lower(): name for name in supported_models.OFFICIAL_MODEL_NAMES}
    return str(known.get(model.name.lower(), ""))


@contextmanager
def from_directory(model: JobModel) -> Iterator[None]:
    """Let transformers read a model from its directory while the block runs, when it is asked for it by its Hub id.

    TransformerLens decides by the name of an official model how to convert it, so the name has to stay. It would load
    the files of that name from the Hub, whatever they are by now; those of the directory are the ones whose hash was
    checked.
    """

    def redirected(auto: Any) -> Any:
        load = auto.from_pretrained

        def from_pretrained(name: Any, *args: Any, **kwargs: Any) -> Any:
            here = str(name).lower() == _official_name(model).lower()
            return load(str(model.path) if here else name, *args, **kwargs)

        return patch.object(auto, "from_pretrained", from_pretrained)

    with ExitStack() as patches:
        for auto in (AutoConfig, AutoModelForCausalLM, AutoTokenizer):
            patches.enter_context(redirected(auto))
        yield


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
