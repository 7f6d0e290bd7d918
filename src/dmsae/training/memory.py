"""How much memory training takes, by a model of what is allocated; `benchmarks/memory.py` holds it against the process.

Weights, gradients and both Adam moments stay for the whole training, for every SAE that trains on the same stream. What
a step needs besides is freed after it, and SAEs take their steps one after the other, so it counts once.
"""

from collections.abc import Sequence
from typing import NamedTuple

from dmsae.sae.batch_topk import BLOCK_ELEMENTS, DENSE_ELEMENTS, PRUNE_AT
from dmsae.sae.config import SAEConfig
from dmsae.sae.sparse import GRADIENT_ELEMENTS
from dmsae.training.mesh import MeshConfig

_LEARNED = 16
"""Bytes of a learned number: the weight, its gradient, two moments."""
_ENTRY = 12
"""Bytes of an entry that may survive selection: latent, token, value."""
_FOUND = 40
"""Bytes of an entry of a block while it is looked for: place and row (int64), latent, token, its value twice."""
_SORTED = 44
"""Bytes of a survivor while survivors are sorted by token: keys, order (int64), and both again as they are taken."""


class TrainingMemory(NamedTuple):
    """Bytes of one rank during training, besides what the process has at its start."""

    kept: int
    """Weights, gradients, Adam state and counters of all SAEs."""
    step: int
    """What the step of the largest of them needs besides."""
    stream: int
    """Blocks of stored activations that are read ahead; in the memory of the host, also beside a GPU."""
    checkpoint: int
    """Two copies of the largest tensor, between steps, while a mesh writes a checkpoint; in the memory of the host."""
    shared: int
    """Stretches of other ranks' gradients, which a rank on a CPU adds up: part of its size, but others' memory."""

    @property
    def device(self) -> int:
        """Bytes where the SAEs are, if that is a GPU."""
        return self.kept + self.step

    @property
    def process(self) -> int:
        """Bytes of a rank that trains on a CPU; what a step has freed is seldom of use to a checkpoint."""
        return self.kept + self.step + self.checkpoint + self.stream + self.shared


def training_memory(
    saes: Sequence[SAEConfig], batch_size: int, mesh: MeshConfig, block_bytes: int = 0
) -> TrainingMemory:
    """Return what one rank of a mesh needs to train SAEs together, from a store whose blocks have so many bytes."""
    kept = sum(kept_bytes(sae, mesh.latents) for sae in saes)
    step = max((step_bytes(sae, batch_size // mesh.data, mesh.latents) for sae in saes), default=0)
    largest = max((4 * (sae.width // mesh.latents) * sae.d_model for sae in saes), default=0)
    checkpoint = 2 * largest if mesh.size > 1 else 0
    gradients = sum(4 * learned(sae, mesh.latents) for sae in saes) if mesh.share_memory else 0
    return TrainingMemory(kept, step, 2 * block_bytes, checkpoint, gradients * (mesh.data - 1) // mesh.data)


def kept_bytes(sae: SAEConfig, n_latents: int = 1) -> int:
    """Return what an SAE keeps between steps, on each of the ranks that share its latents."""
    width = sae.width // n_latents
    frozen = (sae.n_core * sae.d_model + sae.n_detectors) // n_latents
    counted = (4 + 8) * width  # a threshold and a count of idle tokens for each latent
    return _LEARNED * learned(sae, n_latents) + 4 * frozen + counted


def learned(sae: SAEConfig, n_latents: int = 1) -> int:
    """Return how many numbers of an SAE are learned, on each of the ranks that share its latents."""
    width, n_core, n_detectors = (n // n_latents for n in (sae.width, sae.n_core, sae.n_detectors))
    return (2 * width - n_core) * sae.d_model + width - n_detectors + sae.d_model


def step_bytes(sae: SAEConfig, n_tokens: int, n_latents: int = 1) -> int:
    """Return what a step allocates at most: the batch, its residuals, a block of pre-activations, candidates."""
    rows = sae.width // n_latents
    batch = 4 * n_tokens * sae.d_model
    # A block in float32, or its upper bounds and the rows that they are of in bfloat16; a flag for each entry; before
    # there is a threshold to start from, half of a piece's entries.
    block = (4 + 1) * min(BLOCK_ELEMENTS, rows * n_tokens) + _FOUND // 2 * min(DENSE_ELEMENTS, rows * n_tokens)
    survivors = min(sae.k_selected, sae.width) * n_tokens // n_latents
    candidates = min(PRUNE_AT * survivors, rows * n_tokens) * _ENTRY
    core = 2 * 4 * n_tokens * (sae.n_dense // n_latents)
    gradients = 3 * 4 * min(GRADIENT_ELEMENTS, rows * sae.d_model)
    # First the batch is scanned, raw and centred, and in bfloat16 for a short list; then come what was selected,
    # residuals and gradients.
    scan = 2 * batch + batch // 2 + block + 2 * candidates
    return core + max(scan, (2 + len(sae.prefixes)) * batch + _SORTED * survivors + gradients)


def whole_bytes(sae: SAEConfig, n_tokens: int) -> int:
    """Return what it takes to score a trained SAE on so many tokens at a time: every rank loads the whole of it."""
    return saved_bytes(sae) + step_bytes(sae, n_tokens)


def saved_bytes(sae: SAEConfig) -> int:
    """Return the size of an SAE's weights, biases and thresholds, in memory and in its file."""
    return 4 * (2 * sae.d_model + 2) * sae.width


def fitting_together(saes: Sequence[SAEConfig], batch_size: int, mesh: MeshConfig, available: int) -> int:
    """Return how many of some SAEs, in their order, can be trained together in so many bytes; at least 1."""
    for n in range(len(saes), 1, -1):
        passes = [saes[start : start + n] for start in range(0, len(saes), n)]
        if all(training_memory(some, batch_size, mesh).device <= available for some in passes):
            return n
    return 1
