"""`dmsae read` and `dmsae steer`: what they print, and that a wrong model, hook or text is one message."""

import shutil
from pathlib import Path

import pytest
import torch

from conftest import build_model, build_tokenizer
from dictionaries import random_sae
from dmsae.activations.base_model import BaseModel, ModelConfig
from dmsae.activations.identity import ModelIdentity
from dmsae.cli import main
from dmsae.commands import read as command
from dmsae.config import to_dict
from dmsae.cores.core import Core
from dmsae.distillation.in_use import take_in_use
from dmsae.errors import CheckpointError
from dmsae.formats.exchange import export_sae
from dmsae.interventions.intervention import Intervention
from dmsae.interventions.reading import Reading, read
from dmsae.interventions.steering import steer
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE
from dmsae.text.visible import visible
from hostile import HOSTILE
from tiny_recipe import write_recipe

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = "w3 w14 w15 w9 w26 w5"
RATIO = 1.5


@pytest.fixture(scope="module")
def run(tiny_model: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished distillation, its store beside it; contexts begin with BOS, and large norms are left out."""
    where = tmp_path_factory.mktemp("use")
    recipe = write_recipe(where / "tiny.toml", tiny_model, tiny_text)
    text = recipe.read_text().replace("context_length = 16", "context_length = 16\n        prepend_bos = true")
    recipe.write_text(text.replace("shard_tokens = 512", f"shard_tokens = 512\n        max_norm_ratio = {RATIO}"))
    flags = ["--root", str(where / "stores"), "--cycles", "1", "--train.tokens", "2560"]
    main(["distill", "--recipe", str(recipe), "--out", str(where / "run"), *flags])
    return where / "run"


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> BaseModel:
    return BaseModel.load(ModelConfig(name=str(tiny_model), hook=0, device="cpu"))


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[list[str], str]:
    """Return the lines that a command prints, and its notes."""
    capsys.readouterr()
    main(arguments)
    done = capsys.readouterr()
    return done.out.splitlines(), done.err.replace("\n", " ")


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one message with which a command refuses its arguments."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_a_run_is_used_with_its_core_its_model_and_its_way_with_text(run: Path, model: BaseModel) -> None:
    used, core = take_in_use(run, device="cpu"), Core.load(run)
    assert used.core == tuple(core.slots_C.tolist())
    assert (used.prepend_bos, used.max_norm_ratio) == (True, RATIO)
    assert used.model.identity == model.identity
    assert torch.equal(used.sae.W_dec, SAE.load(run / "cycle-1").W_dec)
    alone = take_in_use(run / "cycle-1" / "sae", device="cpu")
    assert alone.core == tuple(range(alone.sae.config.n_core))


def test_read_marks_the_tokens_on_which_the_core_fires(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, notes = printed(["read", TEXT, "--sae", str(run), "--device", "cpu", "--top", "3"], capsys)
    assert notes == ""
    used = take_in_use(run, device="cpu")
    whole = read(used.sae, used.model, TEXT, used.core, prepend_bos=True, max_norm_ratio=RATIO)
    n_fire = int((whole.activations_LR.amax(0) > 0).sum())
    kept = int(whole.kept_L.sum())
    assert lines[0] == f"{n_fire} of {len(used.core)} latents of the core fire on {kept} tokens; the strongest 3:"
    top = whole.strongest(3)
    for column, latent in enumerate(top.latents):
        title, text = lines[1 + 2 * column : 3 + 2 * column]
        f = top.activations_LR[:, column]
        place = f"latent {latent} (number {used.core.index(latent)} of the core)"
        assert title == f"{place} fires on {int((f > 0).sum())} of {kept} tokens, at most {float(f.max()):.1f}"
        marked = [
            f"»{token}«{value:.1f}" if value else token for token, value in zip(top.tokens, f.tolist(), strict=True)
        ]
        assert text == "   " + "".join(marked)
    assert len(lines) == 7


def test_read_shows_the_latents_that_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, _ = printed(["read", TEXT, "--sae", str(run), "--latents", "63", "2", "--device", "cpu"], capsys)
    assert [line.split()[1] for line in lines if line.startswith("latent ")] == ["63", "2"]
    assert "of 2 latents fire on" in lines[0]
    message = refused(["read", TEXT, "--sae", str(run), "--latents", "64", "--device", "cpu"], capsys)
    assert message == "error: latents = [64]; the SAE has latents 0 to 63.\n"


def test_steer_prints_both_distributions_and_continuations(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["steer", TEXT, "--sae", str(run), "--latent", "2", "--device", "cpu"]
    lines, notes = printed([*common, "--clamp", "30", "--continue", "4", "--top", "2"], capsys)
    assert notes == ""
    used = take_in_use(run, device="cpu")
    clamp = Intervention(2, "clamp", 30.0)
    expected = steer(used.sae, used.model, TEXT, [clamp], 4, n_top=2, prepend_bos=True, max_norm_ratio=RATIO)
    assert lines[0].endswith("; set to 30 everywhere")
    assert lines[1].split() == ["next", "token", "before", "after"]
    rows = [line.split() for line in lines[2 : 2 + len(expected.top)]]
    assert rows == [[f"»{one.text}«", f"{one.before:.4f}", f"{one.after:.4f}"] for one in expected.top]
    assert lines[-3] == f"KL {expected.kl:.4f} nats, from before to after"
    assert lines[-2] == f"before   {TEXT}{expected.continued_before}"
    assert lines[-1] == f"after    {TEXT}{expected.continued_after}"

    for flags, words in ((["--ablate"], "; ablated"), (["--scale", "-2.5"], "; scaled by -2.5")):
        lines, _ = printed([*common, *flags], capsys)
        assert lines[0].endswith(words)
        assert lines[-1].startswith("KL ")
    lines, _ = printed([*common, "--scale", "1"], capsys)
    assert lines[-1] == "KL 0.0000 nats, from before to after"
    lines, _ = printed([*common, "--scale", "1", "--replace"], capsys)
    assert lines[-1] != "KL 0.0000 nats, from before to after"


def test_one_thing_is_done_to_latents(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["steer", TEXT, "--sae", str(run), "--latent", "2", "--device", "cpu"]
    assert "0 of --ablate, --clamp and --scale are given" in refused(common, capsys)
    assert "2 of --ablate, --clamp and --scale are given" in refused([*common, "--ablate", "--scale", "3"], capsys)
    assert "value = nan" in refused([*common, "--clamp", "nan"], capsys)
    assert "top = 0" in refused(["read", TEXT, "--sae", str(run), "--top", "0"], capsys)
    assert "none that an SAE is applied to" in refused(["read", "", "--sae", str(run), "--device", "cpu"], capsys)


def test_another_model_or_hook_is_refused(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    build_model(seed=1).save_pretrained(tmp_path / "other")
    build_tokenizer().save_pretrained(tmp_path / "other")
    for flags in (["--model", str(tmp_path / "other")], ["--hook", "1"]):
        message = refused(["read", TEXT, "--sae", str(run), *flags], capsys)
        assert message.startswith("error: The models differ: the SAE in ")
        assert "Say with --model where its model is, and leave out --hook." in message
    assert "no such directory" in refused(["read", TEXT, "--sae", str(run), "--model", "nowhere"], capsys)
    assert "There is nothing at this path" in refused(["read", TEXT, "--sae", str(tmp_path / "none")], capsys)


def test_its_model_may_be_elsewhere_now(
    run: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copytree(tiny_model, tmp_path / "moved")
    arguments = ["read", TEXT, "--sae", str(run), "--device", "cpu"]
    assert printed([*arguments, "--model", str(tmp_path / "moved")], capsys) == printed(arguments, capsys)


def test_without_a_store_an_sae_is_read_and_what_is_not_known_is_said(
    run: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sae = SAE.load(run / "cycle-1")
    identity = take_in_use(run, device="cpu").model.identity
    sae.save(tmp_path / "storeless", {"store": "0123456789abcdef", "model": to_dict(identity)})
    lines, notes = printed(["read", TEXT, "--sae", str(tmp_path / "storeless"), "--device", "cpu"], capsys)
    assert "Whether contexts began with BOS, and which norms were left out, is not known: No store" in notes
    assert "<s>" not in "".join(lines)
    with_bos = ["--prepend-bos", "True", "--max-norm-ratio", str(RATIO)]
    again, _ = printed(["read", TEXT, "--sae", str(tmp_path / "storeless"), "--device", "cpu", *with_bos], capsys)
    expected, _ = printed(["read", TEXT, "--sae", str(run / "cycle-1" / "sae"), "--device", "cpu"], capsys)
    assert again == expected


def test_an_export_knows_its_model_and_hook_too(
    run: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    export_sae(run / "cycle-1" / "sae", "saelens", tmp_path / "theirs")  # without the model's path on this machine
    arguments = ["read", TEXT, "--sae", str(tmp_path / "theirs"), "--device", "cpu", "--model", str(tiny_model)]
    assert "of the core fire on 5 tokens" in printed(arguments, capsys)[0][0]
    assert "The models differ" in refused([*arguments, "--hook", "1"], capsys)


@pytest.mark.parametrize(
    ("made_from", "what"),
    [
        ({}, "does not say which model and hook it was made from"),
        ({"model": to_dict(ModelIdentity.imported("cells"))}, "was trained on imported activations"),
    ],
    ids=["none", "imported"],
)
def test_an_sae_that_names_no_model_needs_one(
    made_from: dict[str, object], what: str, tiny_model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    random_sae(SAEConfig(16, 32, 4, (8, 32)), threshold=0.3).save(tmp_path / "sae", made_from)
    random_sae(SAEConfig(24, 32, 4, (8, 32))).save(tmp_path / "wide", made_from)
    message = refused(["read", TEXT, "--sae", str(tmp_path / "sae"), "--model", str(tiny_model)], capsys)
    assert what in message
    assert "Give both, with --model and --hook." in message
    given = ["--model", str(tiny_model), "--hook", "1", "--device", "cpu"]
    lines, _ = printed(["read", TEXT, "--sae", str(tmp_path / "sae"), *given], capsys)
    assert "of 32 latents fire on 5 tokens; the strongest 8:" in lines[0]
    assert len(lines) == 17
    message = refused(["steer", TEXT, "--sae", str(tmp_path / "wide"), "--latent", "1", "--ablate", *given], capsys)
    assert "at model.layers.1 have width 16; the SAE takes 24" in message


def test_a_core_is_never_used_with_another_sae(run: Path, tmp_path: Path) -> None:
    there = shutil.copytree(run, tmp_path / "there")
    sae = SAE.load(there / "cycle-1")
    sae.W_enc_core.neg_()
    sae.save(there / "cycle-1" / "sae")
    with pytest.raises(CheckpointError, match=r"The core was not selected from the SAE in .*cycle-1/sae"):
        take_in_use(there, device="cpu")


def test_hostile_text_never_acts_on_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = ("\x1b[2J", "[bold]", "\n\t:smile:\x07", HOSTILE)
    reading = Reading(tokens, torch.tensor([[1.0], [0.0], [2.0], [2.0]]), torch.ones(4, dtype=torch.bool), (7,))
    line = command._marked(reading, 0).plain
    first, second, third, fourth = map(visible, tokens)
    assert line == f"   »{first}«1.0{second}»{third}«2.0»{fourth}«2.0"
    assert line.isprintable()
    lines, _ = printed(
        ["steer", f"w1 {HOSTILE} w2 [bold] w3", "--sae", str(run), "--latent", "1", "--ablate", "--continue", "2"],
        capsys,
    )
    assert r"[31m" in lines[-1]
    assert "[bold]" in lines[-1]
    assert all(one.isprintable() for one in lines)
