"""The core on disk: it comes back as it was, or not at all."""

import json
from pathlib import Path

import pytest
import torch

from dmsae.cores.core import Core
from dmsae.errors import CheckpointError
from three_cycles import three_cycles


def assert_same(one: Core, other: Core) -> None:
    for name in ("encoder_CD", "scores_C", "slots_C"):
        first, second = getattr(one, name), getattr(other, name)
        assert first.dtype == second.dtype
        assert torch.equal(first, second)
    assert (one.lineage, one.cycle, one.provenance) == (other.lineage, other.cycle, other.provenance)


@pytest.mark.parametrize("n_latents", [2, 0])
def test_a_core_survives_the_disk(tmp_path: Path, n_latents: int) -> None:
    core = three_cycles().cores[2].take(list(range(n_latents)))
    core.save(tmp_path)
    assert_same(Core.load(tmp_path), core)
    facts = json.loads((tmp_path / "core.json").read_text())
    assert facts["n_latents"] == n_latents
    assert facts["provenance"]["model"]["hook"] == "layers.8"


def test_the_core_of_a_run_is_its_distilled_one(tmp_path: Path) -> None:
    first, second, third = three_cycles().cores
    first.save(tmp_path / "cycle-0")
    with pytest.raises(CheckpointError, match="holds no core, and is not the directory of a finished distillation"):
        Core.load(tmp_path)
    second.save(tmp_path / "distilled")
    assert_same(Core.load(tmp_path), second)
    assert_same(Core.load(str(tmp_path / "cycle-0")), first)
    third.save(tmp_path)  # a core that is in the directory itself goes first
    assert_same(Core.load(tmp_path), third)


@pytest.mark.parametrize(
    ("name", "absent"), [("core.json", "holds no core"), ("core.safetensors", r"core\.safetensors is missing")]
)
def test_a_changed_byte_or_a_missing_file_is_noticed(tmp_path: Path, name: str, absent: str) -> None:
    three_cycles().cores[1].save(tmp_path)
    path = tmp_path / name
    data = path.read_bytes()
    for at in (len(data) // 3, len(data) - 9):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(CheckpointError, match=name):
            Core.load(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=absent):
        Core.load(tmp_path)
