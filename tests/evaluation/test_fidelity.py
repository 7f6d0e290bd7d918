"""Held-out figures, compared with the same sums written out."""

from pathlib import Path

import pytest
import torch

from dmsae.activations.splits import Split
from dmsae.activations.store import StoreWriter
from dmsae.evaluation.fidelity import fidelity
from dmsae.sae.config import DenseCore, SAEConfig
from dmsae.sae.sae import SAE
from planted import REQUEST, planted_store


def test_figures_are_those_of_the_held_out_rows(tmp_path: Path) -> None:
    store = planted_store(tmp_path / "store").store
    generator = torch.Generator().manual_seed(0)
    config = SAEConfig(d_model=32, width=64, k=4, prefixes=(16, 64), core=DenseCore(5, k_noncore=4))
    sae = SAE.init(config, generator, torch.randn(5, 32, generator=generator))
    sae.set_threshold_(0.2)
    x = torch.cat([batch["x"] for batch in store.batches(Split.HELDOUT, 7)])
    f = sae.encode(x).detach()
    error = (x - sae.decode(f).detach()).square().sum() / (x - x.mean(0)).square().sum()
    figures = fidelity(sae, store)
    assert figures is not None
    assert figures.n_tokens == len(x)
    assert figures.fve == pytest.approx(1 - float(error), abs=1e-5)
    assert figures.l0_core == pytest.approx(float((f[:, :5] > 0).sum() / len(x)))
    assert figures.l0_noncore == pytest.approx(float((f[:, 5:] > 0).sum() / len(x)))


def test_a_store_without_held_out_rows_has_no_figures(tmp_path: Path) -> None:
    sae = SAE(SAEConfig(d_model=2, width=4, k=1, prefixes=(4,)))
    assert fidelity(sae, StoreWriter(tmp_path / "store", REQUEST).finish(2)) is None
