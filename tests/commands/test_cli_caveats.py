"""What a harvest warned of is said again by the commands that use its store."""

from pathlib import Path

import pytest

from dmsae.cli import main
from dmsae.disk.run import read_settings
from tiny_recipe import write_recipe

pytestmark = pytest.mark.usefixtures("one_thread")
SHORT = ["--train.tokens", "1280", "--cycles", "1"]


@pytest.fixture(scope="module")
def place(tiny_model: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a recipe in it whose pairs are from few documents, and a distillation by it."""
    where = tmp_path_factory.mktemp("caveats")
    recipe = write_recipe(where / "tiny.toml", tiny_model, tiny_text)
    text = recipe.read_text(encoding="utf8")
    recipe.write_text(text.replace("pair_tokens = 400", "pair_tokens = 120"), encoding="utf8")
    root = ["--recipe", str(recipe), "--root", str(where / "stores")]
    main(["distill", *root, "--out", str(where / "run"), *SHORT])
    return where


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a command says beside its results, on one line."""
    capsys.readouterr()
    main(arguments)
    return capsys.readouterr().err.replace("\n", " ")


def test_a_distillation_from_an_existing_store_repeats_the_harvest_s_warnings(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["distill", "--recipe", str(place / "tiny.toml"), "--root", str(place / "stores"), *SHORT, "--out"]
    key = read_settings(place / "run")["store"]
    for i, flags in enumerate(([], ["--store", key])):
        notes = said([*common, str(tmp_path / f"again-{i}"), *flags], capsys)
        assert notes.count("Warning: The pairs come from ") == 1


def test_a_new_harvest_warns_once(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["distill", "--recipe", str(place / "tiny.toml"), "--root", str(tmp_path / "stores"), *SHORT]
    assert said([*common, "--out", str(tmp_path / "run")], capsys).count("Warning: The pairs come from ") == 1


def test_a_transfer_to_a_store_with_other_starts_of_contexts_says_so(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = read_settings(place / "run")["store"]
    harvest = ["harvest", "--recipe", str(place / "tiny.toml"), "--root", str(place / "stores")]
    keys = {}
    for name, flags in (("bos", ["--tokens.prepend-bos", "True"]), ("seed", ["--seed", "1"])):
        capsys.readouterr()
        main([*harvest, *flags])
        keys[name] = capsys.readouterr().out.split()[1]
    common = ["transfer", "--recipe", str(place / "tiny.toml"), "--core", str(place / "run"), "--k", "3"]
    common += ["--train.tokens", "1280", "--core-modes", "dense"]
    other = (
        f"Warning: Contexts of the core's store {own} start without a BOS token, those of the store {keys['bos']} with "
        "token 0, as with a BOS token."
    )
    assert other in said([*common, "--store", keys["bos"], "--out", str(tmp_path / "bos")], capsys)
    train = ["train", "--store", keys["bos"], "--root", str(place / "stores"), "--core", str(place / "run")]
    train += ["--width", "64", "--k", "4", "--tokens", "1280", "--batch-size", "128", "--out", str(tmp_path / "one")]
    assert other in said(train, capsys)
    for name, key in (("own", own), ("seed", keys["seed"])):
        assert "BOS" not in said([*common, "--store", key, "--out", str(tmp_path / name)], capsys)

    (place / "stores" / own).rename(tmp_path / own)
    try:
        notes = said([*common, "--store", keys["bos"], "--out", str(tmp_path / "unknown")], capsys)
    finally:
        (tmp_path / own).rename(place / "stores" / own)
    assert "with or without BOS, is not known: No store under" in notes
