"""What keeping a core costs, with figures whose price is known."""

import math
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dmsae.cores.controls import RandomKind, random_core
from dmsae.errors import AttributionError, ConfigError
from dmsae.evaluation.fidelity import Fidelity
from dmsae.evaluation.price import Point, Price, attribution_share, price, require_matched
from dmsae.sae.config import DenseCore, DetectorCore, SAEConfig, SparseCore
from three_cycles import run_cycles, scored

UNCONSTRAINED = [Point(40, 0.75, 0.5), Point(48, 0.875, 0.625), Point(32, 0.5, 0.25)]


def test_the_unconstrained_figures_are_interpolated_at_the_measured_l0() -> None:
    """A quarter of the way from 40 to 48; all numbers are powers of two or sums of few, so nothing is rounded."""
    assert price(Point(42, 0.75, 0.5), UNCONSTRAINED, n_kept=52, attribution_share=0.9) == Price(
        n_kept=52,
        attribution_share=0.9,
        l0=42,
        fve=0.75,
        fve_unconstrained=0.78125,
        price=0.03125,
        fve_prefix0=0.5,
        fve_prefix0_unconstrained=0.53125,
        price_prefix0=0.03125,
        note="",
    )


@pytest.mark.parametrize("point", UNCONSTRAINED)
def test_at_an_l0_that_was_measured_nothing_is_interpolated(point: Point) -> None:
    same = price(point, UNCONSTRAINED, n_kept=1)
    assert (same.fve_unconstrained, same.fve_prefix0_unconstrained) == (point.fve, point.fve_prefix0)
    assert (same.price, same.price_prefix0) == (0, 0)


def test_a_core_that_helps_has_a_negative_price() -> None:
    assert price(Point(40, 0.8, 0.5), UNCONSTRAINED, n_kept=1).price == pytest.approx(-0.05)


@given(
    slope=st.floats(-0.01, 0.01),
    l0s=st.lists(st.floats(1, 100), min_size=2, max_size=6, unique=True),
    where=st.floats(0, 1),
    order=st.randoms(use_true_random=False),
)
def test_a_line_is_followed_in_any_order_of_points(slope: float, l0s: list[float], where: float, order: Random) -> None:
    points = [Point(l0, 0.5 + slope * l0, 0.2 - slope * l0) for l0 in l0s]
    order.shuffle(points)
    l0 = min(max(l0s), min(l0s) + where * (max(l0s) - min(l0s)))
    priced = price(Point(l0, 0.0, 0.0), points, n_kept=1)
    assert priced.fve_unconstrained == pytest.approx(0.5 + slope * l0, abs=1e-9)
    assert priced.price == priced.fve_unconstrained
    assert priced.price_prefix0 == pytest.approx(0.2 - slope * l0, abs=1e-9)


@pytest.mark.parametrize("l0", [31.9, 48.2])
def test_an_l0_just_beyond_the_last_point_counts_as_its_own(l0: float) -> None:
    end = min(UNCONSTRAINED, key=lambda point: abs(point.l0 - l0))
    assert price(Point(l0, 0.5, 0.5), UNCONSTRAINED, n_kept=1).fve_unconstrained == end.fve


@pytest.mark.parametrize(("l0", "remedy"), [(31.7, "at a lower k"), (48.4, "at a higher k")])
def test_there_is_no_price_outside_the_measured_range(l0: float, remedy: str) -> None:
    priced = price(Point(l0, 0.7, 0.4), UNCONSTRAINED, n_kept=52, attribution_share=0.9)
    assert (priced.n_kept, priced.attribution_share, priced.l0, priced.fve) == (52, 0.9, l0, 0.7)
    unknown = (priced.fve_unconstrained, priced.price, priced.fve_prefix0_unconstrained, priced.price_prefix0)
    assert unknown == (None, None, None, None)
    assert priced.note.startswith(f"L0 {l0:.1f} lies outside 32.0 … 48.0")
    assert remedy in priced.note


def test_points_of_equal_l0_count_as_their_mean() -> None:
    points = [Point(40, 0.5, 0.25), Point(40, 0.75, 0.5), Point(40, 1.0, 0.75)]
    assert price(Point(40, 0.75, 0.5), points, n_kept=1).price == 0
    assert price(Point(41, 0.75, 0.5), points, n_kept=1).price is None


def test_a_collapsed_sae_sets_no_price_and_has_none() -> None:
    """A collapse does not stop a sweep: it is left out, and said."""
    collapsed = Point(44, math.nan, math.nan)
    priced = price(Point(42, 0.75, 0.5), [*UNCONSTRAINED, collapsed], n_kept=1)
    assert priced.price == 0.03125
    assert priced.note == "1 of 4 unconstrained SAEs is left out: its figures are not finite."
    priced = price(collapsed, UNCONSTRAINED, n_kept=1)
    assert priced.price is priced.fve_unconstrained is None
    assert "not finite" in priced.note


def test_without_an_unconstrained_sae_there_is_no_price() -> None:
    for points in ([], [Point(math.inf, 0.5, 0.5)]):
        priced = price(Point(42, 0.75, 0.5), points, n_kept=1)
        assert priced.price is None
        assert "no unconstrained SAE" in priced.note


def test_a_point_is_what_fidelity_measured() -> None:
    figures = Fidelity(n_tokens=100, fve=0.8, fve_prefixes=[0.5, 0.7, 0.8], l0_core=10.5, l0_noncore=32)
    assert Point.of(figures) == Point(42.5, 0.8, 0.5)


def test_the_share_of_a_core_is_that_of_its_scores() -> None:
    scores = [5.0, 0, 9, 2]
    core = run_cycles([scores]).cores[0]
    assert attribution_share(core, scored(scores)) == 1
    assert attribution_share(core.take([0, 1]), scored(scores)) == 14 / 16
    assert attribution_share(core.take([]), scored(scores)) == 0


def test_a_random_core_holds_no_attribution() -> None:
    scores = [5.0, 0, 9, 2]
    core = run_cycles([scores]).cores[0]
    assert attribution_share(random_core(core, RandomKind.UNIT, seed=0), scored(scores)) == 0


def test_scores_of_another_sae_are_refused() -> None:
    core = run_cycles([[5.0, 0, 9, 2]]).cores[0]
    with pytest.raises(AttributionError, match=r"latent 2 has the score 9.*8"):
        attribution_share(core, scored([5.0, 0, 8, 2]))
    with pytest.raises(AttributionError, match=r"latent 7.*was not scored"):
        attribution_share(replace(core, slots_C=torch.tensor([7, 0, 3])), scored([5.0, 0, 9, 2]))


MSAE = SAEConfig(16, 64, 4, (20, 40, 64))


@pytest.mark.parametrize("core", [DenseCore(8, 4), SparseCore(8), DetectorCore(8, 4)])
def test_an_unconstrained_sae_of_equal_width_and_prefix_0_matches(core: DenseCore | SparseCore | DetectorCore) -> None:
    require_matched(SAEConfig(16, 64, 9, (20, 64), core), MSAE)


@pytest.mark.parametrize(
    ("unconstrained", "message"),
    [
        (replace(MSAE, d_model=8), "d_model = 8.*be 16"),
        (replace(MSAE, width=128, prefixes=(20, 128)), "width = 128.*be 64"),
        (replace(MSAE, prefixes=(12, 64)), r"prefixes\[0\] = 12.*be 20"),
        (replace(MSAE, core=SparseCore(8)), "core = SparseCore.*be left out"),
    ],
)
def test_any_other_sae_does_not(unconstrained: SAEConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_matched(SAEConfig(16, 64, 4, (20, 64), DenseCore(8, 4)), unconstrained)
