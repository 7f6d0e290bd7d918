"""Figures: all that is drawn comes from the JSON of the parts, and the same figures give the same bytes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes

from dmsae.config import Json
from dmsae.errors import CheckpointError
from dmsae.evaluation.measures import MEASURES
from dmsae.experiments.results import result_file
from dmsae.report.comparisons import axis_label
from dmsae.report.figures import FIGURES, draw
from dmsae.report.price import priced
from dmsae.report.style import COLOURS, panels, styled


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Leave no figure open for other tests to find."""
    yield
    plt.close("all")


def cycles(run: str, sizes: list[dict[str, int]], **more: Any) -> list[Json]:
    return [
        {"run": run, "cycle": cycle, "births": births, "size": sum(births.values()), **more}
        for cycle, births in enumerate(sizes)
    ]


def parts(seed: int) -> dict[str, Json]:
    grown = [{"0": 20 + seed}, {"0": 15, "1": 9 + seed}, {"0": 12, "1": 6, "2": 8}]
    curve = {"step": [50, 100, 150], "loss": [2.0, 1.2, 1.0 + 0.1 * seed], "fve": [0.4, 0.6, 0.7], "l0_core": [9, 6, 5]}
    rows = [
        {"sae": f"{source}-k4-norm-{norm}", "k": 4, "norm": norm, "tokens": 600}
        for source in ("dense", "random-norm_matched-dense")
        for norm in ("found", 2.0)
    ]
    rules = [{"rule": rule, "share_of_effect": share} for rule, share in (("attribution", 0.8), ("firing_rate", 0.6))]
    names = ("detector-k4", "random-detector-k4", "firing_rate-detector-k4")
    priced = [
        {"sae": name, "n_core": 20 + seed, "price": 0.01 * i, "price_loss": 0.1 * i} for i, name in enumerate(names)
    ]
    measured: list[Json] = [{"sae": f"{name}-k{k}", "l0": k + seed} for name in ("dense", "msae") for k in (4, 8)]
    scores = [
        {
            "sae": row["sae"],
            "measure": "fidelity",
            "figure": figure,
            "score": 0.01 * row["l0"],
            "null": 0.02,
            "nulls": {},
        }
        for row in measured
        for figure in ("fve", "l0")
    ]
    pairs: list[Json] = [
        {"what": what, "tokens": tokens, "share_found": 0.2, "encoder_cosine": 0.4, "decoder_cosine": 0.3, **firing}
        for what, firing in (("prefix-0", {"jaccard": 0.3, "jaccard_chance": 0.1}), ("random rows", {}))
        for tokens in (600, 1800)
    ]
    return {
        "cycles": {"rows": [], "cycles": [c for run in ("dense-selected", "dense-random") for c in cycles(run, grown)]},
        "sparsity": {"cycles": cycles("k=4", grown, k=4), "failures": {"8": "collapsed"} if seed else {}},
        "tau": {"curves": {"0.5": curve, "0.9": curve}},
        "random-core": {"rows": rows, "curves": {row["sae"]: curve for row in rows}, "n_core": 10},
        "capped": {"rows": priced},
        **{
            part: {
                "rows": [
                    {"sae": f"after-{n}-{name}", "cycles": n, "n_core": 30, "price": price, "attribution_share": share}
                    for name, price, share in (("sparse-k4", 0.01, 0.5), ("random-norm_matched-sparse-k4", 0.04, 0.0))
                ]
            }
            for part, n in (("prices", 4), ("every-cycle", 3))
        },
        "paper": {
            "rows": [
                {"sae": "dense-k4", "n_core": 40, "price": 0.02, "price_loss": 0.1, "l0": 20.0, "fve": 0.5},
                {"sae": "unconstrained-1-k4", "n_core": 0, "l0": 15.0, "fve": 0.4},
                {"sae": "unconstrained-2-k4", "n_core": 0, "l0": 25.0, "fve": 0.6 + 0.02 * seed},
            ]
        },
        "benchmark": {"rows": measured, "scores": scores},
        "consistency": {"pairs": pairs},
        "regime": {"regimes": [{"regime": "wide", "margins": {"random": 0.01}}, {"regime": "long", "margins": {}}]},
        "confirmation": {"regimes": [{"regime": "wide", "margins": {"random": 0.02}}]},
        "selection": {"rules": rules, "ceiling": 0.9, "chance": 0.5},
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("results")
    for seed in (0, 1):
        for part, figures in parts(seed).items():
            result_file(directory, part, seed).write_text(json.dumps({"part": part, "seed": seed, "figures": figures}))
    return directory


def test_every_figure_is_drawn_in_both_formats_with_the_same_bytes(results: Path, tmp_path: Path) -> None:
    once, twice = (draw(results, tmp_path / name) for name in ("once", "twice"))
    assert [path.name for path in once] == [f"{name}.{kind}" for name in FIGURES for kind in ("svg", "png")]
    assert [path.read_bytes() for path in once] == [path.read_bytes() for path in twice]


def test_axes_are_labelled(results: Path) -> None:
    with styled():
        for names, function in FIGURES.values():
            figure = function(
                [parts(seed)[part] | {"part": part} for part in names if part in parts(0) for seed in (0, 1)]
            )
            for axes in figure.axes:
                if axes.axison and axes.has_data():
                    assert axes.get_ylabel()
                    assert axes.get_xlabel() or axes.get_xticklabels()


def test_bars_stand_for_mean_births(results: Path) -> None:
    with styled():
        figure = FIGURES["core-evolution"][1]([parts(0)["cycles"], parts(1)["cycles"]])
    heights = [patch.get_height() for patch in figure.axes[0].patches]  # type: ignore[attr-defined]
    assert heights == pytest.approx([20.5, 15, 9.5, 12, 6, 8])


def test_the_frontier_has_a_line_of_means_and_a_point_for_each_seed(results: Path) -> None:
    given = [parts(seed)["paper"] | {"part": "paper"} for seed in (0, 1)]
    with styled():
        figure = FIGURES["frontier"][1](given)
    explained, losses = figure.axes
    (line,) = explained.get_lines()
    assert np.asarray(line.get_xydata()).tolist() == [[15.0, 0.4], [25.0, pytest.approx(0.61)]]
    assert [len(np.asarray(one.get_offsets())) for one in explained.collections] == [2]
    assert not losses.collections, "no losses were measured"


def test_prices_are_drawn_by_mode_rule_and_number_of_cycles(results: Path) -> None:
    given = [parts(seed)[part] | {"part": part} for part in ("capped", "prices", "every-cycle") for seed in (0, 1)]
    assert {(one.mode, one.rule, one.cycles) for one in priced(given)} == {
        ("detector", "", 0),
        ("detector", "random", 0),
        ("detector", "firing_rate", 0),
        ("sparse", "", 3),
        ("sparse", "random", 3),
        ("sparse", "", 4),
        ("sparse", "random", 4),
    }
    with styled():
        figure = FIGURES["price"][1](given)
    by_size, by_share = figure.axes[:2], figure.axes[2:]
    assert [axes.get_title() for axes in by_size] == ["sparse core", "detectors"]
    places = [_places(axes) for axes in by_size]
    assert sorted(places[0]) == [(30, 0.01)] * 4 + [(30, 0.04)] * 4
    assert sorted(places[1]) == [(20, 0), (20, 0.01), (20, 0.02), (21, 0), (21, 0.01), (21, 0.02)]
    assert _places(by_share[0]) == [(0.5, 0.01)] * 4, "a random core holds nothing"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "attribution",
        "firing rate",
        "random control",
        "before any cycle",
        "after 3 cycles",
        "after 4 cycles",
    ]


def test_without_a_price_there_are_empty_axes() -> None:
    with styled():
        figure = FIGURES["price"][1]([{"part": "consensus", "rows": []}])
    assert [axes.has_data() for axes in figure.axes] == [True] * 6, "only the line at 0"
    assert not any(_places(axes) for axes in figure.axes)


def _places(axes: Axes) -> list[tuple[float, ...]]:
    drawn = [np.asarray(points.get_offsets()).tolist() for points in axes.collections]
    return [tuple(place) for some in drawn for place in some]


def test_the_benchmark_has_a_panel_for_each_score_but_l0(results: Path) -> None:
    with styled():
        figure = FIGURES["benchmark"][1]([parts(seed)["benchmark"] | {"part": "benchmark"} for seed in (0, 1)])
    assert [axes.get_title() for axes in figure.axes if axes.axison] == ["fidelity"]
    assert figure.axes[0].get_ylabel() == "variance explained"
    line = figure.axes[0].lines[0]
    assert np.asarray(line.get_xydata()) == pytest.approx(np.array([(4.5, 0.045), (8.5, 0.085)]))


def test_curves_of_seeds_that_ended_early_are_drawn_as_far_as_they_go() -> None:
    whole, short = parts(0)["tau"], parts(1)["tau"]
    tau = next(iter(short["curves"]))
    short["curves"][tau] = {name: values[:1] for name, values in short["curves"][tau].items()}
    for order in ([whole, short], [short, whole]):
        with styled():
            axes = FIGURES["coverage"][1](order).axes[0]
        assert np.asarray(axes.lines[0].get_xdata()).tolist() == whole["curves"][tau]["step"]


def test_the_search_and_its_confirmation_have_a_point_for_each_control() -> None:
    tried = {"regime": "wide", "n_core": 9, "margins": {"firing_rate": -0.01, "random": 0.02}}
    found = [{"part": part, "regimes": [tried]} for part in ("regime", "regime", "confirmation")]
    with styled():
        (axes,) = FIGURES["regime"][1](found).axes
    places = sorted(_places(axes))
    assert [x for x, _ in places] == [-0.01] * 3 + [0.02] * 3
    assert len({y for _, y in places}) == 2, "a line for each control"
    assert axes.get_yticklabels()[0].get_text() == "wide (9 latents)"


def test_an_axis_says_which_way_is_better() -> None:
    labels = {
        (name, score.figure): axis_label(name, score.figure) for name, one in MEASURES.items() for score in one.scores
    }
    assert len(set(labels.values())) == len(labels)
    assert labels["splice", "kl"].endswith("(lower is better)")
    assert "better" not in labels["fidelity", "fve"] + labels["fidelity", "l0"]
    assert axis_label("gone", "of_old") == axis_label("fidelity", "of_old") == "of old"


def test_a_failure_is_marked(results: Path) -> None:
    with styled():
        figure = FIGURES["sparsity"][1]([parts(0)["sparsity"], parts(1)["sparsity"]])
    assert "k = 8: no cycle ended" in [axes.get_title() for axes in figure.axes]


def test_only_parts_with_results_are_drawn(tmp_path: Path) -> None:
    result_file(tmp_path, "tau", 0).write_text(json.dumps({"part": "tau", "seed": 0, "figures": parts(0)["tau"]}))
    assert {path.stem for path in draw(tmp_path, tmp_path / "figures")} == {"coverage"}
    with pytest.raises(CheckpointError, match="holds no results"):
        draw(tmp_path / "figures", tmp_path)


def test_places_that_are_left_over_stay_empty() -> None:
    with styled():
        figure, axes = panels(3, columns=2)
    assert len(axes) == 3
    assert [one.axison for one in figure.axes] == [True, True, True, False]
    assert len(set(COLOURS)) == len(COLOURS)
