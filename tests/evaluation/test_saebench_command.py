"""`dmsae evaluate saebench`: SAEs on disk become a job, and the results a table."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dmsae import cli
from dmsae.activations.base_model import ModelConfig, identify
from dmsae.activations.harvest import harvest
from dmsae.activations.store import Store
from dmsae.config import to_dict
from dmsae.evaluation.saebench.job import require_name
from dmsae.evaluation.saebench.nulls import SAVABLE
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE
from fake_saebench import fake_environment, write_plan

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def store(tiny_config: Any) -> Store:
    return harvest(tiny_config())


def saved(directory: Path, made_from: dict[str, Any], seed: int = 0) -> Path:
    """An SAE of width 32 in a directory."""
    SAE.init(SAEConfig(16, 32, 4, (8, 32)), torch.Generator().manual_seed(seed)).save(directory, made_from)
    return directory


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    environment, out = fake_environment(tmp_path), tmp_path / "results"

    def run(*arguments: object, plan: dict[str, Any] | None = None) -> str:
        write_plan(out, plan)
        where = ["--env", str(environment), "--out", str(out)]
        cli.main(["evaluate", "saebench", *map(str, arguments), *where])
        return " ".join(capsys.readouterr().out.split())

    return run


def states(results: Path) -> list[str]:
    """How each SAE and null ended, in the order in which they ran."""
    return [outcome["state"] for outcome in json.loads((results / "summary.json").read_text())["outcomes"]]


def made_from(store: Store) -> dict[str, Any]:
    return {"store": store.key, "model": to_dict(store.model)}


def test_saes_are_named_after_their_folders_and_their_figures_shown(run: Any, store: Store, tmp_path: Path) -> None:
    saes = [saved(tmp_path / "first" / "sae", made_from(store)), saved(tmp_path / "second", made_from(store), 1)]
    shown = run(*saes, "--evals", "core", "--small")
    assert "core first L0 31.500" in shown
    assert "core second loss recovered 0.900" in shown
    assert "not comparable with published figures" in shown
    summary = json.loads((tmp_path / "results" / "summary.json").read_text())
    assert summary["model"]["layer"] == 0
    dataset = Path(summary["settings"]["core"]["dataset"])
    assert (dataset / "heldout.jsonl").is_file()


def test_what_has_not_run_is_listed(run: Any, store: Store, tmp_path: Path) -> None:
    saes = [saved(tmp_path / name, made_from(store), seed) for seed, name in enumerate(("one", "two"))]
    shown = run(*saes, "--evals", "autointerp", "scr", plan={"one": "not run"})
    assert "scr, one: not run. It needs a judge." in shown
    assert "autointerp, one: not run. It needs a judge." in shown


@pytest.mark.parametrize("ended", ["not run", "failed"])
def test_without_any_result_the_command_fails_after_its_summary(
    ended: str, run: Any, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sae = saved(tmp_path / "one", made_from(store))
    with pytest.raises(SystemExit) as stopped:
        run(sae, "--evals", "autointerp", "core", "--small", plan={"one": ended})
    assert stopped.value.code == 2
    shown = capsys.readouterr()
    assert f"core, one: {ended}. It needs a judge." in shown.out
    assert "No eval gave a result" in shown.err


def test_nulls_are_filed_under_names_of_their_own_and_shown_beside_their_sae(
    run: Any, store: Store, tmp_path: Path
) -> None:
    saes = [saved(tmp_path / name, made_from(store), seed) for seed, name in enumerate(("one", "two"))]
    asked = (*saes, "--evals", "core", "--small", "--share-nulls", "0", "--nulls", "untrained", "permuted_decoder")
    l0 = {"one": 30.0, "one-untrained": 29.0, "one-permuted_decoder": 28.0, "two-untrained": 27.0}
    plan = {"metrics of": {name: {"sparsity": {"l0": value}} for name, value in l0.items()}}
    shown = run(*asked, plan=plan)
    assert "untrained permuted decoder" in shown
    assert "core one L0 30.000 – – – 29.000 28.000" in shown, "neither way is better"
    assert "core two L0 31.500 – – – 27.000 31.500" in shown
    assert "core one-untrained" not in shown
    results = tmp_path / "results"
    assert (results / "core" / "one-permuted_decoder_custom_sae_eval_results.json").is_file()
    assert SAE.load(results / "nulls" / "two-untrained").config.width == 32
    assert states(results) == ["done"] * 6
    run(*asked, plan=plan)
    assert states(results) == ["kept"] * 6


def test_a_score_is_shown_with_the_part_of_the_way_from_its_null(run: Any, store: Store, tmp_path: Path) -> None:
    sae = saved(tmp_path / "one", made_from(store))
    recovered = {"one": 0.9, "one-untrained": 0.3, "one-permuted_decoder": 0.5}
    metrics = {name: {"model_performance_preservation": {"ce_loss_score": one}} for name, one in recovered.items()}
    asked = (sae, "--evals", "core", "--small", "--nulls", "untrained", "permuted_decoder")
    shown = run(*asked, plan={"metrics of": metrics})
    assert "core one loss recovered 0.900 0.500 1.000 0.800 0.300 0.500" in shown
    assert "part: of the way from it to the ceiling" in shown
    row = json.loads((tmp_path / "results" / "summary.json").read_text())["scores"][0]
    assert (row["figure"], row["null"], row["part"]) == ("loss recovered", 0.5, pytest.approx(0.8))


def test_a_null_that_cannot_be_made_leaves_the_others(
    run: Any, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sae = saved(tmp_path / "one", made_from(store))
    asked = (sae, "--evals", "core", "--small", "--nulls", "untrained", "random_encoder")
    with monkeypatch.context() as narrow:
        narrow.setattr("dmsae.evaluation.ridge._MAX_WIDTH", 16)
        shown = run(*asked)
    assert "one-random_encoder, a null: not made. A decoder for 32 latents cannot be fitted" in shown
    summary = json.loads((tmp_path / "results" / "summary.json").read_text())
    assert summary["nulls"] == {"one": {"untrained": "one-untrained"}}
    assert list(summary["nulls_not_made"]) == ["one-random_encoder"]
    run(*asked)
    summary = json.loads((tmp_path / "results" / "summary.json").read_text())
    assert list(summary["nulls"]["one"]) == ["untrained", "random_encoder"]
    assert not summary["nulls_not_made"]


def test_saes_that_are_alike_share_nulls_and_a_changed_sae_has_new_ones(run: Any, store: Store, tmp_path: Path) -> None:
    saes = [saved(tmp_path / name, made_from(store), seed) for seed, name in enumerate(("one", "two"))]
    asked = (*saes, "--evals", "core", "--small", "--nulls", "untrained", "--share-nulls", "1")
    run(*asked)
    results = tmp_path / "results"
    summary = json.loads((results / "summary.json").read_text())
    assert summary["nulls"] == {name: {"untrained": "one-untrained"} for name in ("one", "two")}
    before = SAE.load(results / "nulls" / "one-untrained").threshold
    louder = SAE.load(saes[0])
    louder.set_threshold_(1e3)
    louder.save(saes[0], made_from(store))
    run(*asked, "--nulls", "untrained", "--share-nulls", "0")
    assert not torch.equal(SAE.load(results / "nulls" / "one-untrained").threshold, before)
    summary = json.loads((results / "summary.json").read_text())
    assert summary["nulls"]["two"] == {"untrained": "two-untrained"}


def test_a_null_that_is_no_sae_is_refused(
    run: Any, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(saved(tmp_path / "one", made_from(store)), "--nulls", "untrained", "random_firing")
    assert "'random_firing': its codes do not come from an encoder" in capsys.readouterr().err


@pytest.mark.parametrize("kind", SAVABLE)
def test_names_of_nulls_are_ones_that_the_package_does_not_misread(kind: str) -> None:
    require_name(f"sae-{kind}")


def test_a_settings_file_changes_single_settings(run: Any, store: Store, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text("[core]\ncontext_size = 64\ndataset = 'my/data'\n")
    run(saved(tmp_path / "one", made_from(store)), "--evals", "core", "--settings", tmp_path / "settings.toml")
    settings = json.loads((tmp_path / "results" / "summary.json").read_text())["settings"]["core"]
    assert (settings["context_size"], settings["dataset"], settings["eval_batch_size_prompts"]) == (64, "my/data", 16)


def test_an_sae_that_names_no_model_needs_a_store(
    run: Any, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sae = saved(tmp_path / "one", {})
    with pytest.raises(SystemExit):
        run(sae, "--evals", "meta_structure")
    assert "Give a store of that model" in capsys.readouterr().err
    write_plan(tmp_path / "results")
    run(sae, "--evals", "meta_structure", "--store", store.key)


def test_saes_of_different_models_are_refused(
    run: Any, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"model": to_dict(store.model) | {"hook": "model.layers.1"}}
    with pytest.raises(SystemExit):
        run(saved(tmp_path / "one", made_from(store)), saved(tmp_path / "two", other), "--evals", "meta_structure")
    assert "Evaluate them separately" in capsys.readouterr().err


def test_a_model_that_has_changed_is_refused(
    run: Any, store: Store, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    identity = to_dict(identify(ModelConfig(str(tiny_model), hook=0))) | {"weights_sha256": "0" * 64}
    with pytest.raises(SystemExit):
        run(saved(tmp_path / "one", {"model": identity}), "--evals", "meta_structure")
    assert "The models differ" in capsys.readouterr().err


def test_without_its_environment_it_says_what_to_make(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DMSAE_SAEBENCH", raising=False)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["evaluate", "saebench", str(tmp_path)])
    assert stopped.value.code == 2
    assert "make saebench-env" in capsys.readouterr().err
