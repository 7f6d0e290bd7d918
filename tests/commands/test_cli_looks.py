"""What the commands say of runs, cores and SAEs that exist, and what they refuse, as a user types them."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dmsae.cli import main
from dmsae.cores.core import Core
from dmsae.disk.run import claimed, read_settings
from dmsae.sae.sae import SAE
from tiny_recipe import write_recipe

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def recipe(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> Path:
    """A recipe written by the user, for the tiny model."""
    return write_recipe(tmp_path / "tiny.toml", tiny_model, tiny_text)


@pytest.fixture
def run(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A finished distillation whose store is under a root of its own, in the current directory."""
    monkeypatch.chdir(tmp_path)
    main(["distill", "--recipe", str(recipe), "--out", "run", "--root", "elsewhere"])
    capsys.readouterr()
    return Path("run")


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the message with which a command ends."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    return printed.err.replace("\n", " ")


def test_the_root_of_a_distillation_is_remembered(
    run: Path, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not (tmp_path / "cache" / "stores").exists()
    for place in ("run", "run/cycle-1", "run/distilled"):
        main(["core", "show", place, "--top", "1"])
        assert "»w" in capsys.readouterr().out
    main(["core", "ablate", "run", "--latents", "3", "--contexts", "4"])
    main(["transfer", "--recipe", str(recipe), "--core", "run", "--out", "saes", "--k", "3"])
    capsys.readouterr()
    main(["core", "show", "saes/msae-k3", "--latents", "5"])
    assert "latent 5, in prefix 1" in capsys.readouterr().out

    (tmp_path / "cache").mkdir(exist_ok=True)
    Path("elsewhere").rename(tmp_path / "cache" / "stores")  # the recorded place is gone: the default one is used
    main(["core", "show", "run", "--top", "1"])
    assert "»w" in capsys.readouterr().out
    main(["distill", "--recipe", str(recipe), "--out", "run"])
    assert read_settings(run)["root"] == str(tmp_path / "cache" / "stores")


def test_live_training_on_other_activations_than_the_core_s_is_refused(
    run: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["transfer", "--recipe", str(recipe), "--core", str(run), "--out", "saes", "--k", "3", "--live"]
    for flags, message in (
        (["--harvest.model.hook", "1"], "what the SAEs would train on is of"),
        (["--harvest.seed", "7"], "seed: was 0, now 7"),
        (["--harvest.text.heldout-fraction", "0.3"], "text.heldout_fraction: was 0.2, now 0.3"),
    ):
        assert message in refused([*common, *flags], capsys)
        assert not Path("saes").exists()
    main([*common, "--harvest.train-tokens", "2500", "--harvest.dtype", "float32"])
    made_from = read_settings(Path("saes"))["made_from"]
    assert made_from["live"]["train_tokens"] == 2500
    assert made_from["model"] == read_settings(run)["model"]
    assert made_from["heldout_store"] == read_settings(run)["store"]


def test_held_out_figures_are_kept_beside_each_sae(run: Path, recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["transfer", "--recipe", str(recipe), "--core", "run", "--out", "saes", "--k", "3"])
    printed = capsys.readouterr().out
    for name in ("dense-k3", "sparse-k3", "msae-k3"):
        figures = json.loads(Path(f"saes/{name}/fidelity.json").read_text())["figures"]
        assert figures["n_tokens"] == 300
        assert len(figures["fve_prefixes"]) == len(SAE.load(f"saes/{name}").config.prefixes)
        assert f"{figures['fve']:.3f}" in printed
    store = read_settings(run)["store"]
    shape = ["--width", "64", "--k", "4", "--tokens", "2560", "--batch-size", "128", "--root", "elsewhere"]
    main(["train", "--store", store, "--out", "one", *shape])
    assert json.loads(Path("one/sae/fidelity.json").read_text())["figures"]["n_tokens"] == 300
    codes = SAE.load("one").encode(SAE.load("one").b_dec[None])
    assert codes.numpy().shape == (1, 64)


def test_any_sae_can_be_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["core", "show", "run/cycle-0/sae", "--top", "3"])
    shown = capsys.readouterr().out
    assert "SAE of 64 latents, k = 4" in shown
    assert "latent 2, in prefix 0" in shown
    main(["core", "show", "run", "--latents", "63", "0", "--examples", "1"])
    shown = capsys.readouterr().out
    assert shown.index("latent 63, in prefix 1") < shown.index("latent 0, in the core")
    assert "latents = [64]; the SAE has latents 0 to 63" in refused(["core", "show", "run", "--latents", "64"], capsys)

    SAE.load("run/cycle-0").save(Path("bare"))
    main(["core", "show", "bare", "--top", "1"])
    assert "does not say which store it was made from. Give one with --store" in capsys.readouterr().err
    main(["core", "show", "bare", "--top", "64", "--store", read_settings(run)["store"], "--root", "elsewhere"])
    assert "»w" in capsys.readouterr().out


def test_cores_of_different_models_are_not_compared(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    core = Core.load(run)
    other = replace(core, provenance=replace(core.provenance, model=replace(core.provenance.model, hook="layers.1")))
    other.save(Path("other"))
    with pytest.raises(SystemExit):
        main(["core", "diff", "run", "other"])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "The models differ: the first core is of" in printed.err
    assert "store" not in printed.err

    Path("elsewhere").rename("gone")
    main(["core", "diff", "run", "run/cycle-1"])
    printed = capsys.readouterr()
    assert "first in as many isotropic directions" in printed.out
    assert "store is not here" in printed.err.replace("\n", " ")


def test_a_directory_of_another_kind_is_one_sentence(
    run: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, sentence = (
        read_settings(run)["store"],
        "error: run holds a distillation, as its config.json says, and this is {}: give a new directory.",
    )
    message = refused(["train", "--store", store, "--root", "elsewhere", "--out", "run"], capsys)
    assert message.strip() == sentence.format("the training of one SAE")
    message = refused(["transfer", "--recipe", str(recipe), "--core", "run", "--out", "run"], capsys)
    assert message.strip().endswith(sentence.format("a transfer"))
    assert "{" not in message


def test_more_cycles_continue_a_run(run: Path, recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = ["distill", "--recipe", str(recipe), "--out", "run", "--root", "elsewhere", "--cycles"]
    main([*again, "3"])
    printed = capsys.readouterr().out
    assert printed.count("\n    ") == 4, "a line for each cycle"
    assert Path("run/summary-2.json").is_file()
    main(["status", "run"])
    assert "cycle 3: select" in capsys.readouterr().out
    assert "cycles = 2; it must be at least 3" in refused([*again, "2"], capsys)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cycle0.source", "nowhere"], "nowhere holds no SAE of a known format. There is nothing at this path"),
        (["--cycle0.k", "3"], "cycle0.k = 3; it must be left out without cycle0.source"),
        (["--train.batch-size", "5000", "--train.tokens", "5000"], "fewer activations than batch_size"),
        (["--k", "640"], "k = 640"),
    ],
)
def test_a_start_that_fails_leaves_no_directory(
    flags: list[str], message: str, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["distill", "--recipe", str(recipe), "--out", str(tmp_path / "runs" / "mine"), *flags]
    assert message in refused(arguments, capsys)
    assert not (tmp_path / "runs").exists()


def test_a_training_that_collapses_says_why_and_exits_with_an_error(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    doomed = ["--width", "64", "--k", "4", "--tokens", "6400", "--batch-size", "128", "--collapse-fve", "0.999"]
    arguments = ["train", "--store", read_settings(run)["store"], "--root", "elsewhere", "--out", "one", *doomed]
    for _ in range(2):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
        printed = capsys.readouterr()
        assert "sae collapsed at step" in printed.out
        assert "explained variance below 0.999" in printed.out
        assert "error: sae collapsed: explained variance below" in printed.err.replace("\n", " ")
    main(["status", "one"])
    assert "Stopped: sae failed" in capsys.readouterr().out


def test_status_of_a_run_at_work(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "runs" / "long"
    slow = "import sys, time; from dmsae import cli; from dmsae.training.learner import Learner;"
    slow += (
        "step = Learner.advance; Learner.advance = lambda *a: (time.sleep(0.05), step(*a))[1]; cli.main(sys.argv[1:])"
    )
    arguments = ["distill", "--recipe", str(recipe), "--out", str(run), "--train.log-every", "1"]
    with subprocess.Popen(
        [sys.executable, "-c", slow, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ
    ) as process:
        metrics = run / "cycle-1" / "sae" / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (metrics.is_file() and metrics.read_text().count("\n") > 3):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        main(["status", str(run)])
        lines = capsys.readouterr().out.splitlines()
        process.terminate()
    stages = {line.split("  ")[0]: line for line in lines}
    assert f"running (pid {process.pid})" in stages["cycle 1: train"]
    step, _, steps = stages["cycle 1: train"].split("step ")[1].partition(" of ")
    assert 3 < int(step) <= int(steps) == 50
    assert "done" in stages["cycle 0: select"]
    assert "waiting" in stages["cycle 1: score"]
    assert lines[-1] == f"Process {process.pid} is at work."
    main(["status", str(run)])
    stopped = capsys.readouterr().out
    assert "running" not in stopped
    assert "Next: cycle 1: train" in stopped
    message = refused(["status", str(run.parent)], capsys)
    assert f"the runs are below it. Give one of {run}." in message


def test_status_between_two_stages_of_a_run_at_work(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "summary.json").unlink()
    with claimed(run, read_settings(run)):
        main(["status", "run"])
    assert f"distilled core   running (pid {os.getpid()})" in capsys.readouterr().out
