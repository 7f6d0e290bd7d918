"""The run directory: what it belongs to, and that one process at a time works in it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dmsae.disk.run import claimed, differences, read_settings, running_process
from dmsae.errors import BusyError, CheckpointError, ConfigError, StoreError

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


@pytest.mark.parametrize("is_there", [False, True])
def test_a_start_that_fails_leaves_nothing(tmp_path: Path, is_there: bool) -> None:
    run = tmp_path / "runs" / "mine"
    if is_there:
        run.mkdir(parents=True)
    with pytest.raises(StoreError), claimed(run, SETTINGS):
        raise StoreError("no such store")
    assert run.exists() == run.parent.exists() == is_there
    assert not is_there or not contents(run)
    with claimed(run, {"other": 1}):
        pass


def test_a_failure_later_on_keeps_what_was_done(tmp_path: Path) -> None:
    with pytest.raises(StoreError), claimed(tmp_path / "begun", SETTINGS):
        _write_then_fail(tmp_path / "begun")
    assert read_settings(tmp_path / "begun") == SETTINGS
    with claimed(tmp_path / "resumed", SETTINGS):
        pass
    with pytest.raises(StoreError), claimed(tmp_path / "resumed", SETTINGS):
        raise StoreError("no such store")
    assert read_settings(tmp_path / "resumed") == SETTINGS
    with pytest.raises(KeyboardInterrupt), claimed(tmp_path / "interrupted", SETTINGS):
        raise KeyboardInterrupt
    assert read_settings(tmp_path / "interrupted") == SETTINGS


def _write_then_fail(directory: Path) -> None:
    (directory / "metrics.jsonl").touch()
    raise StoreError("the disk is gone")


def test_settings_that_may_change_are_brought_up_to_date(tmp_path: Path) -> None:
    with claimed(tmp_path, {"cycles": 3, "k": 1}):
        pass
    with claimed(tmp_path, {"cycles": 5, "k": 1}, may_change=("cycles",)):
        assert read_settings(tmp_path) == {"cycles": 5, "k": 1}
    with (
        pytest.raises(ConfigError, match="k: was 1, now 2"),
        claimed(tmp_path, {"cycles": 6, "k": 2}, may_change=("cycles",)),
    ):
        pytest.fail("claimed a directory of another run")
    assert read_settings(tmp_path) == {"cycles": 5, "k": 1}


def test_another_kind_of_run_is_one_sentence(tmp_path: Path) -> None:
    made = {
        "a transfer": {"kind": "train", "made_from": {"transferred": "ab"}, "saes": {"dense-k4": {"k": 4}}},
        "the training of one SAE": {"kind": "train", "made_from": {"store": "ab"}, "saes": {"sae": {"k": 4}}},
        "a distillation": {"kind": "distill", "distill": {"k": 4}},
        "one cycle of a distillation": {"kind": "train", "made_from": {"cycle": 1}},
    }
    for kind, settings in made.items():
        directory = tmp_path / kind.replace(" ", "-")
        with claimed(directory, settings):
            pass
        for other, wanted in made.items():
            if other != kind:
                with pytest.raises(ConfigError) as error, claimed(directory, wanted):
                    pytest.fail("claimed a directory of another run")
                assert (
                    str(error.value)
                    == f"{directory} holds {kind}, as its config.json says, and this is {other}: give a new directory."
                )


def test_a_folder_of_runs_suggests_them(tmp_path: Path) -> None:
    for name in ("distill", "transfer"):
        with claimed(tmp_path / name, {"kind": "train"}):
            pass
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "config.json").write_text('{"trainer": {}}')
    with pytest.raises(CheckpointError) as error:
        read_settings(tmp_path)
    assert str(error.value).endswith(f"Give one of {tmp_path / 'distill'}, {tmp_path / 'transfer'}.")
    with pytest.raises(CheckpointError, match="there is no such directory"):
        read_settings(tmp_path / "nowhere")


def test_who_works_in_a_directory_is_told_without_disturbing(tmp_path: Path) -> None:
    assert running_process(tmp_path) is None
    with claimed(tmp_path, SETTINGS):
        assert running_process(tmp_path) == running_process(tmp_path) == os.getpid()
    assert running_process(tmp_path) is None
    (tmp_path / ".lock").write_text("999999")  # killed: its pid is still there, its lock is not
    assert running_process(tmp_path) is None
    assert (tmp_path / ".lock").read_text() == "999999"
    with claimed(tmp_path, SETTINGS):
        pass


@pytest.mark.parametrize("content", ["[]", "3", "null", "[" * 100_000, "\x00"])
def test_settings_that_are_no_settings_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_settings(tmp_path)


def test_a_directory_whose_name_is_not_utf8_is_refused_at_once(tmp_path: Path) -> None:
    directory = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    with pytest.raises(ConfigError, match="the name is not UTF-8"), claimed(directory, {}):
        pytest.fail("claimed a directory that safetensors cannot name")
    assert not directory.exists()
