"""A store is made once, and survives whatever interrupts its making."""

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.filesize import decimal as human_bytes

from conftest import Recorder
from dmsae.activations.base_model import BaseModel, ModelConfig
from dmsae.activations.harvest import Harvest, harvest
from dmsae.activations.request import HarvestConfig
from dmsae.activations.shards import ShardMaker
from dmsae.activations.splits import Split
from dmsae.activations.store import StoreWriter
from dmsae.config import to_dict
from dmsae.errors import BusyError

pytestmark = pytest.mark.usefixtures("one_thread")
MakeConfig = Callable[..., HarvestConfig]

# A real harvest in a process of its own; pauses after each batch so that there is a middle to be killed in.
SCRIPT = """
import json, sys, time
from pathlib import Path
import torch
from dmsae.activations.harvest import harvest
from dmsae.activations.request import HarvestConfig
from dmsae.activations.shards import ShardMaker
from dmsae.config import from_dict
from dmsae.errors import BusyError

torch.set_num_threads(1)
run = ShardMaker._run

def slow(self, *args):
    time.sleep(float(sys.argv[3]))
    return run(self, *args)

ShardMaker._run = slow
print("ready", flush=True)
try:
    harvest(from_dict(HarvestConfig, json.loads(sys.argv[1])), Path(sys.argv[2]))
except BusyError as error:
    print(error, flush=True)
    sys.exit(7)
"""


def start(config: HarvestConfig, root: Path, pause: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, json.dumps(to_dict(config)), str(root), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def content(store: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(store)): path.read_bytes()
        for path in sorted(store.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def test_same_request_is_never_harvested_twice(
    tiny_config: MakeConfig, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = harvest(tiny_config(), tmp_path)
    before = content(first.path)
    monkeypatch.setattr(BaseModel, "load", lambda *_: pytest.fail("the model was loaded again"))
    elsewhere = Path(shutil.copytree(tiny_model, tmp_path / "renamed-model"))
    same = [
        tiny_config(),
        tiny_config(model=ModelConfig(name=str(tiny_model), hook="model.layers.0", device="cpu")),
        tiny_config(model=ModelConfig(name=str(elsewhere), hook=0)),
        tiny_config(batch_contexts=3),
    ]
    assert {harvest(config, tmp_path).key for config in same} == {first.key}
    assert content(first.path) == before


def test_a_resumed_harvest_reports_what_is_left(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(Exception):
        pass

    def broken(self: ShardMaker, split: Split, *args: Any) -> Any:
        if split is Split.TRAIN:
            raise Stopped
        return really(self, split, *args)

    really = ShardMaker._run
    job = Harvest(tiny_config(), tmp_path)
    estimate = job.dry_run()
    with monkeypatch.context() as patched:
        patched.setattr(ShardMaker, "_run", broken)
        patched.setattr(Harvest, "estimate", lambda *_: estimate)
        with pytest.raises(Stopped):
            job.run()
    recorder = Recorder()
    store = harvest(tiny_config(), tmp_path, recorder)
    n_done = len(store.shards(Split.PAIRS)) + len(store.shards(Split.HELDOUT))
    done_bytes = 200 * (16 * (4 + 4) + 8) + 300 * (16 * 4 + 8)
    left = human_bytes(sum(estimate.size_bytes.values()) - done_bytes)
    note = recorder.notes[-1]
    assert f"{n_done} shards were finished earlier, {left} to write, about" in note


def test_damaged_files_are_made_again(tiny_config: MakeConfig, tmp_path: Path) -> None:
    whole = harvest(tiny_config(), tmp_path / "whole")
    path = Path(shutil.copytree(whole.path, tmp_path / "damaged" / whole.key))
    (path / "store.json").unlink()
    (path / "pairs" / "00001.safetensors").unlink()
    (path / "tokens" / "heldout.safetensors").write_bytes(b"")
    flipped = path / "train" / "00002.safetensors"
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\x7f")
    assert content(harvest(tiny_config(), tmp_path / "damaged").path) == content(whole.path)


def test_stopped_after_every_file_ends_the_same(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(Exception):
        pass

    config = tiny_config(train_tokens=600)
    whole = harvest(config, tmp_path / "whole")
    really = StoreWriter.add
    written = [0]

    def one_file_only(self: StoreWriter, *args: Any) -> Any:
        if written[0]:
            raise Stopped
        written[0] += 1
        return really(self, *args)

    monkeypatch.setattr(StoreWriter, "add", one_file_only)
    n_stops = 0
    while not (tmp_path / "stopped" / whole.key / "store.json").exists():
        written[0] = 0
        try:
            harvest(config, tmp_path / "stopped")
        except Stopped:
            n_stops += 1
    assert n_stops == len(whole.records) - 1
    assert content(tmp_path / "stopped" / whole.key) == content(whole.path)


def test_killed_at_random_moments_ends_bit_identical(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config(train_tokens=1000, batch_contexts=4)
    whole = harvest(config, tmp_path / "whole")
    moments = random.Random(0)
    kills = 0
    while True:
        process = start(config, tmp_path / "killed", pause=0.02)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            # Only the last attempt is given all the time it wants.
            process.communicate(timeout=None if kills >= 5 else moments.uniform(0.05, 1.2))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
            continue
        assert process.returncode == 0
        break
    assert kills >= 1
    assert content(tmp_path / "killed" / whole.key) == content(whole.path)


def test_two_processes_at_once_damage_nothing(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config(train_tokens=400, pair_tokens=50, heldout_tokens=50)
    whole = harvest(config, tmp_path / "whole")
    path = tmp_path / "shared" / whole.key
    first = start(config, tmp_path / "shared", pause=0.3)
    deadline = time.monotonic() + 120
    while not (path / "shards.jsonl").exists():
        assert first.poll() is None, first.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(BusyError, match=f"in use by process {first.pid}"):
        harvest(config, tmp_path / "shared")
    second = start(config, tmp_path / "shared", pause=0.0)
    out, _ = second.communicate(timeout=120)
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 0, errors
    # The second one came while the first was at work, or (on a slow machine) found it finished.
    assert second.returncode in (0, 7)
    assert second.returncode == 0 or f"in use by process {first.pid}" in out
    assert content(path) == content(whole.path)
