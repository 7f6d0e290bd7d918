"""The fraction of variance that is really explained, on the tokens that the core eval looks at.

The package subtracts the square of a mean of *squares* from the mean squared norm, so its `explained_variance` has the
wrong denominator (its legacy figure, a mean of ratios, is another quantity). Runs in SAEBench's environment.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dmsae.evaluation.saebench.adapter import Adapter
from dmsae.sae.variance import VarianceExplained


@contextmanager
def watching_variance(core: ModuleType, adapter: Adapter) -> Iterator[VarianceExplained]:
    """Take in, while the block runs, what the core eval reconstructs for its own variance metrics."""
    explained = VarianceExplained(adapter.cfg.d_in)
    measure = core.get_sparsity_and_variance_metrics

    def watched(sae: Adapter, model: Any, activation_store: Any, **kwargs: Any) -> Any:
        ignored = torch.tensor([token for token in kwargs.get("ignore_tokens", ()) if token is not None])
        next_tokens, encode, decode = activation_store.get_batch_tokens, sae.encode, sae.decode
        seen: dict[str, Tensor] = {}

        def noting_tokens(*args: Any, **inner: Any) -> Tensor:
            seen["tokens"] = next_tokens(*args, **inner)
            return seen["tokens"]

        def noting_input(x: Tensor) -> Tensor:
            seen["x"] = x
            return encode(x)

        def noting_output(codes: Tensor) -> Tensor:
            output = decode(codes)
            counts = ~torch.isin(seen["tokens"], ignored.to(seen["tokens"]))
            explained.add(seen["x"][counts].float(), output[counts].float())
            return output

        with (
            patch.object(activation_store, "get_batch_tokens", noting_tokens),
            patch.object(sae, "encode", noting_input),
            patch.object(sae, "decode", noting_output),
        ):
            return measure(sae, model, activation_store, **kwargs)

    with patch.object(core, "get_sparsity_and_variance_metrics", watched):
        yield explained
