"""What experiments keep: small files, in which a list of rows names its columns once, and their spread over seeds."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsae.cli import main
from dmsae.config import Json
from dmsae.errors import CheckpointError
from dmsae.experiments.catalog import current_results
from dmsae.experiments.results import (
    Spread,
    aligned,
    kept_or_run,
    made_with,
    over_seeds,
    pack,
    read_results,
    result_file,
    unpack,
)
from dmsae.experiments.tables import tables, text

ENTRIES = st.lists(st.fixed_dictionaries({"sae": st.text(), "l0": st.none() | st.floats(allow_nan=False)}), max_size=4)


@given(
    st.recursive(
        st.none() | st.integers() | st.floats(allow_nan=False) | st.text() | ENTRIES,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    )
)
def test_what_is_packed_can_be_unpacked(value: Any) -> None:
    assert unpack(json.loads(json.dumps(pack(value)))) == value


def test_a_result_says_how_long_it_took(tmp_path: Path) -> None:
    def work() -> Json:
        until = time.process_time() + 0.2
        while time.process_time() < until:
            pass
        return {"rows": []}

    result = kept_or_run(tmp_path, "paper", 0, {}, work)
    assert result["cpu_seconds"] >= 0.2
    assert result["seconds"] >= 0.2
    assert kept_or_run(tmp_path, "paper", 0, {}, work) == result


def test_saes_whose_k_follows_a_measured_l0_are_the_same_in_all_seeds() -> None:
    def seed(k: int) -> Json:
        names = ["msae-k4", "dense-k8", f"msae-k{k}", f"msae-k{k + 5}"]
        rows = [{"sae": name, "fve": k} for name in names]
        return {"part": "benchmark", "seed": k, "figures": {"rows": rows, "scores": [{"sae": f"msae-k{k}"}]}}

    one, other = aligned([seed(20), seed(21)])
    assert [row["sae"] for row in one["figures"]["rows"]] == ["msae-k4", "dense-k8", "msae-k20", "msae-k25"]
    assert [row["sae"] for row in other["figures"]["rows"]] == ["msae-k4", "dense-k8", "msae-k20", "msae-k25"]
    assert other["figures"]["scores"] == [{"sae": "msae-k20"}]
    spread = over_seeds([one, other], "benchmark", ["fve"])["msae-k25"]["fve"]
    assert spread is not None
    assert (spread.mean, spread.n) == (20.5, 2)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (["a-k40", "a-k45"], ["a-k45", "a-k50"], ["a-k40", "a-k45"]),
        (["a-k33", "a-k90"], ["a-k88"], ["a-k88"]),
        (["a-k45", "a-k50"], ["a-k46", "a-k46"], ["a-k46", "a-k46"]),
        (["a-k16", "a-k32"], ["a-k32"], ["a-k32"]),
    ],
    ids=["crossing", "fewer", "twice", "left out"],
)
def test_saes_are_renamed_only_where_each_has_its_partner(
    one: list[str], other: list[str], expected: list[str]
) -> None:
    seeds = [
        {"part": "benchmark", "seed": seed, "figures": {"rows": [{"sae": name} for name in names]}}
        for seed, names in enumerate((one, other))
    ]
    assert [row["sae"] for row in aligned(seeds)[1]["figures"]["rows"]] == expected


def test_a_name_that_two_saes_of_a_part_have_is_not_one_sae() -> None:
    rows = [{"sae": "a", "fve": 0.25}, {"sae": "b", "fve": 0.5}, {"sae": "a", "fve": 0.75}]
    results = [{"part": "cycles", "seed": seed, "figures": {"rows": rows}} for seed in range(2)]
    found = over_seeds(results, "cycles", ["fve"])
    assert {name: spread["fve"] for name, spread in found.items()} == {
        "a": Spread(0.25, 0.0, 2),
        "b": Spread(0.5, 0.0, 2),
        "a (2)": Spread(0.75, 0.0, 2),
    }


def test_a_figure_as_text() -> None:
    assert text(Spread.of([0.5, None, 0.7]), 2) == "0.60 ± 0.14"
    assert text(Spread.of([0.5]), 2) == "0.50"
    assert text(Spread.of([None, float("nan")]), 2) == "–"


def test_what_a_part_could_not_do_is_shown_with_its_reason_and_seeds() -> None:
    def seed(number: int, left_out: Json, failures: Json, regimes: list[Json]) -> Json:
        found = {"rows": [], "left_out": left_out, "failures": failures, "regimes": regimes}
        return {"part": "prices", "seed": number, "figures": found}

    empty: Json = {"n_core": None, "margins": {}, "price": None}
    regimes = [empty | {"regime": "wide", "note": "no room"}, empty | {"regime": "half", "left_out": {"a": "too many"}}]
    first, second = (
        seed(0, {}, {"dense": "NaN"}, []),
        seed(1, {"detector-k4": "k = 4"}, {"dense": "collapsed"}, regimes),
    )
    made = tables([second, first])
    (table,) = [one for one in made if one.title.endswith(": left out or failed")]
    assert table.rows == [
        ["distillation, dense", "0, 1", "NaN"],
        ["detector-k4", "1", "k = 4"],
        ["wide", "1", "no room"],
        ["half, a", "1", "too many"],
    ]


def test_damaged_results_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no results"):
        read_results(tmp_path)
    result_file(tmp_path, "paper", 0).write_text("[]")
    with pytest.raises(CheckpointError, match=r"paper-seed-0.json is not the result of an experiment"):
        read_results(tmp_path)


def test_results_of_an_earlier_version_of_a_part_are_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What they hold may have another shape: statistics and tables of today would fail on it, or misread it."""
    chosen = {"chosen": "wide", "regimes": []}
    old: Json = {"part": "confirmation", "seed": 0, "settings": {"version": 2}, "figures": chosen}
    gone: Json = {"part": "gone", "seed": 0, "settings": {}, "figures": {}}
    for one in (old, gone):
        result_file(tmp_path, one["part"], 0).write_text(json.dumps(one))
    with pytest.raises(CheckpointError, match=r"confirmation-seed-0.json, gone-seed-0.json\. Remove them"):
        current_results(tmp_path)
    now = {"part": "tau", "seed": 0, "settings": {}, "figures": {"rows": [], "curves": {}}}
    result_file(tmp_path, "tau", 0).write_text(json.dumps(now))
    found = current_results(tmp_path)
    assert [one["part"] for one in found.current] == ["tau"]
    for command in ("show", "verdicts"):
        main(["experiment", command, str(tmp_path)])
        assert "confirmation-seed-0.json, gone-seed-0.json" in " ".join(capsys.readouterr().err.split())


def test_what_made_results_is_counted() -> None:
    here = {"dmsae": "1", "torch": "2", "threads": 1, "cores": 2, "cpu": "AVX2"}
    said = made_with([here, here, {"dmsae": "1"}])
    assert said.startswith("Made with dmsae 1, torch 2, cores 2, cpu AVX2, threads 1 (2 files); dmsae 1, torch not")
