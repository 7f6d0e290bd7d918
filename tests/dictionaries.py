"""Dictionaries whose scores are known: one that keeps everything, one that keeps nothing but a constant."""

import torch
from torch import Tensor

from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE


@torch.no_grad()
def identity(d_model: int) -> SAE:
    """Return an SAE that reconstructs every activation to the bit, from both signs of each coordinate."""
    sae = SAE(SAEConfig(d_model, 2 * d_model, d_model, (2 * d_model,)))
    both = torch.cat([torch.eye(d_model), -torch.eye(d_model)])
    sae.W_enc_noncore.copy_(both)
    sae.W_dec.copy_(both)
    return sae.requires_grad_(False)


@torch.no_grad()
def constant(value_D: Tensor) -> SAE:
    """Return an SAE that never fires, and so reconstructs everything as one constant."""
    sae = SAE(SAEConfig(len(value_D), 4, 1, (2, 4)))
    sae.W_dec.copy_(torch.nn.functional.normalize(torch.ones_like(sae.W_dec)))
    sae.threshold.fill_(1.0)
    sae.b_dec.copy_(value_D)
    return sae.requires_grad_(False)


def random_sae(config: SAEConfig, seed: int = 0, threshold: float = 0.0) -> SAE:
    """Return an SAE as it is before training, with one threshold."""
    draws = torch.Generator().manual_seed(seed)
    rows = torch.randn(config.n_core, config.d_model, generator=draws) if config.n_core else None
    sae = SAE.init(config, draws, rows).requires_grad_(False)
    sae.set_threshold_(threshold)
    return sae
