"""How latents fire, compared with the codes counted by hand."""

from pathlib import Path

import pytest
import torch

from dictionaries import constant, identity, random_sae
from dmsae.activations.splits import Split
from dmsae.activations.store import Store, StoreWriter
from dmsae.disk.layout import shard_file
from dmsae.errors import ConfigError, StoreError
from dmsae.evaluation.activity import ActivityConfig, activity, rate_edges
from dmsae.evaluation.fidelity import FidelityConfig, fidelity, measure_fidelity
from dmsae.evaluation.subject import Subject
from dmsae.sae.config import DenseCore, DetectorCore, SAEConfig, SparseCore
from dmsae.sae.detectors import Detectors
from dmsae.sae.sae import SAE
from planted import REQUEST

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    writer = StoreWriter(tmp_path / "store", REQUEST)
    x = torch.randn(3000, 8, generator=torch.Generator().manual_seed(0)) + torch.arange(8)
    writer.add(shard_file(Split.HELDOUT, 0), {"x": x}, {})
    return writer.finish(8)


@pytest.mark.parametrize("core", [None, DenseCore(3, 4), SparseCore(3), DetectorCore(3, 4)], ids=str)
def test_figures_are_those_of_the_codes(core: DenseCore | SparseCore | DetectorCore | None, store: Store) -> None:
    config = SAEConfig(d_model=8, width=24, k=4, prefixes=(8, 24), core=core)
    rows = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)) if core else None
    detectors = Detectors(torch.zeros(3), torch.full((3,), 0.5)) if isinstance(core, DetectorCore) else None
    sae = SAE.init(config, torch.Generator().manual_seed(2), rows, detectors).requires_grad_(False)
    sae.set_threshold_(1.0)
    sae.b_enc[-1] = -1e6
    sae.b_enc[-2] = 1e6
    x = store.heldout()
    rates = (sae.encode(x) > 0).double().mean(0)
    (figures,) = activity([Subject("sae", sae)], store, ActivityConfig(batch_size=3000))
    assert figures.n_tokens == 3000
    parts = (rates, rates[: config.n_core], rates[config.n_core :])
    assert tuple(figures.l0) == pytest.approx([float(part.sum()) for part in parts])
    assert (figures.n_dead, figures.n_always_on) == (int((rates == 0).sum()), int((rates > 0.5).sum()))
    assert figures.n_dead >= 1 <= figures.n_always_on
    assert figures.n_always_on_core == int((rates[: config.n_core] > 0.5).sum())
    assert sum(figures.rate_counts) == 24 - figures.n_dead
    assert figures.rate_counts[-1] == int((rates > 10**-0.5).sum())
    assert figures.l0_batchtopk is not None
    assert figures.l0_batchtopk.total == pytest.approx(4 + (figures.l0_batchtopk.core if config.n_dense else 0))
    (measured,) = measure_fidelity([Subject("sae", sae)], store, FidelityConfig())
    assert (measured.l0, measured.l0_core, measured.l0_noncore) == pytest.approx(tuple(figures.l0))


def test_a_subject_that_is_no_sae_has_no_batchtopk(store: Store) -> None:
    class Plain:
        def __init__(self, sae: SAE) -> None:
            self.config, self.W_enc, self.W_dec, self.b_dec = sae.config, sae.W_enc, sae.W_dec, sae.b_dec
            self.encode, self.decode = sae.encode, sae.decode

    sae = random_sae(SAEConfig(8, 24, 4, (24,)))
    ours, plain = activity([Subject("sae", sae), Subject("plain", Plain(sae))], store, ActivityConfig())
    assert plain == ours._replace(l0_batchtopk=None)


def test_the_mean_explains_nothing_and_the_identity_everything(store: Store) -> None:
    mean = store.heldout().double().mean(0)
    subjects = [Subject("mean", constant(mean.float())), Subject("identity", identity(8))]
    (nothing, everything), none = measure_fidelity(subjects, store, FidelityConfig()), constant(torch.zeros(8))
    assert nothing.fve_prefixes == pytest.approx([0, 0], abs=1e-6)
    assert nothing.l0 == 0
    assert (everything.fve, everything.cosine) == pytest.approx((1, 1))
    assert everything.l0 == pytest.approx(8)
    (zero,) = measure_fidelity([Subject("zero", none)], store, FidelityConfig())
    assert (zero.cosine, zero.l0) == (0, 0)
    assert zero.fve < 0


def test_the_measure_and_the_public_function_agree(store: Store) -> None:
    sae = random_sae(SAEConfig(8, 24, 4, (8, 24), DenseCore(3, 4)), threshold=0.4)
    (measured,), figures = measure_fidelity([Subject("sae", sae)], store, FidelityConfig()), fidelity(sae, store)
    assert figures is not None
    assert figures == tuple(measured._asdict()[name] for name in figures._fields)
    x, reconstruction = store.heldout(), sae(store.heldout())
    assert measured.cosine == pytest.approx(float(torch.cosine_similarity(x, reconstruction).mean()), abs=1e-6)


def test_rates_are_counted_in_even_bins_of_log_rate() -> None:
    edges = rate_edges(2)
    assert len(edges) == 13
    assert edges[-1] == 1
    assert torch.allclose(edges[1:] / edges[:-1], torch.tensor(10**0.5, dtype=torch.float64))


def test_what_cannot_be_measured_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds activations of width 8; wide takes 9"):
        activity([Subject("wide", identity(9))], store, ActivityConfig())
    empty = StoreWriter(tmp_path / "empty", REQUEST).finish(8)
    with pytest.raises(StoreError, match="no held-out activations"):
        measure_fidelity([Subject("sae", identity(8))], empty, FidelityConfig())
