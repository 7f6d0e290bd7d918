"""What is found of what was planted: perfect dictionaries get 1, random ones the null, and order means nothing."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu
from torch import Tensor

from dmsae.cores.attribution import attribute
from dmsae.errors import ConfigError
from dmsae.evaluation.planted import Planted, PlantedConfig
from dmsae.evaluation.recovery import Ranking, Recovery, auc, rank_features, recover, recover_core
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE

CONFIG = PlantedConfig(
    d_model=48,
    n_features=40,
    n_pairs=4,
    n_families=4,
    noise=0.0,
    train_rows=400,
    heldout_rows=3000,
    pair_rows=3000,
)


@pytest.fixture(scope="module")
def planted() -> Planted:
    """Orthonormal features without noise, which a dictionary can find exactly."""
    return Planted(CONFIG)


def dictionary(rows: Tensor, n_pool: int | None = None, encoder: Tensor | None = None) -> SAE:
    """An SAE with these decoder rows that fires wherever its encoder rows, the same by default, see anything."""
    width = len(rows)
    sae = SAE(SAEConfig(rows.shape[1], width, 3, (n_pool, width) if n_pool and n_pool < width else (width,)))
    with torch.no_grad():
        sae.W_dec.copy_(rows)
        sae.W_enc_noncore.copy_(rows if encoder is None else encoder)
    sae.set_threshold_(0.05)
    return sae.requires_grad_(False)


def ranked(scores: Tensor, sae: SAE, planted: Planted, only_found: bool = True) -> Ranking:
    return rank_features({"scores": scores}, sae, planted, only_found=only_found)["scores"]


def random_rows(n: int, seed: int) -> Tensor:
    rows = torch.randn(n, CONFIG.d_model, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(rows, dim=1)


def test_the_planted_features_themselves_get_everything(planted: Planted) -> None:
    assert recover(dictionary(planted.directions_FD), planted) == pytest.approx((1.0,) * len(Recovery._fields))


def test_latents_beside_the_features_do_no_harm(planted: Planted) -> None:
    sae = dictionary(torch.cat([random_rows(30, 1), planted.directions_FD]))
    assert recover(sae, planted) == pytest.approx((1.0,) * len(Recovery._fields))


def test_the_order_of_latents_means_nothing(planted: Planted) -> None:
    rows = torch.cat([random_rows(20, 1), planted.directions_FD[:25] + 0.3 * random_rows(25, 2)])
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    one, two = dictionary(rows), dictionary(rows[order])
    assert recover(one, planted) == pytest.approx(recover(two, planted))
    scores = torch.rand(len(rows), generator=torch.Generator().manual_seed(1))
    assert ranked(scores, one, planted) == ranked(scores[order], two, planted)
    latents = torch.arange(15, 35)
    assert recover_core(one, latents, planted) == recover_core(two, order.argsort()[latents], planted)


def test_a_latent_that_points_the_other_way_is_not_the_feature(planted: Planted) -> None:
    found = recover(dictionary(-planted.directions_FD, encoder=planted.directions_FD), planted)
    assert found.mcc_absolute == pytest.approx(1)
    assert found.mcc_signed < 0.1
    assert found.share_found == 0


def test_features_without_a_latent_count_as_nothing(planted: Planted) -> None:
    half = torch.arange(0, CONFIG.n_features, 2)
    found = recover(dictionary(planted.directions_FD[half]), planted)
    assert found[:-1] == pytest.approx((0.5,) * (len(Recovery._fields) - 1))
    assert found.share_read_found == pytest.approx(planted.is_read_F[half].sum() / planted.is_read_F.sum())


def test_a_direction_without_its_firing_is_not_found(planted: Planted) -> None:
    """Every latent writes a feature's direction and reads that of its neighbour."""
    sae = dictionary(planted.directions_FD, encoder=planted.directions_FD.roll(1, 0))
    found = recover(sae, planted)
    assert found.mcc_signed == pytest.approx(1)
    assert found.f1 < 0.3
    core = recover_core(sae, torch.arange(CONFIG.n_features), planted)
    assert core.recall < 0.3
    assert core.recall_direction == 1


def test_random_dictionaries_get_about_the_same_and_find_nothing(planted: Planted) -> None:
    found = [recover(dictionary(random_rows(80, seed)), planted) for seed in range(4)]
    for figures in zip(*found, strict=True):
        assert max(figures) - min(figures) < 0.05
    assert max(max(one.mcc_signed, one.mcc_absolute, one.f1) for one in found) < 0.5
    assert {one.share_found for one in found} == {0.0}


def test_firing_is_compared_row_by_row(planted: Planted) -> None:
    """A detector with a high threshold misses half of a feature's rows and is never wrong."""
    sae = dictionary(planted.directions_FD)
    heldout = planted.heldout()
    medians = torch.stack([one[one > 0].median() for one in heldout.strengths_BF.T])
    sae.threshold.copy_(medians)
    found = recover(sae, planted)
    on = heldout.strengths_BF > 0
    recall = ((heldout.strengths_BF > medians + 1e-4) & on).sum(0) / on.sum(0)
    assert found.precision == pytest.approx(1)
    assert found.recall == pytest.approx(float(recall.mean()), abs=0.01)
    assert found.f1 == pytest.approx(float((2 * recall / (1 + recall)).mean()), abs=0.01)


def test_a_core_is_judged_by_its_own_latents(planted: Planted) -> None:
    sae = dictionary(torch.cat([planted.directions_FD, planted.directions_FD]))
    read, unread = planted.is_read_F.nonzero()[:, 0], (~planted.is_read_F).nonzero()[:, 0]
    assert recover_core(sae, read, planted) == (len(read), 1, 1, 1, 1, 1)
    assert recover_core(sae, unread, planted) == (len(unread), 0, 0, 1, 0, 0)
    twice = recover_core(sae, torch.cat([read, read + CONFIG.n_features]), planted)
    assert (twice.precision, twice.recall) == (0.5, 1)
    mixed = recover_core(sae, torch.cat([read[:4], unread[:4]]), planted)
    assert (mixed.precision, mixed.recall) == (0.5, 4 / len(read))
    with pytest.raises(ConfigError, match="latents = 0"):
        recover_core(sae, read[:0], planted)


def test_scores_are_ranked_against_random_ones(planted: Planted) -> None:
    sae = dictionary(torch.cat([planted.directions_FD, random_rows(20, 1)]))
    read = torch.cat([planted.is_read_F, torch.ones(20, dtype=torch.bool)])
    perfect = ranked(read.float(), sae, planted)
    assert (perfect.n_read, perfect.n_unread) == (10, 30), "latents that are no feature are left out"
    assert (perfect.auc, perfect.precision, perfect.precision_random) == (1, 1, 0.25)
    assert perfect.auc_random == pytest.approx(0.5, abs=0.02)
    assert perfect.auc_random_high is not None
    assert 0.6 < perfect.auc_random_high < 0.8
    assert ranked(1 - read.float(), sae, planted).auc == 0
    level = ranked(torch.ones(60), sae, planted)
    assert (level.auc, level.precision) == (0.5, 0.25)
    assert ranked(read.float(), dictionary(random_rows(60, 2)), planted).auc is None
    matched = ranked(torch.rand(60), dictionary(random_rows(60, 2)), planted, only_found=False)
    assert (matched.n_read, matched.n_unread) == (10, 30)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=30))
def test_auc_is_the_statistic_of_mann_and_whitney(rows: list[tuple[int, bool]]) -> None:
    scores, positive = (torch.tensor(column) for column in zip(*rows, strict=True))
    if positive.all() or not positive.any():
        return
    u = mannwhitneyu(scores[positive], scores[~positive]).statistic
    assert auc(scores.double(), positive) == pytest.approx(u / int(positive.sum()) / int((~positive).sum()))


def test_attribution_of_the_features_themselves_tells_what_is_read(planted: Planted, tmp_path: Path) -> None:
    sae = dictionary(torch.cat([planted.directions_FD, random_rows(8, 1)]), n_pool=CONFIG.n_features)
    scores = attribute(sae, planted.store(tmp_path))
    for one in (scores.scores_all_P, scores.scores_active_P):
        assert one is not None
        ranking = ranked(one, sae, planted)
        assert ranking.auc is not None
        assert ranking.auc_random_high is not None
        assert ranking.auc > 0.97
        assert ranking.auc > ranking.auc_random_high
    by_rate = ranked(scores.firing_rates_P, sae, planted)
    assert by_rate.auc is not None
    assert by_rate.auc < 0.7


def test_features_that_never_fire_are_refused() -> None:
    few = Planted(PlantedConfig(heldout_rows=50))
    with pytest.raises(ConfigError, match=r"heldout_rows = 50; it must be enough for all features to fire: \d+ do not"):
        recover(dictionary(few.directions_FD), few)
