"""How much a dictionary says twice: near copies among its decoder rows, and what few directions they are made of.

Decoder rows that are nearly parallel share one feature. Rows that are sums of fewer directions share parts: a meta-SAE
(Leask et al. 2025, arXiv:2502.04878), which is a small SAE trained on the decoder rows themselves, explains much of
them. Random directions have neighbours too: beside the mean largest cosine stands what chance gives.
"""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from dmsae.config import require, require_whole
from dmsae.evaluation.nulls import effective_dimension, extreme_value_null
from dmsae.evaluation.subject import Subject
from dmsae.progress import SILENT, Progress
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE
from dmsae.sae.variance import VarianceExplained
from dmsae.training.config import TrainConfig
from dmsae.training.trainer import train

_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class RedundancyConfig:
    """What counts as a near copy, and the meta-SAE: a BatchTopK SAE trained on the decoder rows."""

    meta_ratio: float = 1 / 16
    """Width of the meta-SAE, as a share of the dictionary's."""
    meta_k: int = 4
    """Meta-latents per decoder row."""
    meta_steps: int = 500
    """Training steps of the meta-SAE."""
    meta_batch: int = 512
    """Decoder rows per step, at most."""
    meta_lr: float = 3e-3
    """Its peak learning rate."""
    seed: int = 0
    """Decides its initial weights."""

    def __post_init__(self) -> None:
        require(0 < self.meta_ratio <= 1, "meta_ratio", self.meta_ratio, "be above 0 and at most 1")
        for name in ("meta_k", "meta_steps", "meta_batch"):
            require_whole(name, getattr(self, name), 1)


class RedundancyResult(NamedTuple):
    """How alike the decoder rows of a dictionary are. Rows of no length count nowhere."""

    n_rows: int
    mean_max_cosine: float
    """Mean over rows of the largest cosine with another."""
    mean_max_cosine_isotropic: float
    """The same for as many random directions: the extreme-value null."""
    mean_max_cosine_null: float
    """The same for random directions that are as unevenly spread as the rows: in their effective dimension."""
    effective_dimension: float
    """The dimension in which random directions have the mean squared cosine of these rows."""
    share_above_07: float
    """Share of rows with another at a cosine above 0.7."""
    share_above_09: float
    meta_fve: float
    """Fraction of the variance of the decoder rows that the meta-SAE explains, on the rows that it was trained on."""
    meta_width: int
    meta_l0: float


def redundancy(
    subjects: Sequence[Subject], config: RedundancyConfig, progress: Progress = SILENT
) -> list[RedundancyResult]:
    """Return how alike the decoder rows of each subject are. No activations are needed; order does not matter."""
    results = []
    with progress.bar("redundancy", len(subjects), "dictionaries") as bar:
        for subject in subjects:
            results.append(_redundancy(_in_order(subject.dictionary.W_dec.detach().float().cpu()), config))
            bar.advance(1)
    return results


def _in_order(W_dec_KD: Tensor) -> Tensor:
    """Return the rows at unit norm, in an order that depends on nothing but them; rows of no length are left out."""
    rows_KD = normalize(W_dec_KD[W_dec_KD.norm(dim=1) > 0], dim=1)
    return rows_KD[rows_KD[:, 0].argsort(stable=True)].contiguous()


def _redundancy(rows_KD: Tensor, config: RedundancyConfig) -> RedundancyResult:
    n, d_model = rows_KD.shape
    largest_K = largest_cosines(rows_KD)
    dimension = effective_dimension(rows_KD)
    meta_width, meta_fve, meta_l0 = _meta_sae(rows_KD, config)
    return RedundancyResult(
        n_rows=n,
        mean_max_cosine=float(largest_K.mean(dtype=torch.float64)),
        mean_max_cosine_isotropic=extreme_value_null(n, d_model),
        mean_max_cosine_null=extreme_value_null(n, dimension),
        effective_dimension=dimension,
        share_above_07=float((largest_K > 0.7).double().mean()),
        share_above_09=float((largest_K > 0.9).double().mean()),
        meta_fve=meta_fve,
        meta_width=meta_width,
        meta_l0=meta_l0,
    )


def largest_cosines(rows_KD: Tensor) -> Tensor:
    """Return, for each unit row, its largest cosine with another, [K], a block at a time."""
    largest = []
    for first, block in zip(range(0, len(rows_KD), _BLOCK), rows_KD.split(_BLOCK), strict=True):
        cosines = block @ rows_KD.T
        cosines[torch.arange(len(block)), torch.arange(first, first + len(block))] = -2
        largest.append(cosines.max(dim=1).values)
    return torch.cat(largest)


@torch.no_grad()
def _meta_sae(rows_KD: Tensor, config: RedundancyConfig) -> tuple[int, float, float]:
    """Return the width of a small BatchTopK SAE trained on decoder rows, what it explains of them, and its L0."""
    n, d_model = rows_KD.shape
    width = max(config.meta_k, round(config.meta_ratio * n))
    if (rows_KD == rows_KD[0]).all():
        return width, math.nan, math.nan  # there is nothing to explain
    batch = min(config.meta_batch, n)
    recipe = TrainConfig(
        tokens=config.meta_steps * batch,
        batch_size=batch,
        lr=config.meta_lr,
        seed=config.seed,
        device="cpu",
        collapse_fve=-1.0,
    )
    with tempfile.TemporaryDirectory() as directory, torch.enable_grad():
        train(SAEConfig(d_model, width, config.meta_k, (width,)), rows_KD, Path(directory), recipe)
        sae = SAE.load(directory)
    explained = VarianceExplained(d_model)
    fired = 0
    for block in rows_KD.split(_BLOCK):
        f = sae.encode(block)
        explained.add(block, sae.decode(f))
        fired += int((f > 0).sum())
    return width, explained.fractions()[0], fired / n
