"""Seeds, methods and L0 are told apart, and differences are those of pairs."""

import math
from dataclasses import replace

import pytest
from scipy.stats import ttest_rel

from dmsae.config import Json, to_dict
from dmsae.errors import ConfigError
from dmsae.evaluation.comparable import NO_MATTER
from dmsae.evaluation.comparison import Member, curves, differences, mean_interval, members_of, spreads
from dmsae.evaluation.measures import MEASURES
from dmsae.evaluation.scores import Evaluation


def evaluation(figures: dict[str, tuple[float, float]], store: str = "abc") -> Evaluation:
    """Return the evaluation of SAEs whose L0 and variance explained are given; those with the same are the same."""
    facts = {name: {"digest": str(one), "config": {}, "null_of": "", "null_kind": ""} for name, one in figures.items()}
    null = {"digest": "", "config": {}, "null_of": next(iter(figures)), "null_kind": "untrained"}
    results = {
        name: {"fve": fve, "l0": l0, "cosine": 0.5, "fve_prefixes": [0.5 * fve, fve]}
        for name, (l0, fve) in figures.items()
    }
    results["null"] = {"fve": 0.1, "l0": 3.0, "cosine": 0.1, "fve_prefixes": [0.0, 0.1]}
    measures = {"fidelity": {"settings": {}, "seconds": 1.0, "results": results}}
    return Evaluation(store, {}, facts | {"null": null}, measures, {})


def with_measure(made: Evaluation, measure: str, settings: Json, figures: Json) -> Evaluation:
    """Return an evaluation of one SAE with one more measure."""
    results = dict.fromkeys(made.subjects, figures)
    return replace(made, measures=made.measures | {measure: {"settings": settings, "seconds": 1.0, "results": results}})


def member(method: str, k: int, seed: int, l0: float, fve: float) -> Member:
    return Member(method, k, seed, l0, {"fidelity.fve": fve}, {"fidelity.fve": 0.5}, {"fidelity.fve": 2 * fve - 1})


@pytest.mark.parametrize(
    ("directory", "name", "method", "k", "seed"),
    [
        ("out", "msae-k40-s1", "msae", 40, 1),
        ("out", "msae-k40-seed12", "msae", 40, 12),
        ("out", "k20_dense_seed=3", "dense", 20, 3),
        ("seed2", "sparse-k40", "sparse", 40, 2),
        ("runs-s7-k20", "random", "random", 20, 7),
        ("out", "random-norm_matched-dense-k3", "random-norm_matched-dense", 3, None),
        ("out", "task-skip-kind", "task-skip-kind", None, None),
        ("s1", "s0-msae", "msae", None, 0),
        ("out", "k40", "k40", 40, None),
    ],
)
def test_names_say_what_an_sae_is(directory: str, name: str, method: str, k: int | None, seed: int | None) -> None:
    (found,) = members_of({directory: evaluation({name: (30.0, 0.8)})})
    assert (found.method, found.k, found.seed, found.l0) == (method, k, seed, 30.0)
    assert found.scores["fidelity.fve"] == 0.8
    assert found.scores["fidelity.fve_prefixes.0"] == pytest.approx(0.4)


def test_a_name_without_k_leaves_it_to_the_sae() -> None:
    made = evaluation({"msae-s1": (30.0, 0.8)})
    made.subjects["msae-s1"]["config"]["k"] = 32
    (found,) = members_of({"out": made})
    assert (found.method, found.k, found.seed) == ("msae", 32, 1)


def test_evaluations_on_different_text_are_not_compared() -> None:
    with pytest.raises(ConfigError, match="of 2 stores"):
        members_of({"a": evaluation({"x": (1, 1)}, "one"), "b": evaluation({"x": (1, 1)}, "other")})


def test_there_must_be_evaluations() -> None:
    with pytest.raises(ConfigError, match=r"No evaluations were given\. Give the --out directories"):
        members_of({})


def test_an_sae_in_several_evaluations_counts_once() -> None:
    made = evaluation({"msae-k40": (40.0, 0.8)})
    other = with_measure(evaluation({"msae-k40": (40.0, 0.8)}), "splice", {}, {"kl": 0.2})
    (found,) = members_of({"a": made, "b-s1": other, "c": made})
    assert (found.method, found.k, found.seed) == ("msae", 40, 1)
    assert (found.scores["fidelity.fve"], found.scores["splice.kl"]) == (0.8, 0.2), "scores of both are there"
    assert {spread.n for spread in spreads([found])} == {1}
    with pytest.raises(ConfigError, match=r"msae-k40 in s1 and msae-k40 in s2 are the same SAE, .* seed 1 and seed 2"):
        members_of({"s1": made, "s2": made})


def test_the_same_sae_as_two_methods_is_one_of_each() -> None:
    found = members_of({"a": evaluation({"msae-s1": (40.0, 0.8), "copy-s1": (40.0, 0.8)})})
    assert [(one.method, one.seed) for one in found] == [("msae", 1), ("copy", 1)]


@pytest.mark.parametrize("seed", ["", "-s3"])
def test_two_saes_of_one_method_k_and_seed_are_refused(seed: str) -> None:
    name = f"msae-k40{seed}"
    evaluations = {place: evaluation({name: (40.0, fve)}) for place, fve in (("a", 0.8), ("b", 0.7))}
    said = "seed 3" if seed else "no seed"
    with pytest.raises(ConfigError, match=f"{name} in a and {name} in b are two SAEs, .* {said}. Evaluate them under"):
        members_of(evaluations)


def test_scores_of_another_version_are_not_compared() -> None:
    made = {place: evaluation({f"msae-{place}": (40.0, 0.5)}) for place in ("s0", "s1")}
    made["s1"].measures["fidelity"]["version"] = 2
    with pytest.raises(ConfigError, match=r"fidelity\.version is 'not known' in s0 and 2 in s1"):
        members_of(made)


def test_scores_on_tables_of_the_same_name_that_hold_other_texts_are_not_compared() -> None:
    made = {place: evaluation({f"msae-{place}": (l0, 0.5)}) for place, l0 in (("s0", 40.0), ("s1", 41.0))}
    for place, digest in (("s0", "aa"), ("s1", "bb")):
        made[place].measures["fidelity"]["files"] = {"own.csv": digest}
    with pytest.raises(ConfigError, match=r"fidelity\.files\.own\.csv is 'aa' in s0 and 'bb' in s1"):
        members_of(made)
    made["s1"].measures["fidelity"]["files"] = {"own.csv": "aa"}
    assert len(members_of(made)) == 2


def test_scores_of_other_settings_are_not_compared() -> None:
    evaluations = {
        place: with_measure(evaluation({f"msae-{place}": (40.0, fve)}), "splice", settings, {"kl": fve})
        for place, fve, settings in (
            ("s1", 0.8, {"tokens": 4096, "batch_contexts": 4}),
            ("s2", 0.7, {"tokens": 4096, "batch_contexts": 8}),
            ("s3", 0.6, {"tokens": 512, "batch_contexts": 4}),
            ("s4", 0.5, {"tokens": 4096}),
            ("s5", 0.4, {"tokens": 4096, "text": {"seed": 1}}),
        )
    }
    first = {"s1": evaluations["s1"]}
    assert len(members_of(first | {"s2": evaluations["s2"], "s4": evaluations["s4"]})) == 3
    with pytest.raises(ConfigError, match=r"splice\.tokens is 4096 in s1 and 512 in s3"):
        members_of(first | {"s3": evaluations["s3"]})
    with pytest.raises(ConfigError, match=r"splice\.text\.seed is 'not a setting' in s1 and 1 in s5"):
        members_of(first | {"s5": evaluations["s5"]})
    assert len(members_of(evaluations, ["fidelity.fve"])) == 5, "what is not compared may differ"


@pytest.mark.parametrize("name", sorted(NO_MATTER))
def test_settings_that_do_not_matter_are_there(name: str) -> None:
    measure, *fields = name.split(".")
    value = to_dict(MEASURES[measure].config())
    for field in fields:
        value = value[field]


def test_the_spread_is_over_seeds() -> None:
    members = [member("msae", 40, seed, 40.0 + seed, 0.7 + 0.01 * seed) for seed in range(3)]
    (spread,) = spreads([*members])
    assert spread[:4] == ("msae", 40, "fidelity.fve", 3)
    assert spread[4:] == pytest.approx((0.71, 0.01, 0.70, 0.72, 41.0, 0.5, 0.42))
    (alone,) = spreads(members[:1])
    assert (alone.n, alone.sd) == (1, None)


def test_every_score_stands_beside_its_null() -> None:
    made = {f"s{seed}": evaluation({"msae": (40.0, fve)}) for seed, fve in enumerate((0.55, 0.82))}
    members = members_of(made)
    assert [one.nulls["fidelity.fve"] for one in members] == [0.1, 0.1]
    found = {one.score: one for one in spreads(members)}
    assert found["fidelity.fve"][-2:] == pytest.approx((0.1, (0.5 + 0.8) / 2))
    assert found["fidelity.l0"][-2:] == (None, None), "neither way is better"
    assert members_of(made, ["fidelity.cosine"])[0].parts == pytest.approx({"fidelity.cosine": 4 / 9})


def test_seeds_of_which_one_has_no_null_have_no_mean_null() -> None:
    both = {f"s{seed}": evaluation({"msae": (40.0, fve)}) for seed, fve in enumerate((0.5, 0.8))}
    del both["s1"].measures["fidelity"]["results"]["null"]
    (found,) = spreads(members_of(both, ["fidelity.fve"]))
    assert (found.n, found.null, found.part) == (2, None, None)
    assert found.mean == pytest.approx(0.65)


def test_a_null_of_the_same_sae_in_another_evaluation_counts() -> None:
    without, made = (evaluation({"msae": (40.0, 0.55)}) for _ in range(2))
    del without.measures["fidelity"]["results"]["null"]
    (found,) = members_of({"a": without, "b": made}, ["fidelity.fve"])
    assert found.nulls == {"fidelity.fve": 0.1}
    assert found.parts == pytest.approx({"fidelity.fve": 0.5})


def test_differences_pair_seeds() -> None:
    """Seeds differ more than methods: only pairs show the difference."""
    base = [0.5, 0.7, 0.9]
    other = [0.52, 0.73, 0.91]
    members = [member("msae", 40, seed, 40, value) for seed, value in enumerate(base)]
    members += [member("dense", 40, seed, 50, value) for seed, value in enumerate(other)]
    members += [member("dense", 40, 9, 50, 5.0)]  # a seed that the baseline does not have
    (found,) = differences(members, "msae")
    assert (found.method, found.at, found.n) == ("dense", "k", 3)
    expected = ttest_rel(other, base).confidence_interval(0.95)
    assert (found.mean, found.low, found.high) == pytest.approx((0.02, expected.low, expected.high))


def test_differences_at_the_same_l0_are_on_the_baseline_s_line() -> None:
    members = [
        member("msae", 20, 0, 20, 0.6),
        member("msae", 40, 0, 40, 0.8),
        member("dense", 20, 0, 35, 0.7),
        member("dense", 40, 0, 55, 0.9),
    ]
    found = {(one.k, one.at): one for one in differences(members, "msae")}
    assert found[20, "k"].mean == pytest.approx(0.1), "at the same k it looks better"
    assert found[20, "L0"].mean == pytest.approx(0.7 - 0.75), "at the same L0 it is worse"
    assert (40, "L0") not in found, "the baseline has no SAE of such an L0: nothing is extrapolated"
    assert (found[20, "L0"].low, found[20, "L0"].high) == (None, None)
    with pytest.raises(ConfigError, match="Did you mean 'msae'"):
        differences(members, "mase")


def test_curves_are_interpolated_in_each_seed() -> None:
    members = [member("msae", k, seed, k + seed, 0.01 * k) for k in (20, 40) for seed in (0, 1)]
    found = {point.l0: point for point in curves(members, [10, 20, 30, 40.5])}
    assert set(found) == {20, 30, 40.5}
    assert found[30].n == 2
    assert found[30].mean == pytest.approx((0.30 + 0.29) / 2)
    assert found[20].n == found[40.5].n == 1, "only one seed reaches there"


def test_an_sae_without_a_score_is_left_out_of_it() -> None:
    members = [member("msae", 40, 0, 40, 0.5), member("dense", 40, 0, 40, 0.6)._replace(scores={})]
    assert differences(members, "msae") == []
    assert [spread.method for spread in spreads(members)] == ["msae"]
    assert curves([members[0]._replace(l0=None)], [40]) == []


def test_the_interval_of_equal_values_is_a_point() -> None:
    assert mean_interval([0.5, 0.5, 0.5]) == (0.5, 0.5, 0.5)
    mean, low, high = mean_interval([0.0, 1.0])
    assert low is not None
    assert high is not None
    assert (mean, high - mean) == pytest.approx((0.5, 12.706 * math.sqrt(0.5) / math.sqrt(2)), rel=1e-3)
