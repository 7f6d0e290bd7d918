"""Verdicts follow from figures alone: what is planted in them is said, and nothing more."""

import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claimed import EXPECTED, PLANTED, row
from dmsae.config import Json
from dmsae.experiments.catalog import PARTS
from dmsae.experiments.claims import CLAIMS
from dmsae.experiments.parts.regime import ANY
from dmsae.experiments.statistics import grows, over_control, over_msae
from dmsae.experiments.tables import verdict_table
from dmsae.experiments.verdicts import OURS, PAPER, Claim, Outcome, interval, judge, verdicts

CLAIM = Claim("It is large.", "ours", "part", "the value", lambda figures: figures["value"])


def results(*values: float | None) -> list[Json]:
    return [{"part": "part", "seed": seed, "figures": {"value": value}} for seed, value in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "outcome"),
    [
        ((1.0, 1.1, 0.9), Outcome.HOLDS),
        ((-1.0, -1.1, -0.9), Outcome.FAILS),
        ((1.0, -1.1, 0.9), Outcome.OPEN),
        ((1.0, 1.0), Outcome.OPEN),
        ((1.0, 1.1, None), Outcome.OPEN),
        ((1.0, 1.1, 0.9, math.nan), Outcome.OPEN),
        ((None, None), Outcome.UNTESTED),
        ((), Outcome.UNTESTED),
    ],
)
def test_outcomes(values: tuple[float | None, ...], outcome: Outcome) -> None:
    verdict = judge(CLAIM, results(*values))
    assert verdict.outcome is outcome
    assert len(verdict.seeds) == len(verdict.values) == sum(v is not None and math.isfinite(v) for v in values)


def test_the_interval_is_students() -> None:
    mean, low, high = interval([1.0, 2.0, 3.0])
    assert (mean, low, high) == pytest.approx((2.0, 2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3)))
    assert interval([5.0]) == (5.0, None, None)


@given(st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=8))
def test_a_claim_and_its_opposite_never_both_hold(values: list[float]) -> None:
    opposite = CLAIM._replace(measure=lambda figures: -figures["value"])
    both = {judge(claim, results(*values)).outcome for claim in (CLAIM, opposite)}
    assert both in ({Outcome.HOLDS, Outcome.FAILS}, {Outcome.OPEN})


def test_every_claim_reads_a_part_that_there_is() -> None:
    assert {claim.part for claim in CLAIMS} <= set(PARTS)
    assert len({claim.text for claim in CLAIMS}) == len(CLAIMS)


def test_each_statistic_is_what_it_says() -> None:
    read = [{"part": part, "seed": seed, "figures": found} for part, found in PLANTED.items() for seed in range(3)]
    found = verdicts(read, CLAIMS)
    assert [one.whose for one in found] == sorted((one.whose for one in found), key=(PAPER, OURS).index)
    estimates = {one.claim: one.estimate for one in found}
    assert [estimates[claim.text] for claim in CLAIMS] == pytest.approx(EXPECTED)
    assert {one.outcome for one in found} == {Outcome.HOLDS}
    assert "holds" in verdict_table(found).markdown()


def test_figures_that_lack_what_a_claim_needs_leave_it_untested() -> None:
    empty: Json = {"rows": [], "scores": [], "cycles": [], "curves": {}, "regimes": [], "chosen": {}, "pairs": []}
    for claim in CLAIMS:
        if claim.part != "selection":
            assert judge(claim, [{"part": claim.part, "seed": 0, "figures": empty}]).outcome is Outcome.UNTESTED


def test_a_random_core_that_does_not_decay_is_no_support_for_the_paper() -> None:
    claim = next(one for one in CLAIMS if "equal norms decays." in one.text)
    rows = [row(f"{source}-k4-norm-found", k=4, norm="found") for source in ("dense", "random-norm_matched-dense")]
    rising = {"dense-k4-norm-found": {"l0_core": [5, 10]}, rows[1]["sae"]: {"l0_core": [5, 9]}}
    assert claim.measure({"rows": rows, "curves": rising}) == pytest.approx(-0.8)


def test_a_distilled_core_that_decays_too_is_no_support_for_the_paper() -> None:
    claim = next(one for one in CLAIMS if "equal norms decays." in one.text)
    rows = [row(f"{source}-k4-norm-found", k=4, norm="found") for source in ("dense", "random-norm_matched-dense")]
    decaying = {"dense-k4-norm-found": {"l0_core": [10, 2]}, rows[1]["sae"]: {"l0_core": [10, 1]}}
    assert claim.measure({"rows": rows, "curves": decaying}) == pytest.approx(-0.3)


def test_a_k_at_which_a_distillation_collapsed_carries_nothing_over() -> None:
    claim = next(one for one in CLAIMS if one.part == "sparsity")
    cycles = [{"k": k, "size": 10, "kept": kept} for k, last in ((1, 2), (2, 9), (4, 10)) for kept in (0, last)]
    assert claim.measure({"cycles": cycles, "failures": {"4": "It collapsed."}}) == pytest.approx(0.7)


def test_seeds_are_not_compared_at_different_sparsities() -> None:
    claim = next(one for one in CLAIMS if one.part == "benchmark")
    figures = PLANTED["benchmark"]
    within = [row for row in figures["rows"] if row["sae"] not in ("msae-k16", "msae-k20")]
    assert claim.measure(figures | {"rows": within}) is None, "the densest SAE has no neighbour above it"


def test_seeds_that_give_no_statistic_are_counted() -> None:
    table = verdict_table([judge(CLAIM, results(1.0, 1.1, None)), judge(CLAIM, results(1.0, 1.1, 0.9))])
    assert [cells[-1] for cells in table.rows] == ["2 of 3", "3"]


def test_nothing_is_compared_at_the_ends_of_the_baselines_range() -> None:
    def figures(*ours: tuple[int, float, float]) -> Json:
        saes = [("msae", k, float(k), 0.1 * k) for k in (2, 4, 8)] + [("sparse", k, l0, score) for k, l0, score in ours]
        return {
            "rows": [row(f"{name}-k{k}", l0=l0) for name, k, l0, _ in saes],
            "scores": [
                {"sae": f"{name}-k{k}", "measure": "fidelity", "figure": "fve", "ceiling": 1, "score": score}
                for name, k, _, score in saes
            ],
        }

    compared = partial(over_msae, method="sparse", measure="fidelity", figure="fve")
    inside = (4, 4.0, 0.5)
    assert compared(figures(inside)) == pytest.approx(0.1)
    assert compared(figures((2, 1.9, 9.0), inside, (8, 8.1, 9.0))) == pytest.approx(0.1)
    assert compared(figures(inside, (6, 8.1, 0.9))) is None, "one inside that cannot be compared"


def test_in_a_regime_of_detectors_random_detectors_are_the_random_rows() -> None:
    figures = {"chosen": {ANY: "a"}, "regimes": [{"regime": "a", "margins": {"random": 0.5}, "price": 0.1}]}
    measured = {claim.text: claim.measure(figures) for claim in CLAIMS if claim.part == "confirmation"}
    known = {text: value for text, value in measured.items() if value is not None}
    assert sorted(known.values()) == [-0.1, 0.5]
    assert any("random detectors" in text for text in known)


def test_persistence_needs_all_cycles_of_both_runs() -> None:
    claim = next(one for one in CLAIMS if one.part == "cycles")
    figures = PLANTED["cycles"]
    assert claim.measure(figures) == pytest.approx(0.5)
    assert claim.measure(figures | {"failures": {"dense-random": "It collapsed."}}) is None
    assert claim.measure(figures | {"failures": {"detector-random": "It collapsed."}}) == pytest.approx(0.5)


def test_a_control_of_another_l0_is_none() -> None:
    compared = partial(over_control, core="detector", control="random-detector", measure="fidelity", figure="fve")
    figures = PLANTED["worth"]
    assert compared(figures) is not None
    far = [one | {"l0": 3.8} if one["sae"] == "random-detector-k4" else one for one in figures["rows"]]
    assert compared(figures | {"rows": far}) is None


def test_growth_is_beyond_that_of_as_many_random_rows() -> None:
    def pairs(what: str, *cosines: tuple[int, float]) -> list[Json]:
        return [{"what": what, "tokens": n, "encoder_cosine": c, "decoder_cosine": c} for n, c in cosines]

    first, rows = pairs("first", (10, 0.2), (20, 0.4)), pairs("rows", (10, 0.1), (20, 0.25))
    assert grows({"pairs": first}, "first") == pytest.approx(0.2)
    assert grows({"pairs": first + rows}, "first", "rows") == pytest.approx(0.05)
    assert grows({"pairs": first + rows[:1]}, "first", "rows") is None
    assert grows({"pairs": first[:1]}, "first") is None
