"""Random directions with the covariance of activations."""

from pathlib import Path

import pytest
import torch

from dmsae.activations.splits import Split
from dmsae.activations.store import StoreWriter
from dmsae.cores.compare import nearest_rows
from dmsae.cores.null import covariance_matched_rows
from dmsae.disk.layout import shard_file
from dmsae.errors import ConfigError, StoreError
from planted import REQUEST, planted_store


def test_rows_have_the_covariance_of_the_activations() -> None:
    made = torch.Generator().manual_seed(0)
    scales = torch.tensor([10.0, 3.0, 1.0, 0.1])
    x = 100 + torch.randn(4000, 4, generator=made) * scales
    rows = covariance_matched_rows(x, 20_000, seed=1)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(len(rows)))
    # Unit rows of N(0, Σ): compared with the same drawn from Σ itself. The mean, 100, has no part in it.
    drawn = torch.nn.functional.normalize(torch.randn(20_000, 4, generator=made) * scales, dim=1)
    torch.testing.assert_close(rows.T @ rows / 20_000, drawn.T @ drawn / 20_000, atol=0.02, rtol=0)
    assert torch.equal(rows, covariance_matched_rows(x, 20_000, seed=1))
    assert not torch.equal(rows, covariance_matched_rows(x, 20_000, seed=2))


def test_chance_is_higher_where_activations_fill_few_dimensions() -> None:
    made = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 64, generator=made) * torch.linspace(5, 0, 64).exp()
    one, other = (covariance_matched_rows(x, 50, seed) for seed in (0, 1))
    even = [torch.randn(50, 64, generator=made) for _ in range(2)]
    assert nearest_rows(one, other).cosine_C.median() > nearest_rows(*even).cosine_C.median() + 0.2


def test_a_store_gives_its_training_activations_or_others(tmp_path: Path) -> None:
    planted = planted_store(tmp_path / "store")
    rows = covariance_matched_rows(planted.store, 6)
    assert rows.shape == (6, 32)
    # The planted directions span half of all dimensions, and the activations hardly leave them.
    torch.testing.assert_close((rows @ planted.directions.T).norm(dim=1), torch.ones(6), atol=0.01, rtol=0)
    writer = StoreWriter(tmp_path / "pairs", REQUEST)
    writer.add(shard_file(Split.PAIRS, 0), {"x": planted.store.heldout()}, {})
    store = writer.finish(32)
    assert not store.n_rows(Split.TRAIN)
    assert covariance_matched_rows(store, 3).shape == (3, 32)


def test_what_gives_no_directions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no activations"):
        covariance_matched_rows(StoreWriter(tmp_path / "empty", REQUEST).finish(2), 3)
    with pytest.raises(StoreError, match="all the same"):
        covariance_matched_rows(torch.ones(5, 2), 3)
    with pytest.raises(ConfigError, match="n = 0"):
        covariance_matched_rows(torch.eye(2), 0)


def test_rows_are_the_same_however_many_weights_are_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(33, 5, generator=torch.Generator().manual_seed(0))
    at_once = covariance_matched_rows(x, 51)
    monkeypatch.setattr("dmsae.cores.null._WEIGHTS", 1)
    torch.testing.assert_close(covariance_matched_rows(x, 51), at_once, rtol=0, atol=1e-6)
