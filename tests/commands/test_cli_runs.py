"""The commands that train, on a tiny real model, as a user types them."""

import json
from pathlib import Path

import numpy as np
import pytest

from dmsae.activations.catalog import list_stores
from dmsae.activations.splits import Split
from dmsae.cli import main
from dmsae.commands.recipes import read_sections
from dmsae.config import recipe_names
from dmsae.cores.core import Core
from dmsae.distillation.transfer import sae_specs
from dmsae.sae.comms import ALONE
from dmsae.sae.config import SparseCore
from dmsae.sae.sae import SAE
from tiny_recipe import write_recipe

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def recipe(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> Path:
    """A recipe written by the user, for the tiny model."""
    return write_recipe(tmp_path / "tiny.toml", tiny_model, tiny_text)


def test_from_text_to_transferred_saes(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["distill", "--recipe", str(recipe), "--out", "run"])
    printed = capsys.readouterr().out
    assert "Distilled core" in printed
    n_distilled = json.loads(Path("run/summary.json").read_text())["n_distilled"]
    core = Core.load(Path("run/distilled"))
    assert len(core) == n_distilled > 0

    main(["status", "run"])
    assert "Nothing is left to do" in capsys.readouterr().out

    main(["transfer", "--recipe", str(recipe), "--core", "run", "--out", "saes"])
    printed = capsys.readouterr().out
    names = [spec.name for spec in sae_specs(read_sections(str(recipe)).transfer, core)]
    assert names == ["dense-k3", "sparse-k3", "msae-k3", "dense-k6", "sparse-k6", "msae-k6"]
    assert all(name in printed for name in names)

    main(["core", "show", "run", "--top", "2"])
    shown = capsys.readouterr().out
    assert f"Core of {n_distilled} latents" in shown
    assert "»w" in shown

    main(["core", "diff", "run/cycle-1", "run/cycle-2"])
    compared = capsys.readouterr().out
    assert f"{n_distilled} were kept" in compared
    assert "first in as many random directions of the activations' covariance" in compared
    assert "1.000" in compared, "a latent that was kept is its own nearest"

    main(["core", "ablate", "run", "--latents", "4", "--contexts", "6"])
    assert "Spearman" in capsys.readouterr().out
    assert json.loads(Path("run/cycle-2/ablation/agreement.json").read_text())["n_latents"] == 4

    (store,) = [path.name for path in (tmp_path / "cache" / "stores").iterdir()]
    main(["train", "--recipe", str(recipe), "--store", store[:6], "--out", "one", "--width", "64", "--k", "4"])
    shape = ["--width", "64", "--k", "4", "--tokens", "6400", "--batch-size", "128", "--kind", "batchtopk"]
    main(["train", "--store", store, "--out", "two", *shape, "--core", "run", "--core-mode", "sparse"])
    with pytest.raises(SystemExit):
        main(["core", "ablate", "one"])
    assert "this needs a distillation" in capsys.readouterr().err
    assert SAE.load(Path("one/sae")).config.prefixes == (2, 6, 14, 30, 64)
    assert SAE.load(Path("two/sae")).config.core == SparseCore(n_distilled)


def test_from_activations_of_ones_own_to_transferred_saes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made = np.random.default_rng(0)
    for name, n_rows in (("x", 2000), ("heldout", 100), ("pairs_x", 400), ("pairs_g", 400)):
        np.save(f"{name}.npy", made.standard_normal((n_rows, 16), dtype=np.float32))

    imported = ["store", "import", "cells", "--x", "x.npy", "--heldout", "heldout.npy", "--pairs-x", "pairs_x.npy"]
    with pytest.raises(SystemExit):
        main(imported)
    assert "--pairs-x was given without --pairs-g" in capsys.readouterr().err
    main([*imported, "--pairs-g", "pairs_g.npy"])
    shown = capsys.readouterr().out
    assert "2,000 × 16" in shown
    key = shown.split()[1]
    main(["store", "list"])
    assert key in capsys.readouterr().out

    shape = ["--width", "64", "--train.tokens", "2560", "--train.batch-size", "128", "--train.lr", "3e-3"]
    main(["distill", "--store", key, "--out", "run", "--k", "4", "--nesting", "16", "64", "--cycles", "1", *shape])
    main(["transfer", "--core", "run", "--out", "saes", "--k", "6", *shape])
    core = Core.load(Path("run"))
    assert core.provenance.model.name == "cells"
    assert SAE.load(Path("saes/dense-k6")).config.n_core == len(core) > 0

    main(["core", "show", "run", "--top", "1"])
    printed = capsys.readouterr()
    assert f"Core of {len(core)} latents" in printed.out
    assert "No example texts: " in printed.err


def test_a_directory_of_another_run_is_refused_before_the_harvest(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    main(["distill", "--recipe", str(recipe), "--out", str(tmp_path / "run")])
    monkeypatch.setattr("dmsae.activations.harvest.Harvest.run", lambda _: pytest.fail("harvested first"))
    for where, message in (("taken", "is not empty and holds no run"), ("run", "store: was")):
        with pytest.raises(SystemExit):
            main(["distill", "--recipe", str(recipe), "--out", str(tmp_path / where), "--harvest.seed", "5"])
        assert message in capsys.readouterr().err


def test_live_distillation_keeps_no_training_activations(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With activations stored in float32 and at most one epoch, live and on disk lead to the same core."""
    common = ["--recipe", str(recipe), "--harvest.dtype", "float32", "--train.tokens", "2560"]
    main(["distill", *common, "--out", str(tmp_path / "disk")])
    main(["distill", *common, "--out", str(tmp_path / "live"), "--live"])
    capsys.readouterr()
    disk, live = Core.load(tmp_path / "disk" / "distilled"), Core.load(tmp_path / "live" / "distilled")
    assert disk.identities == live.identities
    assert disk.digest() == live.digest()
    made_from = json.loads((tmp_path / "live" / "config.json").read_text())["train_on"]["live"]
    assert made_from["train_tokens"] == 3000
    rows = [one.rows[Split.TRAIN] for one in list_stores(tmp_path / "cache" / "stores")]
    assert sorted(rows) == [0, 3000]

    saes = ["--k", "3", "--core-modes", "dense", "--train.tokens", "2560", "--harvest.dtype", "float32"]
    saes += ["--core", str(tmp_path / "live"), "--out", str(tmp_path / "s"), "--live"]
    main(["transfer", "--recipe", str(recipe), *saes])
    assert SAE.load(tmp_path / "s" / "dense-k3").config.n_core == len(live)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--store", "abc", "--out", "x"], "No store under"),
        (["transfer", "--core", "nowhere", "--out", "x"], "holds no core"),
        (["status", "nowhere"], "holds no run"),
        (["core", "show", "nowhere"], "holds no SAE of a known format"),
        (["distill", "--recipe", "demoo", "--out", "x"], "Did you mean 'demo'"),
        (["distill", "--out", "x", "--coverage", "1.5"], "coverage = 1.5"),
        (["distill", "--out", "x", "--live", "--store", "abc"], "leave out --store"),
    ],
)
def test_bad_input_is_a_message_and_writes_nothing(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert not Path("x").exists()


def test_every_shipped_recipe_builds_the_saes_of_its_distillation() -> None:
    for name in recipe_names():
        config = read_sections(name).distill
        assert config.sae(d_model=576, n_core=0).width == config.width
        assert config.sae(d_model=576, n_core=config.width // 32).k_selected == config.k


def test_a_harvest_that_cannot_be_met_leaves_no_store(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["harvest", "--recipe", str(recipe), "--train-tokens", "9000000"])
    assert "too small" in capsys.readouterr().err
    main(["store", "list"])
    assert "No stores under" in capsys.readouterr().out


def test_a_train_table_meant_for_a_distillation_is_pointed_out(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = recipe.read_text(encoding="utf8")
    recipe.write_text(text.replace("[distill.train]", "[transfer.attribution]").split("[transfer.attribution]")[0])
    with pytest.raises(SystemExit):
        main(["distill", "--recipe", str(recipe), "--store", "none", "--out", str(tmp_path / "run")])
    assert "this command reads [distill.train]" in capsys.readouterr().err.replace("\n", " ")


def test_a_mesh_that_cannot_split_the_saes_is_refused_before_the_harvest(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dmsae.commands.distill.run_on_mesh", lambda _mesh, _device, _facts, work: work(ALONE))
    with pytest.raises(SystemExit):
        main(["distill", "--recipe", str(recipe), "--out", "run", "--mesh.latents", "3"])
    assert "distill: width = 64; it must be a multiple of mesh.latents (3)" in capsys.readouterr().err
    assert not list_stores()
