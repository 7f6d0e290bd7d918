"""Checkpoints: whole or absent, and noticed when damaged."""

import resource
import signal
from pathlib import Path

import pytest
import torch

from dmsae.disk.checkpoint import load_checkpoint, read_state, remove_checkpoint, save_checkpoint
from dmsae.errors import CheckpointError

TENSORS = {
    "weights": torch.randn(8, 5, generator=torch.Generator().manual_seed(0)),
    "step": torch.tensor(3.0),
    "none": torch.zeros(0, 5),
    "counts": torch.arange(4),
    "turned": torch.arange(6.0).view(2, 3).T,
}
STATE = {"step": 3, "threshold": 0.1 + 0.2, "warm_start": None, "learners": {"a": {"cause": "“nothing”"}}}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, TENSORS, STATE)
    return path


def test_everything_comes_back_to_the_bit(checkpoint: Path) -> None:
    tensors, state = load_checkpoint(checkpoint)
    assert state == STATE
    assert read_state(checkpoint) == STATE
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
    assert [file.name for file in checkpoint.parent.iterdir()] == [checkpoint.name]


def test_a_loaded_checkpoint_can_be_replaced(checkpoint: Path) -> None:
    tensors, _ = load_checkpoint(checkpoint)
    save_checkpoint(checkpoint, {"weights": tensors["weights"] + 1}, {})
    assert torch.equal(tensors["weights"], TENSORS["weights"])
    assert torch.equal(load_checkpoint(checkpoint)[0]["weights"], TENSORS["weights"] + 1)


def test_a_flip_of_any_bit_is_noticed(checkpoint: Path) -> None:
    data = checkpoint.read_bytes()
    original = load_checkpoint(checkpoint)
    for position in range(0, len(data), 3):
        flipped = bytearray(data)
        flipped[position] ^= 1 << (position % 8)
        checkpoint.write_bytes(flipped)
        try:
            tensors, state = load_checkpoint(checkpoint)
        except CheckpointError as error:
            assert str(checkpoint) in str(error)  # noqa: PT017 (some flips change nothing)
        else:
            assert state == original[1]
            assert all(torch.equal(tensors[name], tensor) for name, tensor in original[0].items())


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.99])
def test_a_truncated_file_is_named(checkpoint: Path, share: float) -> None:
    data = checkpoint.read_bytes()
    checkpoint.write_bytes(data[: int(share * len(data))])
    for read in (load_checkpoint, read_state):
        with pytest.raises(CheckpointError, match=r"checkpoint\.safetensors cannot be read.*Remove it to start"):
            read(checkpoint)


def test_a_full_disk_keeps_the_last_checkpoint(checkpoint: Path) -> None:
    """A limit on file sizes stands in for a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="could not be written"):
            save_checkpoint(checkpoint, {"weights": torch.zeros(10_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert load_checkpoint(checkpoint)[1] == STATE
    assert [file.name for file in checkpoint.parent.iterdir()] == [checkpoint.name]


def leave_half(checkpoint: Path) -> None:
    """Leave what a writer leaves that is killed: the hidden file through which safetensors writes."""
    folder = checkpoint.with_name("checkpoint.safetensors.tmp")
    folder.mkdir()
    (folder / ".tmpAbCdEf").write_bytes(b"half")


def test_everything_is_written_in_a_folder_that_can_be_removed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[Path] = []

    def save(_tensors: object, place: Path, _metadata: object) -> None:
        places.append(place)
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save_file", save)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(checkpoint, TENSORS, STATE)
    assert places[0].parent == checkpoint.with_name("checkpoint.safetensors.tmp")
    assert list(checkpoint.parent.iterdir()) == [checkpoint]


def test_saving_takes_what_a_killed_writer_left(checkpoint: Path) -> None:
    leave_half(checkpoint)
    save_checkpoint(checkpoint, TENSORS, STATE)
    assert list(checkpoint.parent.iterdir()) == [checkpoint]


def test_removing_also_takes_what_a_killed_writer_left(checkpoint: Path) -> None:
    leave_half(checkpoint)
    for _ in range(2):
        remove_checkpoint(checkpoint)
        assert list(checkpoint.parent.iterdir()) == []


def test_a_link_in_the_place_of_the_temporary_folder_is_not_followed(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("all of it")
    checkpoint.with_name("checkpoint.safetensors.tmp").symlink_to(tmp_path / "elsewhere")
    save_checkpoint(checkpoint, TENSORS, STATE)
    assert [file.name for file in (tmp_path / "elsewhere").iterdir()] == ["precious"]
    assert load_checkpoint(checkpoint)[1] == STATE
