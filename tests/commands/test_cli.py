"""The command line says what it did or, in one message, what went wrong."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from dmsae import __version__, cli
from dmsae.activations.request import HarvestConfig

pytestmark = pytest.mark.usefixtures("one_thread")
GROUPS = {
    "assets": ("list", "fetch", "verify", "where"),
    "store": ("list", "show", "verify", "import", "remove"),
    "core": ("show", "diff", "select", "survival", "ablate"),
    "hub": ("push", "pull"),
}
SINGLE = (
    "harvest",
    "train",
    "distill",
    "transfer",
    "evaluate",
    "read",
    "plan",
    "steer",
    "export",
    "import",
    "experiment",
    "figures",
    "report",
    "status",
)
VERBS = [(name, verb) for name, verbs in GROUPS.items() for verb in verbs]
for both, module in (("evaluate", "evaluate"), ("experiment", "experiments")):
    VERBS += [(both, verb) for verb in import_module(f"dmsae.commands.{module}").COMMANDS]
COMMANDS = [[], *([name] for name in (*GROUPS, *SINGLE)), *map(list, VERBS)]


def test_these_are_all_commands() -> None:
    assert set(cli.ENTRIES) == {*GROUPS, *SINGLE}
    for name, verbs in GROUPS.items():
        assert tuple(import_module(f"dmsae.commands.{cli.ENTRIES[name].module}").COMMANDS) == verbs


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command, "--help"])
    assert stopped.value.code == 0
    assert f"usage: {' '.join(['dmsae', *command])}" in capsys.readouterr().out


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["harvset"])
    assert stopped.value.code == 2
    assert "harvset" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["--version"])
    assert capsys.readouterr().out == f"dmsae {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["store", "show", "abc"], "No store under"),
        (["assets", "fetch", "smollm3"], "Unknown asset 'smollm3'"),
        (["harvest", "--model.name", "smolm2-135m"], "Did you mean 'smollm2-135m'"),
        (["harvest", "--recipe", "dmeo"], "Did you mean 'demo'"),
        (["harvest", "--model.name", "smollm2-135m"], "Run 'dmsae assets fetch smollm2-135m'"),
    ],
)
def test_errors_are_one_message_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_errors_in_a_real_process_have_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dmsae", "store", "show", "x", "--root", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: No store under")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    ["--help", "--version", "store list", "core show --help", "status {run}", "assets list", "assets where"],
)
def test_commands_that_need_no_tensors_start_without_torch(arguments: str, tmp_path: Path) -> None:
    distillation = {"kind": "distill", "cycles": 1}
    (tmp_path / "config.json").write_text(json.dumps(distillation))
    code = (
        "import atexit, sys\n"
        "heavy = {'torch', 'transformers', 'datasets', 'scipy'}\n"
        "atexit.register(lambda: print('imported:', *sorted(heavy & set(sys.modules))))\n"
        "from dmsae.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    command = [sys.executable, "-c", code, *arguments.format(run=tmp_path).split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].strip() == "imported:"


def test_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("dmsae.commands.assets.cache_directory", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["assets", "where"])


def test_an_interrupt_says_that_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dmsae.commands.assets.cache_directory", interrupted)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["assets", "where"])
    assert stopped.value.code == 130
    assert "run the same command to resume" in capsys.readouterr().err


def test_assets_are_listed_with_licence_and_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["assets", "list"])
    out = capsys.readouterr().out
    assert "smollm2-135m" in out
    assert "Apache-2.0" in out
    cli.main(["assets", "where"])
    assert capsys.readouterr().out.strip() == str(tmp_path / "cache")


def test_harvest_list_show_verify_remove(
    tiny_config: Callable[..., HarvestConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> str:
        cli.main([*arguments, "--root", root])
        return capsys.readouterr().out

    root = str(tmp_path / "stores")
    config = tiny_config()
    bracketed = tmp_path / "data[1]"
    bracketed.mkdir()
    (bracketed / "corpus.txt").write_bytes(Path(config.text.source).read_bytes())
    settings = {
        "harvest": {
            "train_tokens": 500,
            "heldout_tokens": 100,
            "pair_tokens": 50,
            "shard_tokens": 256,
            "model": {"name": config.model.name, "hook": 1},
            "tokens": {"context_length": 16},
            "text": {"source": str(bracketed), "txt_documents": "line", "heldout_fraction": 0.2},
        }
    }
    recipe = tmp_path / "own.toml"
    recipe.write_text(_toml(settings))

    assert "No stores under" in run("store", "list")
    estimate = run("harvest", "--recipe", str(recipe), "--model.hook", "0", "--dry-run")
    assert "500 × 16" in estimate
    assert not Path(root).exists()

    shown = run("harvest", "--recipe", str(recipe), "--model.hook", "0")
    key = shown.split()[1]
    assert len(key) == 16
    assert "model.layers.0" in shown, "the flag does not win over the recipe"
    assert "500 × 16" in shown
    assert "data[1]" in shown
    assert run("harvest", "--recipe", str(recipe), "--model.hook", "0") == shown
    assert run("store", "show", key[:6]) == shown

    listed = run("store", "list")
    assert key in listed
    assert "complete" in listed
    assert f"{key}: " in run("store", "verify", key)

    shard = next((Path(root) / key / "train").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(SystemExit) as stopped:
        run("store", "verify", key)
    assert stopped.value.code == 2
    assert shard.name in capsys.readouterr().err

    assert "Removed" in run("store", "remove", key)
    assert not (Path(root) / key).exists()


def test_after_a_polite_kill_the_same_command_resumes(
    tiny_config: Callable[..., HarvestConfig], tmp_path: Path
) -> None:
    config = tiny_config()
    arguments = ["harvest", "--root", str(tmp_path), "--model.name", config.model.name, "--model.hook", "0"]
    arguments += ["--text.source", config.text.source, "--text.txt-documents", "line", "--tokens.context-length", "16"]
    arguments += ["--text.heldout-fraction", "0.2", "--shard-tokens", "256", "--batch-contexts", "1"]
    arguments += ["--train-tokens", "800", "--heldout-tokens", "100", "--pair-tokens", "50"]
    slow = "import sys, time; from dmsae import cli; from dmsae.activations.shards import ShardMaker;"
    slow += "run = ShardMaker._run; ShardMaker._run = lambda *a: (time.sleep(0.05), run(*a))[1]; cli.main(sys.argv[1:])"
    process = subprocess.Popen([sys.executable, "-c", slow, *arguments], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("*/train/*.safetensors")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.terminate()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "run the same command to resume" in errors
    assert "Traceback" not in errors
    assert not list(tmp_path.glob("*/store.json"))
    cli.main(arguments)
    assert list(tmp_path.glob("*/store.json"))


def test_an_error_of_the_operating_system_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused() -> None:
        raise PermissionError(13, "Permission denied", "/locked")

    monkeypatch.setattr("dmsae.commands.assets.cache_directory", refused)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["assets", "where"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: [Errno 13] Permission denied: '/locked'\n"


def test_output_that_nobody_reads_to_the_end_leaves_no_traceback() -> None:
    command = [sys.executable, "-c", "from dmsae.cli import main; main(['harvest', '--help'])"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == 1


def test_an_error_in_a_recipe_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[distill]\nwidht = 64\n")
    with pytest.raises(SystemExit):
        cli.main(["distill", "--recipe", str(recipe), "--out", str(tmp_path / "run")])
    assert f"Recipe {recipe}: Unknown setting distill.widht. Did you mean 'width'?" in capsys.readouterr().err


def _toml(values: dict[str, Any], path: str = "") -> str:
    """Return nested settings as TOML, whose scalars are written like those of JSON."""
    tables = {name: value for name, value in values.items() if isinstance(value, dict)}
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items() if name not in tables]
    inner = [_toml(value, f"{path}.{name}".lstrip(".")) for name, value in tables.items()]
    return "\n".join([f"[{path}]" if path else "", *lines, *inner])


def test_repeated_signals_end_a_command_without_a_traceback() -> None:
    code = (
        "import time\nfrom dmsae import cli\n"
        "def work(*_):\n"
        "    print('ready', flush=True)\n"
        "    try: time.sleep(600)\n"
        "    finally: time.sleep(600)\n"
        "cli._app = lambda _: (type('App', (), {'cli': staticmethod(lambda **_: work())}), None)\n"
        "cli.main(['status'])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors


def test_help_leaves_out_the_examples_of_docstrings(capsys: pytest.CaptureFixture[str]) -> None:
    from dmsae.cores.attribution import AttributionConfig

    with pytest.raises(SystemExit):
        cli.main(["distill", "--help"])
    assert ">>>" not in capsys.readouterr().out
    assert ">>>" in (AttributionConfig.__doc__ or ""), "they are put back"
