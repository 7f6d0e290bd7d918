"""Held-out figures, compared with the same sums written out."""

from pathlib import Path

import pytest
import torch

from dmsae.activations.splits import Split
from dmsae.activations.store import StoreWriter
from dmsae.disk.layout import shard_file
from dmsae.evaluation.fidelity import Half, fidelity, kept_fidelity
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
    assert figures.fve == figures.fve_prefixes[-1] == pytest.approx(1 - float(error), abs=1e-5)
    smallest = (x - sae.decode(f, prefix=0).detach()).square().sum() / (x - x.mean(0)).square().sum()
    assert figures.fve_prefixes == pytest.approx([1 - float(smallest), 1 - float(error)], abs=1e-5)
    assert figures.l0_core == pytest.approx(float((f[:, :5] > 0).sum() / len(x)))
    assert figures.l0_noncore == pytest.approx(float((f[:, 5:] > 0).sum() / len(x)))


def test_the_whole_held_out_split_counts(tmp_path: Path) -> None:
    """Rows that come late are unlike the others, and there are more than any one batch or limit would take in."""
    writer = StoreWriter(tmp_path / "store", REQUEST)
    x = torch.randn(20_000, 2, generator=torch.Generator().manual_seed(0))
    x[16_384:] += 50
    writer.add(shard_file(Split.HELDOUT, 0), {"x": x}, {})
    sae = SAE(SAEConfig(d_model=2, width=4, k=1, prefixes=(2, 4)))  # reconstructs nothing: explains −mean²/variance
    figures = fidelity(sae, writer.finish(2))
    assert figures is not None
    assert figures.n_tokens == len(x)
    expected = 1 - float(x.square().sum() / (x - x.mean(0)).square().sum())
    assert figures.fve_prefixes == pytest.approx([expected, expected], rel=1e-5)


def test_halves_are_the_whole_and_kept_apart(tmp_path: Path) -> None:
    store = planted_store(tmp_path / "store").store
    sae = SAE.init(SAEConfig(d_model=store.d_model, width=32, k=4, prefixes=(8, 32)), torch.Generator().manual_seed(0))
    sae.save(tmp_path / "sae")
    x = store.heldout()
    for half, rows in ((Half.FIRST, x[: len(x) // 2]), (Half.SECOND, x[len(x) // 2 :])):
        figures = kept_fidelity(tmp_path / "sae", store, half=half)
        assert figures is not None
        assert figures.n_tokens == len(rows)
        explained = 1 - (rows - sae(rows).detach()).square().sum() / (rows - rows.mean(0)).square().sum()
        assert figures.fve == pytest.approx(float(explained), abs=1e-4)
        assert kept_fidelity(tmp_path / "sae", store, half=half) == figures
    whole = kept_fidelity(tmp_path / "sae", store)
    assert whole is not None
    assert whole.n_tokens == len(x)


def test_figures_are_measured_once_for_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = (planted_store(tmp_path / name).store for name in ("store", "other"))
    SAE.init(SAEConfig(32, 64, 4, (16, 64)), torch.Generator().manual_seed(0)).save(tmp_path / "sae")
    first = kept_fidelity(tmp_path / "sae", store)
    assert first == fidelity(SAE.load(tmp_path / "sae"), store)
    monkeypatch.setattr("dmsae.evaluation.fidelity.fidelity", lambda *_: None)
    assert kept_fidelity(tmp_path / "sae", store) == first
    assert kept_fidelity(tmp_path / "sae", other) is None, "figures of one store were taken for those of another"


def test_a_store_without_held_out_rows_has_no_figures(tmp_path: Path) -> None:
    sae = SAE(SAEConfig(d_model=2, width=4, k=1, prefixes=(4,)))
    assert fidelity(sae, StoreWriter(tmp_path / "store", REQUEST).finish(2)) is None
