"""`dmsae core show`: what it says of latents, and that it goes on when something is missing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dmsae.activations.base_model import BaseModel
from dmsae.cli import main
from dmsae.commands import latents
from dmsae.cores.core import Core
from dmsae.disk.run import read_settings
from dmsae.distillation.description import LatentFacts
from dmsae.evaluation.examples import Example
from dmsae.evaluation.logit_lens import TokenEffect
from dmsae.sae.sae import SAE
from tiny_recipe import write_recipe

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def run(tiny_model: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished distillation, its store beside it."""
    where = tmp_path_factory.mktemp("show")
    recipe = write_recipe(where / "tiny.toml", tiny_model, tiny_text)
    flags = ["--root", str(where / "stores"), "--cycles", "1", "--train.tokens", "2560"]
    main(["distill", "--recipe", str(recipe), "--out", str(where / "run"), *flags])
    return where / "run"


def shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[list[str], str]:
    """Return the lines that `core show` prints, and its notes on one line."""
    capsys.readouterr()
    main(["core", "show", *arguments])
    printed = capsys.readouterr()
    return printed.out.splitlines(), printed.err.replace("\n", " ")


def count(lines: list[str], start: str) -> int:
    return sum(line.strip().startswith(start) for line in lines)


def test_each_latent_of_a_core_has_figures_tokens_and_examples_of_both_kinds(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, notes = shown([str(run), "--top", "3", "--tokens", "4"], capsys)
    assert notes == ""
    assert sum("% of tokens, mean " in line for line in lines) == 3
    for name in ("promotes", "suppresses"):
        chosen = [line for line in lines if line.strip().startswith(name)]
        assert [line.count("«") for line in chosen] == [4, 4, 4]
        sign = "+" if name == "promotes" else "-"
        assert all(line.count(f"« {sign}") == 4 for line in chosen)
    assert count(lines, "top ") == count(lines, "random ") == 3
    assert any("Tokens are approximate" in line for line in lines)


def test_tokens_and_examples_can_be_turned_off(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BaseModel, "load", lambda *_, **__: pytest.fail("loaded the model"))
    lines, _ = shown([str(run), "--top", "2", "--tokens", "0", "--random-examples", "0"], capsys)
    assert (count(lines, "promotes"), count(lines, "random"), count(lines, "top ")) == (0, 0, 2)
    assert not any("approximate" in line for line in lines)
    lines, _ = shown([str(run), "--top", "2", "--tokens", "0", "--examples", "0"], capsys)
    assert (count(lines, "top "), count(lines, "random ")) == (0, 2)
    with pytest.raises(SystemExit):
        main(["core", "show", str(run), "--tokens", "-1"])
    assert "n_tokens = -1" in capsys.readouterr().err


def test_a_model_without_a_final_norm_is_noted_and_the_rest_is_shown(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = BaseModel.load

    def without_norm(*arguments: Any, **named: Any) -> BaseModel:
        model = load(*arguments, **named)
        model.model.get_submodule("model").norm = nn.Identity()
        return model

    monkeypatch.setattr(BaseModel, "load", without_norm)
    lines, notes = shown([str(run), "--top", "2"], capsys)
    assert "No promoted tokens: The final norm of" in notes
    assert "model.norm (Identity)" in notes
    assert (count(lines, "promotes"), count(lines, "top ")) == (0, 2)


def test_without_its_store_a_core_has_the_figures_of_its_scores_and_its_tokens(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines, notes = shown([str(run), "--top", "2", "--root", str(tmp_path)], capsys)
    assert "No example texts: No store under" in notes
    assert sum("% of tokens, mean " in line for line in lines) == 2
    assert (count(lines, "promotes"), count(lines, "top ")) == (2, 0)


def test_without_its_sae_a_core_is_listed(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    Core.load(run).save(tmp_path / "alone")
    lines, notes = shown([str(tmp_path / "alone"), "--top", "2"], capsys)
    assert "No more is known of these latents: The SAE that this core was selected from is not in" in notes
    numbers = [line.partition("(number ")[2].partition(" ")[0] for line in lines if ": attribution" in line]
    assert numbers == ["0", "1"]


def test_an_sae_gets_figures_and_tokens_too(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    place = str(run / "cycle-1" / "sae")
    lines, notes = shown([place, "--latents", "63", "1"], capsys)
    assert notes == ""
    titles = [line for line in lines if line.startswith("latent ")]
    assert [title.partition(";")[0] for title in titles] == ["latent 63, in prefix 1", "latent 1, in the core"]
    assert count(lines, "promotes") == 2

    silent = SAE.load(place)
    silent.threshold.fill_(torch.inf)
    silent.save(tmp_path / "silent")
    key = read_settings(run)["store"]
    root = str(run.parent / "stores")
    lines, _ = shown([str(tmp_path / "silent"), "--top", "1", "--store", key, "--root", root], capsys)
    assert "latent 0, in the core; fires on no token" in lines
    assert (count(lines, "promotes"), count(lines, "top ")) == (1, 0)


def facts(rate: float, text: str) -> LatentFacts:
    effect = TokenEffect(1, text, 0.5)
    example = Example(2.0, text, text, text, (text,), (2.0,), 0)
    return LatentFacts(7, rate, 2.0, [effect], [effect], [example], [example])


def test_token_text_never_acts_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    latents._print_latent("latent 7", facts(0.1, "\x1b[2J[bold]\n\t:smile:\x07"))
    printed = capsys.readouterr().out
    text = "⟨1B⟩[2J[bold]⏎⇥:smile:⟨7⟩"
    assert printed.splitlines() == [
        "",
        "latent 7; fires on 10.0 % of tokens, mean 2.0",
        f"   promotes    »{text}« +0.50",
        f"   suppresses  »{text}« +0.50",
        f"   top         2.0  {text}»{text}«{text}",
        f"   random      2.0  {text}»{text}«{text}",
    ]


@pytest.mark.parametrize(("rate", "marked"), [(0.5, False), (0.51, True)])
def test_a_latent_that_is_on_more_than_half_the_time_is_marked(
    rate: float, marked: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    latents._print_latent("latent 7", facts(rate, "a"))
    assert ("(ON MOST TOKENS)" in capsys.readouterr().out) is marked


def test_a_core_selected_anew_is_shown_from_anywhere(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    saved = tmp_path / "saved"
    main(["core", "select", "run", "--coverage", "0.5", "--save-to", str(saved)])
    assert f"dmsae core show {saved}" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    lines, notes = shown(["saved", "--top", "1"], capsys)
    assert notes == ""
    assert (count(lines, "promotes"), count(lines, "top "), count(lines, "random ")) == (1, 1, 1)

    monkeypatch.chdir(run.parent)
    run.rename("moved")  # what was recorded is gone
    try:
        _, notes = shown([str(saved), "--top", "1"], capsys)
        assert f"nor beside it, nor in the run that it records, {run}." in notes
    finally:
        Path("moved").rename(run)
