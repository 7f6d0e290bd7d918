"""Nulls: they fire as often as the SAE, know nothing, and are the same whenever they are made."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsae.activations.splits import Split
from dmsae.activations.store import Store, StoreWriter
from dmsae.disk.layout import shard_file
from dmsae.errors import ConfigError
from dmsae.evaluation.fidelity import FidelityConfig, FidelityResult, measure_fidelity
from dmsae.evaluation.nulls import (
    NullConfig,
    NullKind,
    NullMaker,
    effective_dimension,
    extreme_value_null,
    permuted_decoder,
)
from dmsae.evaluation.random_firing import RandomFiring, firing
from dmsae.evaluation.ridge import ridge_decoder
from dmsae.evaluation.subject import Subject
from dmsae.sae.config import DenseCore, DetectorCore, SAEConfig, SparseCore
from dmsae.sae.detectors import Detectors
from dmsae.sae.sae import SAE
from planted import REQUEST

pytestmark = pytest.mark.usefixtures("one_thread")
D_MODEL = 16


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Activations around a mean that is not 0, as a language model's are."""
    writer = StoreWriter(tmp_path_factory.mktemp("nulls") / "store", REQUEST)
    made = torch.Generator().manual_seed(0)
    mixing = torch.randn(D_MODEL, D_MODEL, generator=made)
    for split, n in ((Split.TRAIN, 8192), (Split.HELDOUT, 4096)):
        x = torch.randn(n, D_MODEL, generator=made) @ mixing + 3
        writer.add(shard_file(split, 0), {"x": x}, {})
    return writer.finish(D_MODEL)


def sae_with(core: DenseCore | SparseCore | DetectorCore | None, center_input: bool = True) -> SAE:
    config = SAEConfig(D_MODEL, 64, 4, (16, 32, 64), core, center_input)
    made = torch.Generator().manual_seed(1)
    rows = torch.randn(config.n_core, D_MODEL, generator=made) if core else None
    n = config.n_detectors
    detectors = Detectors(torch.zeros(n), torch.full((n,), 4.0)) if n else None
    sae = SAE.init(config, made, rows, detectors).requires_grad_(False)
    sae.b_dec.fill_(2.0)
    sae.set_threshold_(5.0)
    sae.b_enc[config.prefixes[0] :] -= 2.0  # as in a Matryoshka SAE, the first prefix fires more often
    return sae


def figures(sae: SAE, store: Store, kind: NullKind | None) -> FidelityResult:
    dictionary = NullMaker(sae, store).make(kind) if kind else sae
    return measure_fidelity([Subject("", dictionary)], store, FidelityConfig())[0]


@pytest.mark.parametrize("kind", NullKind)
@pytest.mark.parametrize("core", [None, DenseCore(5, 4), SparseCore(5), DetectorCore(5, 4)], ids=str)
def test_a_null_fires_as_often_in_the_core_and_outside(
    core: DenseCore | SparseCore | DetectorCore | None, kind: NullKind, store: Store
) -> None:
    sae = sae_with(core)
    ours, null = figures(sae, store, None), figures(sae, store, kind)
    slack = 0.05 if kind is NullKind.RANDOM_FIRING else 2e-3
    assert null.l0_noncore == pytest.approx(ours.l0_noncore, rel=slack)
    assert null.l0_core == pytest.approx(ours.l0_core, rel=slack)
    assert len(null.fve_prefixes) == 3
    made = NullMaker(sae, store).make(kind)
    for low, high in pairwise((sae.config.n_core, *sae.config.prefixes)):
        theirs, mine = ((one.encode(store.heldout())[:, low:high] > 0).sum() for one in (made, sae))
        assert theirs == pytest.approx(int(mine), rel=slack)
    assert torch.allclose(made.W_dec.norm(dim=1), torch.ones(64), atol=1e-5)
    again = NullMaker(sae, store).make(kind)
    x = store.heldout()[:100]
    assert torch.equal(made.encode(x), again.encode(x))


@pytest.mark.parametrize(("bias", "rate"), [(1e4, 1.0), (7.0, None), (-1e4, 0.0)])
def test_a_core_that_is_on_most_of_the_time_has_a_null_that_is(bias: float, rate: float | None, store: Store) -> None:
    sae = sae_with(DenseCore(5, 4))
    sae.b_enc[:5] = bias
    ours, null = figures(sae, store, None), figures(sae, store, NullKind.UNTRAINED)
    assert rate is None or ours.l0_core == 5 * rate
    assert rate is not None or 3 < ours.l0_core < 5
    assert null.l0_core == pytest.approx(ours.l0_core, rel=2e-3)
    assert null.l0_noncore == pytest.approx(ours.l0_noncore, rel=2e-3)


def test_an_untrained_null_is_tied_and_unlike_the_sae(store: Store) -> None:
    sae = sae_with(DenseCore(5, 4))
    null, other = (NullMaker(sae, store, NullConfig(seed=seed)).make(NullKind.UNTRAINED) for seed in (0, 1))
    assert torch.equal(null.W_enc, null.W_dec)
    assert not torch.equal(null.W_enc, other.W_enc)
    assert float((null.W_dec @ sae.W_dec.T).abs().max()) < 0.99


def test_a_random_encoder_keeps_its_firing_and_gains_a_decoder(store: Store) -> None:
    maker = NullMaker(sae_with(None), store)
    untrained, fitted = maker.make(NullKind.UNTRAINED), maker.make(NullKind.RANDOM_ENCODER)
    x = store.heldout()
    differ = (untrained.encode(x) > 0) != (fitted.encode(x) > 0)
    assert float(differ.double().mean()) < 1e-4, "rounding alone may flip a few"
    before, after = (measure_fidelity([Subject("", d)], store, FidelityConfig())[0].fve for d in (untrained, fitted))
    assert after > max(before, 0) + 0.05
    assert torch.allclose(torch.cosine_similarity(fitted.W_enc, untrained.W_enc), torch.ones(64), atol=1e-5)


def test_the_decoder_is_that_of_least_squares(store: Store) -> None:
    sae = sae_with(None)
    sae.b_enc[7] = -1e6  # never fires
    x = next(store.batches(Split.TRAIN, 3000))["x"]
    W, b = ridge_decoder(sae, x, ridge=0.01)
    f = sae.encode(x).double()
    centred, y = f - f.mean(0), x.double() - x.double().mean(0)
    penalty = 0.01 * float(centred.square().sum()) / 63
    expected = torch.linalg.solve(centred.T @ centred + penalty * torch.eye(64, dtype=torch.float64), centred.T @ y)
    assert torch.allclose(W.double(), expected, atol=1e-4)
    assert torch.equal(W[7], torch.zeros(D_MODEL))
    assert torch.allclose(b.double(), x.double().mean(0) - f.mean(0) @ expected, atol=1e-3)


def test_a_decoder_too_wide_to_fit_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmsae.evaluation.ridge._MAX_WIDTH", 32)
    with pytest.raises(ConfigError, match="Leave out the null random_encoder"):
        ridge_decoder(sae_with(None), store.heldout(), 0.1)


def test_a_permuted_decoder_keeps_every_group_together() -> None:
    sae = sae_with(DenseCore(5, 4))
    null = permuted_decoder(sae)
    assert torch.equal(null.W_enc, sae.W_enc)
    for low, high in ((0, 5), (5, 16), (16, 32), (32, 64)):
        ours, theirs = ({row.numpy().tobytes() for row in one.W_dec[low:high]} for one in (sae, null))
        assert ours == theirs
    assert not torch.equal(null.W_dec, sae.W_dec)
    assert sae.W_dec.data_ptr() != null.W_dec.data_ptr()


def test_random_firing_has_nothing_to_do_with_x(store: Store) -> None:
    sae = sae_with(None)
    activity = firing(sae, store)
    null = RandomFiring(sae, activity)
    x = store.heldout()
    f, ours = null.encode(x), sae.encode(x)
    assert torch.equal(f, null.encode(x))
    assert torch.equal(f[10:12].view(2, 1, 64), null.encode(x[10:12].view(2, 1, D_MODEL)))
    assert torch.equal(f[f > 0], activity.means_K.float().expand_as(f)[f > 0])
    rates = (f > 0).double().mean(0)
    errors = (rates - activity.rates_K) / (activity.rates_K * (1 - activity.rates_K) / len(x)).sqrt()
    assert float(errors[activity.rates_K > 0].abs().max()) < 5, "a rate is off by more than chance"
    on, theirs = (f > 0).double(), (ours > 0).double()
    fires = activity.rates_K > 0.01
    correlations = torch.corrcoef(torch.cat([on[:, fires], theirs[:, fires]], dim=1).T)
    n = int(fires.sum())
    assert float(correlations[:n, n:].abs().max()) < 6 / math.sqrt(len(x)), "it depends on the SAE's firing"
    among = correlations[:n, :n] - torch.eye(n)
    assert float(among.abs().max()) < 6 / math.sqrt(len(x)), "its latents depend on each other"
    moved = null.encode(x * (1 + 1e-6))
    assert not torch.equal(moved, f), "another x, however close, gives other codes"


@given(n=st.integers(2, 400), d=st.integers(2, 40), absolute=st.booleans())
@settings(max_examples=15)
def test_the_extreme_value_null_is_what_random_directions_give(n: int, d: int, absolute: bool) -> None:
    made = torch.Generator().manual_seed(n * 1000 + d)
    repeats = max(4, 4000 // n)
    rows = torch.nn.functional.normalize(torch.randn(repeats, n, d, generator=made, dtype=torch.float64), dim=2)
    cosines = rows @ rows.mT
    cosines = (cosines.abs() if absolute else cosines) - 3 * torch.eye(n, dtype=torch.float64)
    means = cosines.max(dim=2).values.mean(1)
    error = 5 * float(means.std()) / math.sqrt(repeats) + 1e-3
    assert extreme_value_null(n, d, absolute) == pytest.approx(float(means.mean()), abs=error)


def test_the_extreme_value_null_rises_with_the_number_and_falls_with_the_dimension() -> None:
    assert extreme_value_null(10, 64) < extreme_value_null(1000, 64) < extreme_value_null(100_000, 64) < 1
    assert extreme_value_null(1000, 64) > extreme_value_null(1000, 576)
    assert extreme_value_null(4096, 576) == pytest.approx(0.153, abs=0.01), "as DESIGN-sized dictionaries have"


def test_the_effective_dimension_is_that_of_the_directions() -> None:
    made = torch.Generator().manual_seed(0)
    rows = torch.randn(3000, 40, generator=made)
    assert effective_dimension(rows) == pytest.approx(40, rel=0.05)
    assert effective_dimension(rows * (torch.arange(40) < 10)) == pytest.approx(10, rel=0.05)
    squeezed = rows * torch.logspace(0, -2, 40)
    unit = torch.nn.functional.normalize(squeezed, dim=1)
    cosines = (unit @ unit.T) - 3 * torch.eye(3000)
    found = float(cosines.max(dim=1).values.mean())
    assert extreme_value_null(3000, effective_dimension(squeezed)) == pytest.approx(found, abs=0.06)
    assert abs(extreme_value_null(3000, 40) - found) > 0.1, "the effective dimension made no difference"
