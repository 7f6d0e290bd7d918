"""Figures: all that is drawn comes from the JSON of the parts, and the same figures give the same bytes."""

import json
from pathlib import Path
from typing import Any

import pytest

from dmsae.config import Json
from dmsae.errors import CheckpointError
from dmsae.experiments.results import result_file
from dmsae.report.figures import FIGURES, draw
from dmsae.report.style import COLOURS, panels, styled


def cycles(run: str, sizes: list[dict[str, int]], **more: Any) -> list[Json]:
    return [
        {"run": run, "cycle": cycle, "births": births, "size": sum(births.values()), **more}
        for cycle, births in enumerate(sizes)
    ]


def parts(seed: int) -> dict[str, Json]:
    grown = [{"0": 20 + seed}, {"0": 15, "1": 9 + seed}, {"0": 12, "1": 6, "2": 8}]
    curve = {"step": [50, 100, 150], "loss": [2.0, 1.2, 1.0 + 0.1 * seed], "fve": [0.4, 0.6, 0.7], "l0_core": [9, 6, 5]}
    rows = [
        {"sae": f"{source}-k4-norm-{norm}", "k": 4, "norm": norm}
        for source in ("dense", "random-norm_matched-dense")
        for norm in ("found", 2.0)
    ]
    rules = [{"rule": rule, "share_of_effect": share} for rule, share in (("attribution", 0.8), ("firing_rate", 0.6))]
    names = ("detector-k4", "random-detector-k4", "firing_rate-detector-k4")
    return {
        "cycles": {"cycles": [c for run in ("dense-selected", "dense-random") for c in cycles(run, grown)]},
        "sparsity": {"cycles": cycles("k=4", grown, k=4), "failures": {"8": "collapsed"} if seed else {}},
        "tau": {"curves": {"0.5": curve, "0.9": curve}},
        "random-core": {"rows": rows, "curves": {row["sae"]: curve for row in rows}, "n_core": 10},
        "capped": {"rows": [{"sae": name, "n_core": 20 + seed, "price": 0.01 * i} for i, name in enumerate(names)]},
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
        for part, function in FIGURES.values():
            figure = function([parts(0)[part], parts(1)[part]])
            for axes in figure.axes:
                if axes.axison and axes.has_data():
                    assert axes.get_ylabel()
                    assert axes.get_xlabel() or axes.get_xticklabels()


def test_bars_stand_for_mean_births(results: Path) -> None:
    with styled():
        figure = FIGURES["core-evolution"][1]([parts(0)["cycles"], parts(1)["cycles"]])
    heights = [patch.get_height() for patch in figure.axes[0].patches]  # type: ignore[attr-defined]
    assert heights == pytest.approx([20.5, 15, 9.5, 12, 6, 8])


def test_a_failure_is_marked(results: Path) -> None:
    with styled():
        figure = FIGURES["sparsity"][1]([parts(0)["sparsity"], parts(1)["sparsity"]])
    assert "k = 8: every seed failed" in [axes.get_title() for axes in figure.axes]


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
