"""Gradient × activation and the streaming quantile, against the paper's pseudocode written out slowly."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dmsae.activations.splits import Split
from dmsae.activations.store import Store, StoreWriter
from dmsae.cores.attribution import Attribution, AttributionConfig, CandidateCodes, QuantileOver, attribute
from dmsae.cores.quantile import LargestValues
from dmsae.cores.selection import select_core
from dmsae.disk.layout import shard_file
from dmsae.errors import AttributionError, CheckpointError, ConfigError, StoreError
from dmsae.sae.config import DenseCore, SAEConfig, SparseCore
from dmsae.sae.detectors import Detectors
from dmsae.sae.sae import SAE
from planted import REQUEST
from strategies import configs


def make_store(path: Path, x: Tensor, g: Tensor, shard_rows: int | None = None) -> Store:
    writer = StoreWriter(path, REQUEST)
    for index, (xs, gs) in enumerate(zip(x.split(shard_rows or len(x)), g.split(shard_rows or len(g)), strict=True)):
        writer.add(shard_file(Split.PAIRS, index), {"x": xs, "g": gs}, {})
    return writer.finish(x.shape[1])


def make_sae(config: SAEConfig, seed: int) -> SAE:
    generator = torch.Generator().manual_seed(seed)
    core = torch.randn(config.n_core, config.d_model, generator=generator)
    drawn = torch.rand(2, config.n_detectors, generator=generator)
    sae = SAE.init(config, generator, core, Detectors(*drawn) if config.n_detectors else None).double()
    with torch.no_grad():
        sae.W_enc_noncore.add_(0.3 * torch.randn(sae.W_enc_noncore.shape, generator=generator))
        sae.W_dec.mul_(torch.rand(config.width, 1, generator=generator) + 0.5)
        sae.b_enc.add_(0.2 * torch.randn(len(sae.b_enc), generator=generator))
        sae.b_dec.add_(0.2 * torch.randn(config.d_model, generator=generator))
    return sae


def paper_codes(sae: SAE, x: Tensor) -> list[list[float]]:
    """f̃ [B][K]: rectify, leave a core that does not compete alone, keep the k·B largest of all others."""
    config = sae.config
    W_enc, b_enc, b_dec = sae.W_enc.detach(), sae.b_enc.detach(), sae.b_dec.detach()

    def activation(row: Tensor, j: int) -> float:
        if j < config.n_detectors:
            value = float(W_enc[j] @ row + sae.offset[j])
            return value if value > float(sae.threshold[j]) else 0.0
        centered = row - b_dec if config.center_input else row
        return max(0.0, float(W_enc[j] @ centered + b_enc[j - config.n_detectors]))

    f = [[activation(row, j) for j in range(config.width)] for row in x]
    core = config.core
    first, k = (0, config.k) if core is None or isinstance(core, SparseCore) else (core.n, core.k_noncore)
    entries = [(f[u][j], u, j) for u in range(len(x)) for j in range(first, config.width)]
    kept = {(u, j) for _, u, j in sorted(entries, key=lambda e: -e[0])[: k * len(x)]}
    return [[f[u][j] if j < first or (u, j) in kept else 0.0 for j in range(config.width)] for u in range(len(x))]


def paper_quantile(values: list[float], q: float) -> float:
    if not values:
        return 0.0
    ordered, rank = sorted(values), q * (len(values) - 1)
    low, high = math.floor(rank), math.ceil(rank)
    return ordered[low] + (rank - low) * (ordered[high] - ordered[low])


def paper_scores(sae: SAE, batches: list[tuple[Tensor, Tensor]], q: float, active_only: bool) -> list[float]:
    """Algorithm 2, line by line."""
    pool = range(sae.config.prefixes[0])
    gxa: dict[int, list[float]] = {j: [] for j in pool}
    for x, g in batches:
        f = paper_codes(sae, x)
        for j in pool:
            direction = sae.W_dec[j].detach() / sae.W_dec[j].detach().norm()
            for u in range(len(x)):
                if f[u][j] > 0 or not active_only:
                    gxa[j].append(abs(f[u][j] * float(g[u] @ direction)))
    return [paper_quantile(gxa[j], q) for j in pool]


@settings(max_examples=60, deadline=None)
@given(
    config=configs(16, 4, 2, 6),
    seed=st.integers(0, 2**16),
    n_positions=st.integers(1, 20),
    batch_size=st.integers(1, 8),
    shard_rows=st.integers(1, 20),
    q=st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.99, 1.0]),
    over=st.sampled_from(QuantileOver),
)
def test_scores_are_the_papers(
    tmp_path_factory: pytest.TempPathFactory,
    config: SAEConfig,
    seed: int,
    n_positions: int,
    batch_size: int,
    shard_rows: int,
    q: float,
    over: QuantileOver,
) -> None:
    sae = make_sae(config, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(n_positions, config.d_model, generator=generator)
    g = torch.randn(n_positions, config.d_model, generator=generator)
    store = make_store(tmp_path_factory.mktemp("store"), x, g, shard_rows)
    batches = [(xb.double(), gb.double()) for xb, gb in zip(x.split(batch_size), g.split(batch_size), strict=True)]
    expected = torch.tensor(paper_scores(sae, batches, q, over is QuantileOver.ACTIVE), dtype=torch.float64)
    settings_ = AttributionConfig(quantile=q, quantile_over=over, batch_size=batch_size)
    if not expected.any():
        with pytest.raises(AttributionError, match="zero"):
            attribute(sae, store, settings_)
        return
    scored = attribute(sae, store, settings_)
    torch.testing.assert_close(scored.scores_P, expected, rtol=1e-9, atol=1e-12)
    fired = sum((torch.tensor(paper_codes(sae, xb)) > 0)[:, : config.prefixes[0]].sum(0).double() for xb, _ in batches)
    torch.testing.assert_close(scored.firing_rates_P, fired / n_positions)
    assert scored.n_positions == n_positions


@settings(max_examples=60, deadline=None)
@given(config=configs(16, 4, 2, 6), seed=st.integers(0, 2**16), n_tokens=st.integers(1, 8), n_batches=st.integers(1, 3))
def test_codes_are_the_papers_in_every_batch(config: SAEConfig, seed: int, n_tokens: int, n_batches: int) -> None:
    sae = make_sae(config, seed)
    codes = CandidateCodes(sae)
    generator = torch.Generator().manual_seed(seed + 1)
    for scale in range(1, n_batches + 1):
        x = scale * torch.randn(n_tokens, config.d_model, generator=generator, dtype=torch.float64)
        expected = torch.tensor(paper_codes(sae, x), dtype=torch.float64)[:, : config.prefixes[0]]
        torch.testing.assert_close(codes(x).T, expected, rtol=1e-9, atol=1e-12)


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    n_rows=st.integers(1, 3),
    n_samples=st.integers(1, 60),
    q=st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.5, 0.9, 0.99, 1 - 2**-53, 1.0])),
)
def test_the_streamed_quantile_is_exact(data: st.DataObject, n_rows: int, n_samples: int, q: float) -> None:
    value = st.one_of(st.just(0.0), st.floats(0, 1e6, width=32))
    row = st.lists(value, min_size=n_samples, max_size=n_samples)
    values = torch.tensor(data.draw(st.lists(row, min_size=n_rows, max_size=n_rows)), dtype=torch.float32)
    largest = LargestValues(n_rows, q, n_samples, values)
    left = values
    while left.shape[1]:
        size = data.draw(st.integers(1, left.shape[1]))
        largest.add(left[:, :size])
        left = left[:, size:]
    scored = largest.quantiles(torch.full((n_rows,), n_samples))
    assert torch.equal(scored, torch.quantile(values.double(), q, dim=1))
    np.testing.assert_allclose(scored.numpy(), np.quantile(values.double().numpy(), q, axis=1), rtol=1e-12)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), n_samples=st.integers(1, 40), q=st.one_of(st.floats(0, 1), st.sampled_from([0.99, 1 - 2**-53])))
def test_the_streamed_quantile_of_fewer_samples_is_exact(data: st.DataObject, n_samples: int, q: float) -> None:
    """As over active positions: the other samples are zeros that do not count."""
    n_active = data.draw(st.integers(0, n_samples))
    active = torch.tensor([data.draw(st.lists(st.floats(0, 1e3), min_size=n_active, max_size=n_active))])
    largest = LargestValues(1, q, n_samples, active)
    largest.add(torch.cat([active, active.new_zeros(1, n_samples - n_active)], dim=1)[:, torch.randperm(n_samples)])
    expected = torch.quantile(active.double(), q, dim=1) if n_active else torch.zeros(1, dtype=torch.float64)
    assert torch.equal(largest.quantiles(torch.tensor([n_active])), expected)


def test_what_was_not_added_is_zero() -> None:
    largest = LargestValues(1, 0.5, 5, torch.zeros(1))
    assert largest.quantiles(torch.tensor([5])).tolist() == [0.0]
    largest.add(torch.tensor([[3.0, 1.0, 2.0]]))
    assert largest.quantiles(torch.tensor([5])).tolist() == [1.0]


def test_memory_is_a_share_of_the_samples() -> None:
    largest = LargestValues(2, 0.99, 100_000, torch.zeros(1))
    for start in range(0, 100_000, 500):
        largest.add(torch.arange(start, start + 500, dtype=torch.float32).expand(2, -1))
        held = largest._largest.shape[1] + sum(values.shape[1] for values in largest._pending)
        assert held <= 2 * 1002 + 500
    expected = torch.quantile(torch.arange(100_000, dtype=torch.float64), 0.99)
    assert torch.equal(largest.quantiles(torch.full((2,), 100_000)), expected.expand(2))


def random_case(path: Path, seed: int = 0) -> tuple[SAE, Store]:
    generator = torch.Generator().manual_seed(seed)
    sae = make_sae(SAEConfig(6, 20, 7, (10, 20), DenseCore(4, k_noncore=3)), seed)
    x, g = (torch.randn(50, 6, generator=generator) for _ in range(2))
    return sae, make_store(path, x, g, 30)


def test_permuting_latents_permutes_the_scores(tmp_path: Path) -> None:
    sae, store = random_case(tmp_path)
    other = make_sae(sae.config, 0)
    order = torch.cat([torch.randperm(4), 4 + torch.randperm(6), 10 + torch.randperm(10)])
    with torch.no_grad():
        other.W_enc_core.copy_(sae.W_enc_core[order[:4]])
        other.W_enc_noncore.copy_(sae.W_enc_noncore[order[4:] - 4])
        other.b_enc.copy_(sae.b_enc[order])
        other.W_dec.copy_(sae.W_dec[order])
    plain, permuted = attribute(sae, store), attribute(other, store)
    torch.testing.assert_close(permuted.scores_P, plain.scores_P[order[:10]], rtol=1e-9, atol=1e-12)
    chosen, chosen_too = select_core(plain.scores_P, 0.8), select_core(permuted.scores_P, 0.8)
    assert order[chosen_too].tolist() == chosen.tolist()


def test_directions_that_carry_gradient_are_selected(tmp_path: Path) -> None:
    """Twelve planted features fire alike; the loss depends on the even ones only."""
    generator = torch.Generator().manual_seed(0)
    n_features, d_model, n_positions = 12, 24, 4000
    features = torch.linalg.qr(torch.randn(d_model, n_features, generator=generator)).Q.T
    fires = torch.rand(n_positions, n_features, generator=generator) < 0.25
    strength = fires * (1 + torch.rand(n_positions, n_features, generator=generator))
    sensitivity = torch.randn(n_positions, n_features, generator=generator)
    sensitivity[:, 1::2] = 0
    sae = SAE(SAEConfig(d_model, n_features, 4, (n_features,)))
    with torch.no_grad():
        sae.b_enc.fill_(-0.5)
        sae.W_enc_noncore.copy_(features)
        sae.W_dec.copy_(features)
    scored = attribute(sae, make_store(tmp_path, strength @ features, sensitivity @ features))
    assert sorted(select_core(scored.scores_P, 0.95).tolist()) == list(range(0, n_features, 2))
    rates = scored.firing_rates_P
    assert float(rates.max()) < 1.2 * float(rates.min())


def test_coverage_curve() -> None:
    scored = Attribution(torch.arange(3), torch.tensor([1.0, 5.0, 2.0]).double(), torch.ones(3), 7, {})
    assert scored.coverage_curve().tolist() == [5 / 8, 7 / 8, 1.0]


def test_scores_survive_the_disk(tmp_path: Path) -> None:
    sae, store = random_case(tmp_path / "store")
    scored = attribute(sae, store, AttributionConfig(quantile=0.9))
    scored.save(tmp_path)
    loaded = Attribution.load(tmp_path)
    for name in ("latents_P", "scores_P", "firing_rates_P"):
        assert torch.equal(getattr(loaded, name), getattr(scored, name))
    assert (loaded.n_positions, loaded.facts) == (50, scored.facts)
    assert loaded.facts["config"] == {"quantile": 0.9, "quantile_over": "all", "batch_size": 2048, "n_bootstrap": 100}
    path = tmp_path / "attribution.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match=r"attribution\.safetensors"):
        Attribution.load(tmp_path)


def test_zero_gradients_are_an_error(tmp_path: Path) -> None:
    sae, store = random_case(tmp_path / "one")
    x = next(store.batches(Split.PAIRS, 50))["x"]
    with pytest.raises(AttributionError, match="attribution of all 10 candidate latents is zero; 10 of them fired"):
        attribute(sae, make_store(tmp_path / "two", x, torch.zeros_like(x)))


@pytest.mark.parametrize("which", ["x", "g", "sae", "overflow"])
def test_what_is_not_finite_is_an_error(tmp_path: Path, which: str) -> None:
    sae, store = random_case(tmp_path / "one")
    batch = next(store.batches(Split.PAIRS, 50))
    if which in batch:
        batch[which][3, 2] = float("nan")
    elif which == "sae":
        with torch.no_grad():
            sae.b_enc[7] = float("nan")
    else:
        sae = sae.float()
        batch = {"x": 1e20 * batch["x"], "g": 1e20 * batch["g"]}
    with pytest.raises(AttributionError, match="not finite"):
        attribute(sae, make_store(tmp_path / "two", batch["x"], batch["g"]))


def test_a_store_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    sae, _ = random_case(tmp_path / "one")
    with pytest.raises(ConfigError, match="width 5; the SAE takes 6"):
        attribute(sae, make_store(tmp_path / "two", torch.ones(3, 5), torch.ones(3, 5)))
    with pytest.raises(StoreError, match="no \\(x, g\\) pairs"):
        attribute(sae, StoreWriter(tmp_path / "three", REQUEST).finish(6))


@pytest.mark.parametrize("wrong", [{"quantile": 1.5}, {"quantile": float("nan")}, {"quantile_over": "some"}])
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        AttributionConfig(**wrong)
    with pytest.raises(ConfigError, match="batch_size"):
        AttributionConfig(batch_size=0)
