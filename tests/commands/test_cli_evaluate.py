"""`dmsae evaluate`, as a user types it: SAEs, their nulls, seeds beside each other, and what is refused."""

import json
from pathlib import Path

import pytest

from dmsae.cli import main
from dmsae.commands.evaluate import print_scores
from dmsae.config import Json
from dmsae.disk import layout
from dmsae.evaluation.scores import Evaluation
from dmsae.sae.sae import SAE, read_made_from
from tiny_recipe import write_recipe

pytestmark = pytest.mark.usefixtures("one_thread")
MEASURES = ["--measures", "fidelity", "activity", "splice", "redundancy", "--redundancy.meta-steps", "20"]
NULLS = ["--nulls", "untrained", "random_firing"]


@pytest.fixture
def saes(tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two seeds of one SAE, in the current directory, with their store under a root of its own."""
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path / "tiny.toml", tiny_model, tiny_text)
    main(["harvest", "--recipe", str(recipe), "--root", "stores"])
    (store,) = (path.name for path in Path("stores").iterdir() if path.is_dir())
    for seed in ("0", "1"):
        shape = ["--width", "64", "--k", "4", "--recipe", str(recipe), "--seed", seed]
        main(["train", "--store", store, "--out", f"msae-k4-s{seed}", *shape, "--root", "stores"])
    return ["msae-k4-s0", "msae-k4-s1"]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the message with which a command ends."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err.replace("\n", " ")


def beside(means: Json, nulls: Json, name: str) -> list[str]:
    """Return a figure, its null and the part of the way from that to 1, as tables show them."""
    score, null = means[name], nulls[name]
    return [f"{value:.3f}" for value in (score, null, (score - null) / (1 - null))]


def test_saes_are_measured_compared_and_matched(saes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    main(["evaluate", *saes, *MEASURES, *NULLS, "--out", "out"])
    printed = capsys.readouterr()
    assert "splice (3 of 4)" in printed.err
    written = json.loads(Path("out", layout.EVALUATION).read_text())
    assert set(written["measures"]) == {"fidelity", "activity", "splice", "redundancy"}
    assert [name for name, one in written["subjects"].items() if not one["null_of"]] == saes
    fve = next(row for row in written["scores"] if row["figure"] == "fve")
    assert f"{fve['score']:.3f}" in printed.out
    assert f"{fve['part']:.3f}" in printed.out
    assert "random firing" in printed.out
    assert "Everything is in out/evaluation.json." in printed.out

    main(["evaluate", "compare", "out", "--scores", "fidelity.fve", "--json", "both.json"])
    (line,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("fidelity.fve"))
    compared = json.loads(Path("both.json").read_text())
    (spread,) = compared["spreads"]
    assert line[:4] == ["fidelity.fve", "msae", "4", "2"]
    assert line[5:8] == [f"{spread[name]:.3f}" for name in ("mean", "null", "part")]
    parts = [row["part"] for row in written["scores"] if row["figure"] == "fve"]
    assert [one["parts"]["fidelity.fve"] for one in compared["members"]] == parts
    assert spread["part"] == pytest.approx(sum(parts) / 2)

    main(["evaluate", "stability", *saes, "--out", "stable"])
    shown = capsys.readouterr().out
    (pair,) = json.loads(Path("stable", layout.STABILITY).read_text())["pairs"]
    assert (pair["first"], pair["second"], pair["core"]) == (*saes, None)
    group = pair["noncore"]
    assert group["all"]["n"] == 64
    mcc, nulls = group["mcc"], (group["null_decoder"], group["null_encoder"])
    row, firing, *bins = (line.split()[4:] for line in shown.splitlines() if "non-core" in line)
    assert row[:3] == [f"{value:.3f}" for value in (mcc["decoder_signed"], mcc["decoder_absolute"], nulls[0])]
    assert row[4:7] == [f"{value:.3f}" for value in (mcc["encoder_signed"], mcc["encoder_absolute"], nulls[1])]
    mine, random = group["all"], group["null_all"]
    jaccard, correlation, shared = (beside(mine, random, name) for name in ("jaccard", "correlation", "shared"))
    assert firing == [*shared, jaccard[0], f"{mine['jaccard_chance']:.3f}", *jaccard[1:], *correlation]
    figures = ("decoder", "encoder", "shared", "jaccard", "correlation")
    expected = [one for name in figures for one in beside(group["over_bins"], group["null_over_bins"], name)]
    assert [one for of_table in bins for one in of_table] == expected
    assert max(map(len, shown.splitlines())) <= 120


def test_caveats_stand_below_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"scr": {"20": 0.5}, "tpp": {"20": 0.1}}
    facts = {"digest": "", "config": {}, "null_of": "", "null_kind": ""}
    measures: dict[str, Json] = {
        "concept_removal": {"settings": {}, "results": {"a": figures}},
        "fidelity": {"settings": {}, "results": {"a": {"fve": 0.5}}},
    }
    made = Evaluation("abc", {}, {"a": facts}, measures, {})
    made.save(tmp_path)
    caveat = "concept_removal: unreliable, as SAEBench's audit found"
    print_scores(made)
    assert caveat in capsys.readouterr().out
    main(["evaluate", "compare", str(tmp_path)])
    assert caveat in capsys.readouterr().out
    main(["evaluate", "compare", str(tmp_path), "--scores", "fidelity.fve"])
    assert caveat not in capsys.readouterr().out, "it is of what is not shown"


def test_what_cannot_be_evaluated_is_refused(saes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "No SAEs were given" in refused(["evaluate"], capsys)
    assert "Did you mean 'splice'" in refused(["evaluate", *saes, "--measures", "splic"], capsys)
    assert "given more than once" in refused(["evaluate", saes[0], saes[0]], capsys)
    assert "holds no SAE" in refused(["evaluate", "stores"], capsys)
    assert "at least two SAEs" in refused(["evaluate", "stability", saes[0]], capsys)
    assert "No evaluations were given" in refused(["evaluate", "compare"], capsys)
    assert "holds no evaluation" in refused(["evaluate", "compare", saes[0]], capsys)
    assert "holds no core" in refused(["evaluate", "stability", "--cores", *saes], capsys)
    sae = SAE.load(saes[0])
    made_from = read_made_from(Path(saes[0]))
    made_from["model"]["hook"] = "model.layers.1"
    sae.save(Path("upper"), made_from)
    assert "The models differ: upper is of" in refused(["evaluate", saes[0], "upper"], capsys)
    assert not Path("evaluation").exists()


def test_cores_are_compared_by_their_rows(
    tiny_model: Path,
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path / "tiny.toml", tiny_model, tiny_text)
    main(["distill", "--recipe", str(recipe), "--out", "run", "--root", "stores"])
    capsys.readouterr()
    main(["evaluate", "stability", "--cores", "run/cycle-0", "run/cycle-1", "run", "--out", "stable"])
    shown = capsys.readouterr().out
    assert "kept by lineage" in shown
    pairs = json.loads(Path("stable", layout.STABILITY).read_text())["pairs"]
    line = next(line.split() for line in shown.splitlines() if line.startswith("run/cycle-0"))
    assert line[4:7] == beside(pairs[0], {"encoder_signed": pairs[0]["null_encoder"]}, "encoder_signed")
    assert line[9:12] == beside(pairs[0], {"shared": pairs[0]["null_shared"]}, "shared")
    assert len(pairs) == 3
    kept = pairs[0]["carried"]["kept"]
    assert pairs[0]["n_identical"] >= kept
