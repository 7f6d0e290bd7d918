"""The model of memory against what an SAE really holds, byte by byte."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dmsae.sae.config import CoreMode, SAEConfig
from dmsae.sae.detectors import Detectors
from dmsae.training.config import TrainConfig
from dmsae.training.learner import Learner, SAESpec
from dmsae.training.memory import fitting_together, kept_bytes, step_bytes, training_memory
from dmsae.training.mesh import MeshConfig

ALONE = MeshConfig()


@pytest.mark.parametrize("mode", [None, *CoreMode], ids=str)
def test_what_is_kept_is_counted_to_the_byte(mode: CoreMode | None) -> None:
    n_core, d_model, width = 6, 16, 64
    core = mode.core(n_core, 3) if mode else None
    rows = torch.randn(n_core, d_model) if mode else None
    detectors = Detectors(torch.zeros(n_core), torch.ones(n_core)) if mode is CoreMode.DETECTOR else None
    config = SAEConfig(d_model, width, 4, (22, width), core)
    train = TrainConfig(tokens=256, batch_size=64, device="cpu")
    learner = Learner(SAESpec("sae", config, rows, detectors), train, train.schedule(), torch.zeros(d_model))
    learner.advance(0, torch.randn(64, d_model), 1.0)
    held = dict(learner.tensors())
    held |= {f"grad/{name}": p.grad for name, p in learner.sae.named_parameters() if p.grad is not None}
    counted = {name: tensor for name, tensor in held.items() if not name.endswith("/step")}
    assert kept_bytes(config) == sum(tensor.nbytes for tensor in counted.values())


def test_ranks_that_share_the_latents_share_what_is_kept() -> None:
    config = SAEConfig(64, 4096, 32, (512, 4096))
    assert kept_bytes(config, 4) == pytest.approx(kept_bytes(config) / 4, rel=0.01)
    whole, part = (training_memory([config], 2048, mesh).device for mesh in (ALONE, MeshConfig(latents=4)))
    assert part < whole
    assert training_memory([config], 2048, MeshConfig(data=4)).step < training_memory([config], 2048, ALONE).step


@given(st.lists(st.sampled_from([256, 1024, 4096]), min_size=1, max_size=8), st.integers(10**5, 10**9))
def test_passes_fit_whenever_one_sae_does(widths: list[int], available: int) -> None:
    saes = [SAEConfig(64, width, 8, (64, width)) for width in widths]
    n = fitting_together(saes, 512, ALONE, available)
    assert 1 <= n <= len(saes)
    largest = max(training_memory(saes[start : start + n], 512, ALONE).device for start in range(0, len(saes), n))
    alone = max(kept_bytes(sae) + step_bytes(sae, 512) for sae in saes)
    assert largest <= max(available, alone)
