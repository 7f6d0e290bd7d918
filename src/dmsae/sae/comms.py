"""Where the ranks of a mesh of data × latents talk. One process is the mesh of one rank, `ALONE`.

A rank (d, l) of a mesh of `n_d` × `n_l` sees the tokens d·B/n_d … (d + 1)·B/n_d − 1 of every batch and owns the latents
l, l + n_l, l + 2·n_l, …: their encoder and decoder rows, gradients and Adam state. Every n_l-th latent rather than a
range of them, so that each rank has its share of the core and of every prefix. b_dec is on every rank.

Of a store, ranks (d, ·) read the shards d, d + n_d, … of every epoch and no others; they exchange the rows of a batch.

What one step exchanges (b = B/n_d tokens, K/n_l latents, float32; `over` is the axis along which ranks talk):

    rows           over data     of the batch, gathered, when they come from a store or live:              4·B·D
    selection      over both     the k·B-th largest pre-activation of the union by a radix search: 37 kB of counts, and
                                 8 bytes for each entry that equals it, when not all of those survive
    parts          over latents  what the rank's latents add to each prefix's reconstruction, summed:      4·G·b·D
    auxiliary      over latents  each token's largest dead latents, gathered, only while there are dead ones:
                                 4·b·min(D/2, dead), and their reconstruction, summed: 4·b·D
    gradients      over data     of the rank's latents, summed:                                        4·(2D + 1)·K/n_l
    firing counts  over data     4·K/n_l
    b_dec          over both     its gradient, summed: 4·D
    scalars        over both     errors, norms, variances, thresholds, L0: below 1 kB

These are the sizes of what is summed or gathered; `batch_bytes` counts the rows, `step_bytes` everything else. Ranks on
the CPU of one machine sum the gradients in memory that they share (`training/shared_memory.py`) and send none of them;
elsewhere a ring moves 2·(n − 1)/n of each sum and (n − 1) of each gathered part over every rank's wire. Selection is
exact: entries are those of one process, ties included, which go to the lower latent, then to the earlier token.
Everything else is the same up to rounding.

Not exact to the last entry: of *equal* positive activations at the cut of the auxiliary loss's top D/2, one process
keeps those that `torch.topk` happens to keep, a mesh those of the lower rank.
"""

import math
from typing import NamedTuple

from dmsae.ranks import ONE, Axis


class Comms(NamedTuple):
    """A rank's place in a mesh."""

    data: Axis
    """The ranks with the same latents."""
    latents: Axis
    """The ranks with the same tokens."""
    both: Axis
    """All ranks."""

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes and reports."""
        return self.both.rank == 0


ALONE = Comms(ONE, ONE, ONE)
"""One process."""


def batch_bytes(n_tokens: int, d_model: int, n_data: int, n_mixed: int) -> int:
    """Return how much one rank sends for a batch whose rows are of `n_mixed` shards, read by different data ranks.

    All send as many rows as the one with most shards has, around a ring.
    """
    most = math.ceil(n_mixed / n_data) / n_mixed
    return round(4 * n_tokens * most * d_model * (n_data - 1))


def step_bytes(n_tokens: int, d_model: int, width: int, n_prefixes: int, n_data: int, n_latents: int) -> int:
    """Return how much one rank sends in a step without dead latents, when sums go around a ring; float32."""
    n_local, n_owned = n_tokens // n_data, width // n_latents
    over_data = 4 * (2 * d_model + 1) * n_owned + 4 * n_owned
    over_latents = 4 * n_prefixes * n_local * d_model
    over_both = 8 * (2 * 2048 + 512) + 4 * d_model
    sizes = ((over_data, n_data), (over_latents, n_latents), (over_both, n_data * n_latents))
    return sum(round(2 * size * (n - 1) / n) for size, n in sizes)
