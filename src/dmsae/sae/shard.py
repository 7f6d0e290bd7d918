"""The part of an SAE that one rank of a mesh owns: every n-th latent, from its own place on.

Each rank has its share of the core and of every prefix, in the order of the whole SAE. A tensor that begins at latent s
of the SAE (encoder rows of non-core latents begin after the core) has the rank's rows at (rank − s) mod n, and every
n-th from there.
"""

from dataclasses import dataclass, field, fields

import torch

from dmsae.sae.comms import Axis
from dmsae.sae.config import DenseCore, DetectorCore, SAEConfig
from dmsae.sae.sae import SAE


@dataclass(frozen=True, slots=True)
class ShardConfig(SAEConfig):
    """What one rank's part of an SAE is. `width` and `prefixes` count its own latents; `k` and `core` are the SAE's."""

    rank: int = field(kw_only=True)
    n_shards: int = field(kw_only=True)

    def __post_init__(self) -> None:
        """Check nothing: the whole SAE was checked, and a part may well have no core, or nothing of a small prefix."""

    @property
    def n_core(self) -> int:
        """Number of core latents that the rank owns."""
        return n_owned(self.core.n, self.rank, self.n_shards) if self.core else 0

    @property
    def n_dense(self) -> int:
        """Number of its leading latents that bypass BatchTopK."""
        return self.n_core if isinstance(self.core, DenseCore | DetectorCore) else 0

    @property
    def n_detectors(self) -> int:
        """Number of its leading latents that are frozen detectors."""
        return self.n_core if isinstance(self.core, DetectorCore) else 0


def n_owned(n_latents: int, rank: int, n_shards: int) -> int:
    """Return how many of the first `n_latents` latents a rank owns."""
    return (n_latents - rank + n_shards - 1) // n_shards


def owned_rows(start: int, rank: int, n_shards: int) -> slice:
    """Return which rows of a tensor that begins at latent `start` a rank owns."""
    return slice((rank - start) % n_shards, None, n_shards)


def sharded_tensors(config: SAEConfig) -> dict[str, int]:
    """Return the tensors of an SAE that have a row for each latent, with the latent at which each begins."""
    starts = dict.fromkeys(("W_enc_core", "offset", "W_dec", "threshold"), 0)
    return starts | {"W_enc_noncore": config.n_core, "b_enc": config.n_detectors}


def shard_config(config: SAEConfig, axis: Axis) -> SAEConfig:
    """Return what a rank's part of an SAE is."""
    rank, n = axis.rank, axis.size
    whole = {one.name: getattr(config, one.name) for one in fields(SAEConfig)}
    prefixes = tuple(n_owned(size, rank, n) for size in config.prefixes)
    return ShardConfig(**whole | {"width": config.width // n, "prefixes": prefixes}, rank=rank, n_shards=n)


@torch.no_grad()
def shard(sae: SAE, axis: Axis) -> SAE:
    """Return the part of an SAE that a rank owns, as a copy; the SAE itself when there is one rank."""
    if axis.size == 1:
        return sae
    starts = sharded_tensors(sae.config)
    part = SAE(shard_config(sae.config, axis)).to(sae.W_dec.dtype)
    tensors = sae.state_dict()
    for name, start in starts.items():
        tensors[name] = tensors[name][owned_rows(start, axis.rank, axis.size)]
    part.load_state_dict(tensors)
    return part


@torch.no_grad()
def unshard(part: SAE, config: SAEConfig, axis: Axis) -> SAE:
    """Return the whole SAE on every rank, as a copy, from the parts that they own; `config` is that of the whole."""
    starts = sharded_tensors(config)
    whole = SAE(config).to(part.W_dec)
    tensors = whole.state_dict()
    for name, mine in part.state_dict().items():
        if name in starts:
            for rank, rows in enumerate(axis.gather(mine)):
                tensors[name][owned_rows(starts[name], rank, axis.size)] = rows
        else:
            tensors[name].copy_(mine)
    return whole
