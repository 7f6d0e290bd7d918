"""Contexts become shards: they go through the model, and the rows that count are kept.

Each shard is a function of its contexts, the model and the seed alone.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dmsae.activations.base_model import BaseModel
from dmsae.activations.contexts import Contexts, countable, counted_losses
from dmsae.activations.dtypes import DtypeName, to_stored, torch_dtype
from dmsae.activations.request import HarvestConfig
from dmsae.activations.splits import Split
from dmsae.activations.store import Shard
from dmsae.errors import ModelError
from dmsae.seeds import generator


class ShardMaker:
    """Runs contexts through the model and keeps the rows that count."""

    def __init__(self, model: BaseModel, config: HarvestConfig) -> None:
        self._model = model
        self._config = config

    def make(
        self,
        split: Split,
        contexts: Contexts,
        quota: int,
        index: int = 0,
        advance: Callable[[int], None] | None = None,
    ) -> tuple[Shard, dict[str, int]]:
        """Return the first `quota` rows that count, and what was dropped; all but held-out rows are shuffled."""
        mask = self._model.keep_mask
        keep_NL = countable(self._config, split, mask, contexts)
        dropped = mask.drop_counts(contexts.tokens_NL)
        dropped["no_loss_after"] = int((mask(contexts.tokens_NL) & ~keep_NL).sum())
        dropped["over_quota"] = int(keep_NL.sum()) - quota
        keep_NL &= keep_NL.flatten().cumsum(0).view_as(keep_NL) <= quota
        parts: list[Shard] = []
        size = self._config.batch_contexts
        for some, keep in zip(contexts.split(size), keep_NL.split(size), strict=True):
            parts.append(self._run(split, some, keep))
            if advance is not None:
                advance(int(keep.sum()))
        shard = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        context, position = keep_NL.nonzero(as_tuple=True)
        if split is not Split.TRAIN:
            first = index * self._config.shard_contexts(split)
            shard |= {"context": (context + first).to(torch.int32), "position": position.to(torch.int32)}
        return self._select(split, shard, index, dropped), dropped

    def _run(self, split: Split, contexts: Contexts, keep_NL: Tensor) -> Shard:
        keep = keep_NL.to(self._model.device)
        if split is Split.PAIRS:
            counted_NL = counted_losses(self._config.skip_boundary_targets, self._model.keep_mask, contexts)
            passed = self._model.gradients(contexts.tokens_NL, counted_NL)
            return {"x": passed.x_NLD[keep].float().cpu(), "g": passed.g_NLD[keep].float().cpu()}
        return {"x": self._model.activations(contexts.tokens_NL)[keep].float().cpu()}

    def _select(self, split: Split, shard: Shard, index: int, dropped: dict[str, int]) -> Shard:
        """Leave out norm outliers and, except for held-out rows, shuffle."""
        norms = shard["x"].norm(dim=1)
        if not torch.isfinite(norms).all():
            raise ModelError(
                f"The activations at {self._model.identity.hook!r} are not finite with model.dtype = "
                f"{self._model.identity.dtype}. Use float32 or bfloat16."
            )
        chosen = (norms <= norm_limit(norms, self._config.max_norm_ratio)).nonzero().squeeze(1)
        dropped["norm_outlier"] = len(norms) - len(chosen)
        if split is not Split.HELDOUT:
            chosen = chosen[shuffled_rows(len(chosen), self._config.seed, split, index)]
        return {name: tensor[chosen] for name, tensor in shard.items()}


def shuffled_rows(n_rows: int, seed: int, split: Split, index: int) -> Tensor:
    """Return the order in which the rows of a shard are stored."""
    return torch.randperm(n_rows, generator=generator(seed, "rows", split, index))


def to_stored_dtypes(shard: Shard, config: HarvestConfig) -> Shard:
    """Return a shard in its stored dtypes; a value that does not fit is an error."""
    settings: dict[str, tuple[DtypeName, str]] = {
        "x": (config.dtype, "dtype"),
        "g": (config.gradient_dtype, "gradient_dtype"),
    }
    stored = dict(shard)
    for name, (dtype, setting) in settings.items():
        if name in shard:
            remedy = (
                f"Set {setting} to bfloat16 or float32, or lower max_norm_ratio. What was harvested so far is kept, "
                "under its own key."
            )
            stored[name] = to_stored(shard[name], dtype, name, remedy)
    return stored


def norm_limit(norms: Tensor, max_norm_ratio: float | None) -> float:
    """Return the norm above which an activation is an outlier among those that count, of which there may be none."""
    return math.inf if max_norm_ratio is None or not len(norms) else float(max_norm_ratio * norms.median())


def row_bytes(config: HarvestConfig, split: Split, d_model: int) -> int:
    """Return the size of one stored row."""
    size = torch_dtype(config.dtype).itemsize * d_model
    if split is Split.PAIRS:
        size += torch_dtype(config.gradient_dtype).itemsize * d_model
    return size if split is Split.TRAIN else size + 8
