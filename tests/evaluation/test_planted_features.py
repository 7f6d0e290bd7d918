"""What is planted is what the config says, and g is the gradient of the loss."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dmsae.activations.splits import Split
from dmsae.errors import ConfigError
from dmsae.evaluation.planted import Planted, PlantedConfig, Sample

CONFIG = PlantedConfig(train_rows=600, heldout_rows=300, pair_rows=400)
N_ROWS = 40_000
FAR = 4.5
"""Standard errors that hardly any of a few hundred figures exceeds by chance."""


@pytest.fixture(scope="module", params=range(3))
def planted(request: pytest.FixtureRequest) -> Planted:
    return Planted(replace(CONFIG, seed=request.param))


@pytest.fixture(scope="module")
def sample(planted: Planted) -> Sample:
    return planted.sample(N_ROWS, "test")


def fires(sample: Sample) -> Tensor:
    return (sample.strengths_BF > 0).double()


def test_features_fire_as_often_as_they_should(planted: Planted, sample: Sample) -> None:
    rates = planted.rates_F.double()
    off = (fires(sample).mean(0) - rates) / (rates * (1 - rates) / N_ROWS).sqrt()
    assert off.abs().max() < FAR
    roots = rates[: CONFIG.n_roots]
    assert roots[0] == CONFIG.top_rate
    slope = (roots[-1] / roots[0]).log() / torch.tensor(CONFIG.n_roots).log()
    torch.testing.assert_close(slope.float(), torch.tensor(-CONFIG.exponent), rtol=1e-4, atol=0)


def test_pairs_are_correlated_and_nothing_else_is(planted: Planted, sample: Sample) -> None:
    correlation = torch.corrcoef(fires(sample).T)
    first, second = planted.pairs
    # The correlation of rare features is seen in few rows: its standard error is that of the share of joint firing.
    both = planted.rates_F[first] * planted.rates_F[second]
    both = both + CONFIG.correlation * (both * (1 - planted.rates_F[first]) * (1 - planted.rates_F[second])).sqrt()
    error = (both / N_ROWS).sqrt() / (planted.rates_F[first] * planted.rates_F[second]).sqrt()
    assert ((correlation[first, second] - CONFIG.correlation).abs() < FAR * error).all()
    related = torch.eye(CONFIG.n_features, dtype=torch.bool)
    families = torch.cat([planted.parents[:, None], children(planted)], dim=1)
    for group in [*torch.stack([first, second], dim=1), *families]:
        related[group[:, None], group] = True
    assert correlation[~related].abs().max() < 0.06


def children(planted: Planted) -> Tensor:
    """The children of each parent, as indices."""
    return torch.arange(CONFIG.n_roots, CONFIG.n_features).view(CONFIG.n_families, CONFIG.n_children)


def test_children_fire_only_where_their_parent_does_and_one_at_a_time(planted: Planted, sample: Sample) -> None:
    on = fires(sample).bool()
    of_family, parents = on[:, children(planted)], on[:, planted.parents]
    assert (of_family.sum(2) <= parents).all()
    assert of_family.any(0).all()
    assert not set(planted.parents.tolist()) & set(torch.cat(planted.pairs).tolist())


def test_rows_are_sums_of_directions_and_a_little_noise(planted: Planted, sample: Sample) -> None:
    noise = sample.x_BD - sample.strengths_BF @ planted.directions_FD
    assert noise.std().item() == pytest.approx(CONFIG.noise, rel=0.01)
    torch.testing.assert_close(planted.directions_FD.norm(dim=1), torch.ones(CONFIG.n_features))
    means = sample.strengths_BF.sum(0) / fires(sample).sum(0)
    torch.testing.assert_close(means.float(), planted.means_F, rtol=0.1, atol=0)
    assert planted.means_F.min() >= 1
    assert planted.means_F.max() <= CONFIG.loudness


def test_features_that_fit_are_orthonormal() -> None:
    planted = Planted(replace(CONFIG, d_model=100))
    torch.testing.assert_close(planted.directions_FD @ planted.directions_FD.T, torch.eye(96), rtol=0, atol=1e-5)


def test_rates_do_not_tell_what_is_read(planted: Planted) -> None:
    read, unread = planted.rates_F[planted.is_read_F], planted.rates_F[~planted.is_read_F]
    assert len(read) == CONFIG.n_features // CONFIG.read_every
    # One of every four neighbours is read: the share among the most frequent half is that among the others.
    median = planted.rates_F.median()
    assert abs((read > median).double().mean() - (unread > median).double().mean()) < 0.1


def test_gradients_tell_how_the_loss_changes(planted: Planted) -> None:
    sample = planted.sample(2000, "test")
    g = planted.gradients(sample)
    step = 1e-3 * g
    with torch.no_grad():
        higher, lower = (planted.losses(sample, sample.x_BD + sign * step).double() for sign in (1, -1))
    expected = (g * step).double().sum(1)
    found = (higher - lower) / 2
    # A few rows lie within a step of a kink.
    assert ((found - expected).abs() <= 0.02 * expected + 2e-5).double().mean() > 0.98
    assert expected.sum() > 0.1


def test_the_loss_reads_the_read_features_and_hardly_the_others(planted: Planted) -> None:
    sample = planted.sample(N_ROWS, "test")
    matters = (planted.gradients(sample) @ planted.directions_FD.T * sample.strengths_BF).abs()
    matters = matters.sum(0) / fires(sample).sum(0)
    read, unread = matters[planted.is_read_F], matters[~planted.is_read_F]
    assert read.mean() > 4 * unread.mean()
    assert read.min() > unread.quantile(0.9)


def test_a_store_holds_these_rows(tmp_path: Path) -> None:
    planted = Planted(CONFIG)
    store = planted.store(tmp_path)
    assert [store.n_rows(split) for split in Split] == [400, 300, 600]
    assert torch.equal(store.heldout(), planted.heldout().x_BD)
    pairs = planted.sample(400, Split.PAIRS)
    stored = [torch.cat([batch[name] for batch in store.batches(Split.PAIRS, 100)]) for name in ("x", "g")]
    assert torch.equal(stored[0], pairs.x_BD)
    assert torch.equal(stored[1], planted.gradients(pairs))
    assert not torch.equal(pairs.x_BD[:300], planted.heldout().x_BD)
    assert Planted(CONFIG).store(tmp_path).key == store.key
    assert Planted(replace(CONFIG, seed=1)).store(tmp_path).key != store.key


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_features": 40}, "n_features = 40; it must leave room"),
        ({"n_features": 96.0}, r"n_features = 96\.0; it must be a whole number"),
        ({"top_rate": 1.0}, r"top_rate = 1\.0; it must lie between 0 and 1"),
        ({"loudness": 0.5}, r"loudness = 0\.5; it must be at least 1"),
        ({"read_every": 1}, "read_every = 1; it must be a whole number of at least 2"),
        (
            {"correlation": 0.95, "exponent": 2.0},
            r"correlation = 0\.95; it must be possible .* Lower it, or the exponent",
        ),
    ],
)
def test_what_cannot_be_planted_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Planted(PlantedConfig(**settings))


def test_nothing_but_features_can_be_planted() -> None:
    plain = Planted(replace(CONFIG, n_pairs=0, n_families=0))
    assert fires(plain.sample(5000, "test")).any(0).all()
