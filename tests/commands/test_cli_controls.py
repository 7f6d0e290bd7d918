"""Controls, as a user asks for them: a consensus, a random start, other rules, a price, an experiment."""

import json
from pathlib import Path

import pytest

from dmsae.cli import main
from dmsae.cores.core import Core

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = ["--train.tokens", "2560", "--cycles", "1", "--attribution.n-bootstrap", "0"]


def test_a_consensus_is_a_run_like_any_other(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--rule", "consensus", "--members", "2", "--consensus.min-similarity", "0.05"]
    main(["distill", "--recipe", recipe, "--out", "run", *QUICK, *asked])
    core = Core.load(Path("run"))
    printed = capsys.readouterr().out
    assert f"Distilled core: {len(core)} latents, which 2 SAEs agree on." in printed
    assert "Norms of the last core's encoder rows" in printed
    main(["status", "run"])
    shown = capsys.readouterr().out
    assert "cycle 0: train member-1" in shown
    assert "Nothing is left to do" in shown
    main(["core", "show", "run", "--top", "1", "--examples", "0"])
    assert f"Core of {len(core)} latents" in capsys.readouterr().out


def test_other_rules_and_a_price(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["distill", "--recipe", recipe, "--out", "run", *QUICK])
    assert "rank correlation of score and rate" in capsys.readouterr().out
    shape = ["--k", "6", "--core-modes", "dense", "--train.tokens", "2560"]
    asked = ["--rules", "firing_rate", "random_subset", "--baselines", "unconstrained"]
    main(["transfer", "--recipe", recipe, "--core", "run", "--out", "saes", *shape, *asked])
    printed = capsys.readouterr().out
    assert "firing_rate-dense-k6" in printed
    assert "Price: how much more an SAE explains that keeps nothing" in printed
    kept = json.loads(Path("saes/prices.json").read_text())
    assert list(kept) == ["dense-k6", "firing_rate-dense-k6", "random_subset-dense-k6"]
    assert 0 < kept["dense-k6"]["attribution_share"] <= 1


def test_rules_need_the_distillation_that_they_choose_from(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["distill", "--recipe", recipe, "--out", "run", *QUICK])
    Core.load(Path("run")).save(tmp_path / "alone")
    root = ["--root", str(tmp_path / "cache" / "stores")]
    with pytest.raises(SystemExit):
        main(["transfer", "--recipe", recipe, "--core", "alone", "--out", "saes", "--rules", "firing_rate", *root])
    assert "--rules chooses from cycle 0 of a distillation, and alone is none" in capsys.readouterr().err
    assert not Path("saes").exists()


def test_an_experiment_goes_on_where_it_stopped_and_shows_its_figures(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["experiment", "first-core", "--preset", "smoke", "--recipe", recipe, "--out", "first", "--parts", "paper"]
    main([*asked, "--seeds", "0"])
    first = Path("first/results/paper-seed-0.json").read_bytes()
    main([*asked, "--seeds", "0", "1"])
    assert Path("first/results/paper-seed-0.json").read_bytes() == first
    assert "paper (seeds 0, 1;" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["experiment", "tau", *asked[2:], "--seeds", "0"])
    assert "be among those of the experiment: tau" in capsys.readouterr().err
    main(["experiment", "show", "first/results", "--markdown"])
    printed = capsys.readouterr().out
    assert "| dense-k4 |" in printed
    assert "±" in printed
