"""Intervals of scores: a resample of contexts is what repeating their positions would give."""

from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsae.cores.attribution import Attribution, AttributionConfig, QuantileOver, attribute
from dmsae.cores.bootstrap import bootstrap_scores
from dmsae.cores.quantile import LargestValues
from dmsae.cores.selection import report_selection, select_core, selection_stability
from dmsae.errors import AttributionError, ConfigError
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE
from dmsae.seeds import generator
from planted import planted_store

pytestmark = pytest.mark.usefixtures("one_thread")


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(2, 9), st.integers(1, 7), st.sampled_from([0.5, 0.9, 0.99]), st.integers(0, 99))
def test_a_resample_is_the_quantile_of_repeated_positions(
    n_rows: int, n_contexts: int, per_context: int, q: float, seed: int
) -> None:
    made = torch.Generator().manual_seed(seed)
    owners = torch.arange(n_contexts).repeat_interleave(per_context)
    values = torch.rand(n_rows, len(owners), generator=made, dtype=torch.float64)
    values *= torch.rand(values.shape, generator=made) < 0.7
    largest = LargestValues(n_rows, q, 10 * len(owners), values, keeps_owners=True)  # room for all: exact
    for chunk, some in zip(values.split(3, dim=1), owners.split(3), strict=True):
        largest.add(chunk, some)
    n_samples = torch.full((1, n_contexts), per_context)
    scores = bootstrap_scores(largest, n_samples, 5, seed)
    drawn = torch.randint(n_contexts, (5, n_contexts), generator=generator(seed, "bootstrap"))
    for replicate, contexts in zip(scores, drawn, strict=True):
        columns = torch.cat([(owners == context).nonzero().squeeze(1) for context in contexts])
        torch.testing.assert_close(replicate.double(), values[:, columns].quantile(q, dim=1), rtol=1e-6, atol=1e-7)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[QuantileOver, Attribution]:
    """The scores of an SAE, made by each of the rules."""
    store = planted_store(tmp_path_factory.mktemp("planted") / "store").store
    sae = SAE.init(SAEConfig(32, 64, 4, (24, 64)), torch.Generator().manual_seed(0))
    return {over: attribute(sae, store, AttributionConfig(0.95, over, batch_size=256)) for over in QuantileOver}


@pytest.fixture(scope="module")
def scored(both: dict[QuantileOver, Attribution]) -> Attribution:
    return both[QuantileOver.ALL]


def test_either_rule_has_the_intervals_that_it_would_have_alone(both: dict[QuantileOver, Attribution]) -> None:
    for made_by, over in product(QuantileOver, QuantileOver):
        asked = both[made_by].over(over)
        assert asked.bootstrap_XP is not None
        alone = both[over].bootstrap_XP
        assert alone is not None
        assert torch.equal(asked.bootstrap_XP, alone)
        assert torch.equal(asked.scores_P, both[over].scores_P)
        assert report_selection(asked, 0.9).stability is not None


def test_both_scores_are_computed_in_one_pass(scored: Attribution, tmp_path: Path) -> None:
    assert torch.equal(scored.over(QuantileOver.ALL).scores_P, scored.scores_P)
    active = scored.over(QuantileOver.ACTIVE)
    assert (active.scores_P >= scored.scores_P - 1e-12).all()  # leaving out zeros can only raise a quantile
    scored.save(tmp_path)
    again = Attribution.load(tmp_path)
    assert torch.equal(again.over(QuantileOver.ACTIVE).scores_P, active.scores_P)
    assert again.over(QuantileOver.ACTIVE).bootstrap_XP is not None


def test_intervals_hold_the_score_and_narrow_with_the_data(scored: Attribution) -> None:
    low, high = scored.interval()
    inside = (low <= scored.scores_P) & (scored.scores_P <= high)
    assert inside.double().mean() > 0.9
    assert (high >= low).all()


def test_stability_is_the_share_of_resamples_that_select_a_latent(scored: Attribution) -> None:
    stability = selection_stability(scored, 0.9)
    assert stability is not None
    chosen = select_core(scored.scores_P, 0.9)
    report = report_selection(scored, 0.9)
    assert report.n_selected == len(chosen)
    assert report.stability == pytest.approx(float(stability[chosen].mean()))
    assert stability[chosen[0]] > 0.9  # the highest score is selected nearly always


def test_a_cap_on_the_firing_rate_keeps_frequent_latents_out(scored: Attribution) -> None:
    cap = float(scored.firing_rates_P.quantile(0.75))
    report = report_selection(scored, 0.9, max_rate=cap)
    assert report.median_rate <= cap < report_selection(scored, 0.1).median_rate
    assert report.n_selected <= (scored.firing_rates_P <= cap).sum()
    with pytest.raises(AttributionError, match=r"max_rate = 1e-06 leaves no candidate"):
        report_selection(scored, 0.9, max_rate=1e-6)
    with pytest.raises(ConfigError, match=r"max_rate = 2; it must"):
        report_selection(scored, 0.9, max_rate=2)


def test_selection_that_hardly_selects_and_cores_that_are_always_on_are_named() -> None:
    always_on = Attribution(torch.arange(4), torch.ones(4).double(), torch.full((4,), 0.9).double(), 100, {})
    report = report_selection(always_on, 0.9)
    assert report.score_rate_correlation is None
    assert report.stability is None
    hardly, on = report.warnings()
    assert "took 4 of 4 candidates (100 %)" in hardly
    assert "fires on 90 % of positions" in on
    few = torch.tensor([9.0, 0.1, 0.1, 0.1]).double()
    assert not report_selection(Attribution(torch.arange(4), few, few / 100, 100, {}), 0.9).warnings()
