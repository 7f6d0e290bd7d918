"""One batch through an SAE of which each rank has its part, and the parts put together again."""

import math
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

import dmsae.sae.shard
from dmsae.sae.batch_topk import select_top
from dmsae.sae.comms import Comms
from dmsae.sae.config import SAEConfig
from dmsae.sae.detectors import Detectors
from dmsae.sae.objective import BatchResult, Objective, backward_
from dmsae.sae.sae import SAE
from dmsae.sae.selection import keep_largest_of_rows_, nth_largest
from dmsae.sae.shard import gathered, owned_rows, shard
from dmsae.sae.variance import variance


class Case(NamedTuple):
    """One batch through one SAE."""

    config: SAEConfig
    n_tokens: int
    seed: int
    ties: bool
    """Whether all pre-activations are small whole numbers."""
    few: bool
    """Whether most of them are negative."""
    dead: bool
    warm_start: float | None

    def sae(self) -> SAE:
        generator = torch.Generator().manual_seed(self.seed)
        c, d = self.config.n_core, self.config.d_model
        detectors = None
        if self.config.n_detectors:
            detectors = Detectors(torch.randn(c, generator=generator), torch.rand(c, generator=generator))
        rows = torch.randn(c, d, generator=generator) if c else None
        sae = SAE.init(self.config, generator, rows, detectors).double()
        with torch.no_grad():
            if self.ties:
                sae.W_enc_noncore.copy_(torch.randint(-1, 2, sae.W_enc_noncore.shape, generator=generator))
                sae.W_enc_core.copy_(torch.randint(-1, 2, sae.W_enc_core.shape, generator=generator))
            else:
                sae.b_enc.normal_(std=0.1, generator=generator)
                sae.b_dec.normal_(std=0.1, generator=generator)
            sae.b_enc.sub_(3.0 if self.few else 0.0)
        return sae

    def x(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        shape = (self.n_tokens, self.config.d_model)
        if self.ties:
            return torch.randint(-1, 2, shape, generator=generator).double()
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def dead_K(self) -> Tensor | None:
        generator = torch.Generator().manual_seed(self.seed + 2)
        return torch.rand(self.config.width, generator=generator) < 0.7 if self.dead else None


class Outcome(NamedTuple):
    result: BatchResult
    grads: dict[str, Tensor]
    selected: set[tuple[int, int]]
    """(latent, token) in the whole SAE and the whole batch."""
    n_owned: int


def step(comms: Comms, case: Case) -> Outcome:
    part = shard(case.sae(), comms.latents)
    n_local = case.n_tokens // comms.data.size
    x = case.x()[comms.data.rank * n_local :][:n_local]
    dead = case.dead_K()
    if dead is not None:
        dead = dead[owned_rows(0, comms.latents.rank, comms.latents.size)]
    active = part.train_codes(x, case.warm_start, comms).active
    latents = active.latents_S * comms.latents.size + comms.latents.rank
    tokens = active.tokens_S + comms.data.rank * n_local
    result = backward_(part, x, Objective(), dead, case.warm_start, comms)
    grads = {name: parameter.grad for name, parameter in part.named_parameters() if parameter.grad is not None}
    return Outcome(result, grads, set(zip(latents.tolist(), tokens.tolist(), strict=True)), part.config.width)


def short_listed(comms: Comms, encoder_KD: Tensor, x_BD: Tensor, n_keep: int) -> dict[tuple[int, int], float]:
    """Return what a rank keeps of a batch, by (latent, token) in the whole of it, where bfloat16 is fast."""
    rows = encoder_KD[owned_rows(0, comms.latents.rank, comms.latents.size)].contiguous()
    n_local = len(x_BD) // comms.data.size
    mine_BD = x_BD[comms.data.rank * n_local :][:n_local]
    with patch("dmsae.sae.shortlist.multiplies_bfloat16", lambda: True):
        active = select_top(mine_BD, [rows], torch.zeros(len(rows)), n_keep, comms=comms)
    latents = (active.latents_S * comms.latents.size + comms.latents.rank).tolist()
    tokens = (active.tokens_S + comms.data.rank * n_local).tolist()
    return dict(zip(zip(latents, tokens, strict=True), active.values_S.tolist(), strict=True))


def cut(comms: Comms, values: list[Tensor], n: int) -> float:
    return nth_largest(values[comms.both.rank], n, comms.both)


def largest_of_rows(comms: Comms, parts: list[Tensor], n: int) -> Tensor:
    return keep_largest_of_rows_(parts[comms.latents.rank], n, comms.latents)


def there_and_back(comms: Comms, case: Case) -> tuple[int, dict[str, Tensor], float]:
    sae = case.sae()
    part = shard(sae, comms.latents)
    x = case.x()
    n = len(x) // comms.data.size
    whole = in_blocks(part, sae.config, comms, 16)
    return part.config.n_core, whole, variance(x[comms.data.rank * n :][:n], comms.data)


def in_blocks(part: SAE, config: SAEConfig, comms: Comms, elements: int) -> dict[str, Tensor]:
    """Return the tensors of a whole SAE as it is saved, put together from blocks of few elements."""
    with patch.object(dmsae.sae.shard, "_BLOCK_ELEMENTS", elements):
        stream = gathered(part, config, comms.latents)
        rows = torch.cat([block.detach().flatten() for block in stream.blocks])
    names = sorted(stream.shapes)
    flat = rows.split([math.prod(stream.shapes[name]) for name in names])
    return {name: one.view(stream.shapes[name]) for name, one in zip(names, flat, strict=True)}
