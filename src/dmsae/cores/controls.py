"""Controls: cores of equal size that nothing was distilled into."""

from dataclasses import replace
from enum import StrEnum

import torch

from dmsae.cores.core import Core, Lineage
from dmsae.seeds import generator


class RandomKind(StrEnum):
    """Which norms the rows of a random core have."""

    UNIT = "unit"
    """Unit norm."""
    NORM_MATCHED = "norm_matched"
    """Each row has the norm of the row that it replaces."""


def random_core(like: Core, kind: RandomKind, seed: int) -> Core:
    """Return a control: rows in random directions, as many as in `like`, selected by nothing.

    >>> from dmsae.cores.controls import RandomKind
    >>> core = dmsae.Core.load(run)
    >>> control = dmsae.random_core(core, RandomKind.NORM_MATCHED, seed=0)
    >>> len(control) == len(core)
    True
    """
    rows = torch.randn(like.encoder_CD.shape, generator=generator(seed, "random core"), dtype=torch.float64)
    rows /= rows.norm(dim=1, keepdim=True)
    if kind is RandomKind.NORM_MATCHED:
        rows *= like.encoder_CD.double().norm(dim=1, keepdim=True)
    return replace(
        like,
        encoder_CD=rows.float(),
        scores_C=torch.zeros(len(like), dtype=torch.float64),
        slots_C=torch.arange(len(like)),
        lineage=tuple(Lineage(like.cycle, i, ()) for i in range(len(like))),
        provenance=replace(
            like.provenance, config={"random_core": {"kind": str(kind), "seed": seed, "like": like.digest()}}
        ),
    )
