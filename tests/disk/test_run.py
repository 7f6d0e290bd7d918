"""The run directory: what it belongs to, and that one process at a time works in it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dmsae.disk.run import claimed, differences, read_settings
from dmsae.errors import BusyError, CheckpointError, ConfigError

SETTINGS = {"lr": 0.1, "sae": {"k": 3, "prefixes": [1, 2]}}


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_the_same_settings_are_accepted_again(tmp_path: Path) -> None:
    for _ in range(2):
        with claimed(tmp_path / "run", SETTINGS):
            assert read_settings(tmp_path / "run") == SETTINGS


def test_settings_that_json_changes_are_still_the_same(tmp_path: Path) -> None:
    for _ in range(2):
        with claimed(tmp_path, {"prefixes": (1, 2)}):
            pass


def test_other_settings_are_refused_with_the_difference_and_nothing_touched(tmp_path: Path) -> None:
    with claimed(tmp_path, SETTINGS):
        pass
    before = contents(tmp_path)
    with (
        pytest.raises(ConfigError) as error,
        claimed(tmp_path, {"lr": 0.2, "sae": {"k": 3, "prefixes": [1, 4]}, "seed": 1}),
    ):
        pytest.fail("claimed a directory of another run")
    message = str(error.value)
    assert "lr: was 0.1, now 0.2" in message
    assert "sae.prefixes: was [1, 2], now [1, 4]" in message
    assert "seed: was null, now 1" in message
    assert "sae.k" not in message
    assert contents(tmp_path) == before


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all of it")
    with (
        pytest.raises(ConfigError, match=r"is not empty and holds no run \(there is thesis.tex\)"),
        claimed(tmp_path, {}),
    ):
        pytest.fail("claimed somebody's directory")
    assert contents(tmp_path) == {"thesis.tex": b"all of it"}


def test_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_text("")
    with pytest.raises(ConfigError, match="is a file"), claimed(path, {}):
        pytest.fail("claimed a file")


def test_a_run_killed_while_it_wrote_its_settings_can_start_again(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / "config.json.tmp").write_text('{"lr"')
    with claimed(tmp_path, SETTINGS):
        assert read_settings(tmp_path) == SETTINGS
    assert sorted(contents(tmp_path)) == [".lock", "config.json"]


def test_damaged_settings_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"lr"')
    with pytest.raises(CheckpointError, match=r"config\.json is not readable JSON"), claimed(tmp_path, SETTINGS):
        pytest.fail("claimed a run that cannot be read")
    with pytest.raises(CheckpointError, match="holds no run"):
        read_settings(tmp_path / "nowhere")


def test_a_second_process_cannot_enter(tmp_path: Path) -> None:
    code = (
        "import sys, json; from pathlib import Path; from dmsae.disk.run import claimed\n"
        "with claimed(Path(sys.argv[1]), json.loads(sys.argv[2])):\n"
        "    print('mine', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), json.dumps(SETTINGS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == "mine\n"
        with pytest.raises(BusyError, match=f"in use by process {holder.pid}"), claimed(tmp_path, SETTINGS):
            pytest.fail("two processes claimed one directory")
        holder.kill()
    with claimed(tmp_path, SETTINGS):
        pass


def test_nested_differences_are_named_by_their_path() -> None:
    assert differences({"a": {"b": [1]}}, {"a": {"b": [1]}}) == []
    assert differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}}) == ["a.b: was 1, now 3", "c: was 2, now null"]
    assert differences({"a": {"b": 1}}, {"a": None}) == ['a: was {"b": 1}, now null']
