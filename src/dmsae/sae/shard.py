"""The part of an SAE that one rank of a mesh owns: every n-th latent, from its own place on.

Each rank has its share of the core and of every prefix, in the order of the whole SAE. A tensor that begins at latent s
of the SAE (encoder rows of non-core latents begin after the core) has the rank's rows at (rank − s) mod n, and every
n-th from there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import chain

import torch
from torch import Tensor

from dmsae.disk.tensor_stream import TensorStream
from dmsae.ranks import Axis
from dmsae.sae.config import DenseCore, DetectorCore, SAEConfig
from dmsae.sae.sae import SAE, file_shapes

_LARGE = ("W_enc_noncore", "W_dec")
"""The tensors that need not fit into the memory of one rank when an SAE is saved."""
_BLOCK_ELEMENTS = 1 << 21
"""How much of them is gathered at a time."""


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
def gathered(part: SAE, config: SAEConfig, axis: Axis) -> TensorStream:
    """Return the whole SAE as it is saved, from the parts that ranks own; `config` is that of the whole.

    All ranks of the axis must go through the stream. Only a few rows of the large tensors are in memory at a time.
    """
    with torch.device("meta"):
        whole = SAE(config)  # of shapes; what is small gets its values
    starts, n_rows = sharded_tensors(config), {name: len(tensor) for name, tensor in whole.state_dict().items()}
    rows = {
        name: _whole_rows(tensor, n_rows[name], starts.get(name), axis) for name, tensor in part.state_dict().items()
    }
    small = {name: torch.cat(list(blocks)) for name, blocks in rows.items() if name not in _LARGE}
    whole.load_state_dict(small, strict=False, assign=True)
    blocks = {"W_enc": chain([whole.W_enc_core], rows["W_enc_noncore"]), "W_dec": rows["W_dec"]}
    shapes = file_shapes(config)
    one = small | {"b_enc": whole.encoder_bias}
    return TensorStream(shapes, chain(*(blocks[name] if name in blocks else [one[name]] for name in sorted(shapes))))


def _whole_rows(mine: Tensor, n_rows: int, start: int | None, axis: Axis) -> Iterator[Tensor]:
    """Yield the rows of a whole tensor in order, a few at a time, from those that ranks own.

    `start` is the latent at which the tensor begins; None for one that every rank has whole.
    """
    if start is None:
        yield mine
        return
    at_once = max(1, _BLOCK_ELEMENTS // mine.shape[1:].numel() // axis.size)  # of each rank
    for first in range(0, max(1, n_rows), at_once * axis.size):
        parts = axis.gather(mine[first // axis.size :][:at_once])
        rows = mine.new_empty(sum(map(len, parts)), *mine.shape[1:])
        for rank, part in enumerate(parts):
            rows[owned_rows(start, rank, axis.size)] = part
        yield rows
