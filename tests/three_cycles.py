"""Three cycles of a distillation by hand, for the tests of cores: SAEs with random rows, and scores that are given."""

from dataclasses import replace
from typing import NamedTuple

import torch

from dmsae.cores.attribution import Attribution
from dmsae.cores.core import Core, Provenance
from dmsae.cores.selection import next_core
from dmsae.sae.config import DenseCore, SAEConfig
from dmsae.sae.sae import SAE
from planted import MODEL

WIDTH, N_PREFIX, D_MODEL = 12, 4, 5
PROVENANCE = Provenance(replace(MODEL, hook="layers.8"), "0123", {"seed": 0})


class Cycles(NamedTuple):
    cores: list[Core]
    saes: list[SAE]


def trained(core: Core | None, seed: int) -> SAE:
    """Return an SAE as a cycle leaves it: the core's rows untouched, all else new."""
    n_core = len(core) if core else 0
    dense = DenseCore(n_core, k_noncore=2) if n_core else None
    config = SAEConfig(D_MODEL, WIDTH, 2, (n_core + N_PREFIX, WIDTH), dense)
    sae = SAE.init(config, torch.Generator().manual_seed(seed), core.encoder_CD if core else None)
    torch.nn.init.normal_(sae.W_enc_noncore, generator=torch.Generator().manual_seed(seed + 100))
    return sae


def scored(scores: list[float]) -> Attribution:
    """Return the scores of a candidate pool."""
    return Attribution(
        torch.arange(len(scores)),
        torch.tensor(scores, dtype=torch.float64),
        torch.ones(len(scores), dtype=torch.float64),
        n_positions=10,
        facts={},
    )


def run_cycles(scores_by_cycle: list[list[float]], seed: int = 1) -> Cycles:
    """Return the cores and SAEs of cycles whose scores are given; every positive score is selected."""
    cycles = Cycles([], [])
    for cycle, scores in enumerate(scores_by_cycle):
        previous = cycles.cores[-1] if cycles.cores else None
        cycles.saes.append(trained(previous, seed + cycle))
        cycles.cores.append(next_core(previous, cycles.saes[-1], scored(scores), cycle, 1.0, PROVENANCE))
    return cycles


def three_cycles() -> Cycles:
    """Return three cycles with a latent of each fate.

    Cycle 0 selects its latents 2 and 0. Cycle 1 keeps the first of them and selects its own latent 3. Cycle 2 keeps
    that one, drops the other, and selects its own latent 4, which is the feature that cycle 1 had dropped.
    """
    cores, saes = run_cycles([[5, 0, 9, 0], [7, 0, 0, 8, 0, 0]])
    third = trained(cores[1], 3)
    with torch.no_grad():
        third.W_enc_noncore[2] = cores[0].encoder_CD[1]
    last = next_core(cores[1], third, scored([6, 0, 0, 0, 3, 0]), 2, 1.0, PROVENANCE)
    return Cycles([*cores, last], [*saes, third])
