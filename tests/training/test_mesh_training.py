"""Trainings on meshes of processes against those of one process: the same numbers, and checkpoints that any resumes."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dmsae.disk import layout
from dmsae.disk.checkpoint import mesh_steps, saved_step
from dmsae.errors import CheckpointError, ConfigError
from dmsae.sae.comms import ALONE
from dmsae.sae.sae import SAE
from dmsae.sae.shard import owned_rows
from dmsae.training.learner import sharded_names
from dmsae.training.mesh import MeshConfig, join, require_fits
from mesh_ranks import join_with_other_code
from mesh_talks import same, settle
from mesh_trainings import (
    CORE,
    DETECTORS,
    lead_or_follow,
    learn,
    load_parts,
    resume_failing,
    save_parts,
    save_whole,
    specs,
    train_here,
)
from meshes import SHAPES, Meshes, join_all, meshes, start_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = [spec.name for spec in specs()]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Meshes]:
    with meshes() as opened:
        yield opened


@pytest.mark.parametrize(("shape", "name"), list(product(SHAPES, NAMES)))
def test_a_training_is_that_of_one_process(mesh: Meshes, shape: tuple[int, int], name: str) -> None:
    """Scale, geometric median, thresholds, dead counters, clip, Adam and budget included, over many steps."""
    alone = learn(ALONE, name, 12)
    assert any(result.aux_loss > 0 for result in alone.results)
    starts = sharded_names(specs())
    for rank, one in enumerate(mesh.run(shape, learn, name, 12)):
        assert one.scale == pytest.approx(alone.scale, rel=1e-12)
        for mine, theirs in zip(one.results, alone.results, strict=True):
            assert mine.loss == pytest.approx(theirs.loss, rel=1e-9)
            assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-9)
            assert mine.l0_core == theirs.l0_core
        assert one.dead_groups == alone.dead_groups
        inference, expected = torch.tensor(one.inference), torch.tensor(alone.inference)
        assert torch.allclose(inference, expected, rtol=1e-6, atol=1e-6)  # in float32
        for fact, value in alone.facts[0].items():
            assert one.facts[0][fact] == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value)
        for key, tensor in alone.tensors.items():
            rows = owned_rows(starts[key], rank % shape[1], shape[1]) if key in starts else slice(None)
            expected = tensor[rows] if tensor.ndim else tensor
            assert torch.allclose(one.tensors[key], expected, rtol=1e-8, atol=1e-9), key


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_frozen_stays_to_the_bit(mesh: Meshes, shape: tuple[int, int]) -> None:
    for one in mesh.run(shape, learn, "detector", 6):
        assert torch.equal(one.folded["W_enc"][:5], CORE.double())
        assert torch.equal(one.folded["offset"], DETECTORS.offsets_C.double())
        assert torch.equal(one.folded["threshold"][:5], DETECTORS.thresholds_C.double())
    for one in mesh.run(shape, learn, "sparse", 6):
        assert torch.equal(one.folded["W_enc"][:5], CORE.double())


@pytest.mark.parametrize("name", NAMES)
def test_a_mesh_saves_the_same_bytes_as_one_process(mesh: Meshes, tmp_path: Path, name: str) -> None:
    save_whole(ALONE, tmp_path / "alone" / "sae", name)
    whole = SAE.load(tmp_path / "alone" / "sae")
    whole.save(tmp_path / "saved" / "sae", {"made": 1})
    for shape in SHAPES:
        mesh.run(shape, save_whole, tmp_path / str(shape) / "sae", name)
    for file in ("sae.safetensors", "sae.json"):
        alone = (tmp_path / "alone" / "sae" / file).read_bytes()
        for other in ("saved", *map(str, SHAPES)):
            assert (tmp_path / other / "sae" / file).read_bytes() == alone, (other, file)
    assert whole.sample is not None
    for shape in SHAPES:
        sample = SAE.load(tmp_path / str(shape) / "sae").sample
        assert sample is not None
        torch.testing.assert_close(sample.codes(48), whole.sample.codes(48))
    assert sorted(path.name for path in (tmp_path / "(1, 2)" / "sae").iterdir()) == [
        "sae.json",
        "sae.safetensors",
        "sample.json",
        "sample.safetensors",
    ]


def test_any_mesh_resumes_any_other(mesh: Meshes, tmp_path: Path) -> None:
    """2×1 → 1×2 → one process → 2×2, against one process that was never stopped."""
    assert train_here(ALONE, tmp_path / "whole") == "finished"
    assert mesh.run((2, 1), train_here, tmp_path / "run", 5) == ["stopped"] * 2
    assert mesh_steps(tmp_path / "run") == [5]
    assert mesh.run((1, 2), train_here, tmp_path / "run", 11) == ["stopped"] * 2
    assert mesh_steps(tmp_path / "run") == [11]
    assert train_here(ALONE, tmp_path / "run", 16) == "stopped"
    assert mesh_steps(tmp_path / "run") == []
    assert saved_step(tmp_path / "run") == 16
    assert mesh.run((2, 2), train_here, tmp_path / "run") == ["finished"] * 4
    assert not list((tmp_path / "run").glob("checkpoint*"))
    for name in NAMES:
        one, other = SAE.load(tmp_path / "run" / name), SAE.load(tmp_path / "whole" / name)
        assert one.config == other.config
        for key, tensor in other.state_dict().items():
            torch.testing.assert_close(one.state_dict()[key], tensor, rtol=1e-2, atol=1e-3)
        lines = (tmp_path / "run" / name / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == 24


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_a_mesh_that_stops_and_resumes_is_one_that_did_not(
    mesh: Meshes, tmp_path: Path, shape: tuple[int, int]
) -> None:
    assert mesh.run(shape, train_here, tmp_path / "whole") == ["finished"] * 2
    assert mesh.run(shape, train_here, tmp_path / "run", 13) == ["stopped"] * 2
    assert mesh.run(shape, train_here, tmp_path / "run") == ["finished"] * 2
    for path in sorted((tmp_path / "whole").rglob("*.*")):
        if path.is_file() and path.name not in (".lock", "timing.jsonl"):
            assert (tmp_path / "run" / path.relative_to(tmp_path / "whole")).read_bytes() == path.read_bytes(), path


def run(mesh: Meshes, shape: tuple[int, int], function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run something on a mesh; that of one rank is this process."""
    return [function(ALONE, *args)] if shape == (1, 1) else mesh.run(shape, function, *args)


STARTS = {"a/W": 0, "a/V": 5, "a/none": 0}


def whole_tensors() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    return {
        "a/W": torch.randn(12, 3, generator=made),
        "a/V": torch.randn(7, generator=made),
        "a/none": torch.zeros(0, 3),
        "a/b": torch.randn(3, generator=made),
        "a/step": torch.tensor(7.0),
        "a/count": torch.arange(4),
    }


@pytest.mark.parametrize(("before", "after"), list(product([(1, 1), *SHAPES], repeat=2)))
def test_checkpoints_are_the_same_to_the_bit_on_any_mesh(
    mesh: Meshes, tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    tensors = whole_tensors()
    if before == (1, 1):
        save_parts(ALONE, tmp_path, tensors, STARTS, 5)
    else:
        mesh.run(before, save_parts, tmp_path, tensors, STARTS, 5)
    answers = (
        [load_parts(ALONE, tmp_path, STARTS)] if after == (1, 1) else mesh.run(after, load_parts, tmp_path, STARTS)
    )
    for rank, (loaded, state) in enumerate(answers):
        assert state == {"step": 5}
        assert set(loaded) == set(tensors)
        for name, tensor in tensors.items():
            mine = tensor[owned_rows(STARTS[name], rank % after[1], after[1])] if name in STARTS else tensor
            assert torch.equal(loaded[name], mine), name


def test_the_newest_checkpoint_counts(mesh: Meshes, tmp_path: Path) -> None:
    tensors, starts = whole_tensors(), STARTS
    mesh.run((1, 2), save_parts, tmp_path, tensors, starts, 5)
    copied = tmp_path / "kept"
    shutil.copytree(tmp_path / layout.MESH_CHECKPOINT, copied)
    save_parts(ALONE, tmp_path, tensors, starts, 9)
    assert not (tmp_path / layout.MESH_CHECKPOINT).exists()
    shutil.copytree(copied, tmp_path / layout.MESH_CHECKPOINT)  # as if killed before the older one was removed
    assert load_parts(ALONE, tmp_path, starts)[1] == {"step": 9}
    (tmp_path / layout.MESH_CHECKPOINT / "unfinished").mkdir()  # as if killed while it was written
    mesh.run((1, 2), save_parts, tmp_path, tensors, starts, 12)
    assert sorted(path.name for path in (tmp_path / layout.MESH_CHECKPOINT).iterdir()) == ["12"]
    assert not (tmp_path / layout.CHECKPOINT).exists()
    assert saved_step(tmp_path) == 12


def test_damage_is_noticed_wherever_it_is(mesh: Meshes, tmp_path: Path) -> None:
    mesh.run((1, 2), save_parts, tmp_path, whole_tensors(), STARTS, 5)
    files = sorted((tmp_path / layout.MESH_CHECKPOINT / "5").iterdir())
    assert len(files) == 5  # from each rank its part of the large tensor and one file of small ones; the state
    for path in files:
        original = path.read_bytes()
        for damaged in (b"", original[:-20], original[:-30] + bytes([original[-30] ^ 1]) + original[-29:]):
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match="5"):
                load_parts(ALONE, tmp_path, STARTS)
        path.write_bytes(original)
    assert load_parts(ALONE, tmp_path, STARTS)[1] == {"step": 5}


@pytest.mark.parametrize(
    "what",
    [
        "dmsae.training.passes.require_shared",
        "dmsae.training.checkpoints.Checkpoints.load",
        "dmsae.training.learner.Learner.restore",
        "dmsae.training.trainer.require_trainable",
    ],
)
def test_a_rank_that_cannot_resume_says_so_on_all(mesh: Meshes, tmp_path: Path, what: str) -> None:
    assert mesh.run((2, 1), train_here, tmp_path, 3) == ["stopped"] * 2
    assert mesh.run((2, 1), resume_failing, tmp_path, what, 1) == ["MeshError: Rank 1 of 2: rank 1 is out of luck"] * 2
    assert mesh.run((2, 1), train_here, tmp_path) == ["finished"] * 2


def test_an_error_on_one_rank_is_heard_on_all(mesh: Meshes) -> None:
    assert mesh.run((2, 2), settle, []) == ["nothing"] * 4
    heard = mesh.run((2, 2), settle, [2])
    assert heard == ["MeshError: Rank 2 of 4: rank 2 is out of luck"] * 4
    assert mesh.run((1, 2), settle, [0]) == [
        "StoreError: rank 0 is out of luck",
        "MeshError: Rank 0 of 2: rank 0 is out of luck",
    ]


def test_a_store_that_one_rank_cannot_see_is_named_on_all(mesh: Meshes, tmp_path: Path) -> None:
    assert mesh.run((2, 1), lead_or_follow, tmp_path / "run") == ["Rank 1 of 2: There is no store here."] * 2
    assert not (tmp_path / "run").exists()


def test_ranks_with_other_settings_are_named(mesh: Meshes) -> None:
    assert mesh.run((2, 2), same, [8, 8, 8, 8]) == ["nothing"] * 4
    for heard in mesh.run((2, 2), same, [8, 8, 9, 8]):
        assert "Rank 2 of 4" in heard
        assert "batch_size: was 8, now 9" in heard


def test_ranks_with_other_code_are_named(tmp_path: Path) -> None:
    assert join_all(start_ranks(2, join_with_other_code, tmp_path)) == [2, 2]
    for rank in range(2):
        said = (tmp_path / f"rank-{rank}.log").read_text()
        assert "Rank 1 of 2 is not what rank 0 is" in said
        assert 'code.sha256: was "code of rank 0", now "code of rank 1"' in said


def test_a_mesh_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"batch_size = 9; it must be a multiple of mesh.data \(2\)"):
        require_fits(MeshConfig(data=2), 9, {})
    with pytest.raises(ConfigError, match=r"a: width = 9; it must be a multiple of mesh.latents \(2\)"):
        require_fits(MeshConfig(latents=2), 9, {"a": 9})
    with pytest.raises(ConfigError, match=r"mesh\.data = 3; it must be at most 2, the training shards of the store"):
        require_fits(MeshConfig(data=3), 9, {}, 2)
    require_fits(MeshConfig(data=2, latents=2), 8, {}, 2)
    with pytest.raises(ConfigError, match=r"mesh\.data = 0"):
        MeshConfig(data=0)
    assert join(MeshConfig()) is ALONE
    with pytest.raises(ConfigError, match=r"this is one process\. Start it with: torchrun --nproc-per-node 4 -m dmsae"):
        join(MeshConfig(data=2, latents=2))
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="2 × 2, but torchrun started 3 processes"):
        join(MeshConfig(data=2, latents=2))


def test_gloo_keeps_no_records_unless_asked_for() -> None:
    code = (
        "import json, torch, torch.distributed as dist\n"
        "from dmsae.training.mesh import MeshConfig, join\n"
        "join(MeshConfig(), 'cpu')\n"
        "dist.all_reduce(torch.zeros(1))\n"
        "print(len(json.loads(torch._C._distributed_c10d._dump_fr_trace_json()).get('entries', [])))\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for asked, least in (({}, 0), ({"TORCH_FR_BUFFER_SIZE": "100"}, 1)):
        given = {name: value for name, value in os.environ.items() if name != "TORCH_FR_BUFFER_SIZE"} | alone | asked
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=given)
        assert done.returncode == 0, done.stderr
        n_records = int(done.stdout.splitlines()[-1])
        assert n_records >= least if asked else n_records == 0
