"""Checkpoints from strangers: whatever is in them ends in an error of ours, in bounded memory, and no code runs."""

import json
import os
import pickle
import random
import resource
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dmsae.errors import CheckpointError, DmsaeError
from dmsae.formats import load_any

STATE: dict[str, Any] = {
    "W_enc": torch.randn(4, 8, generator=torch.Generator().manual_seed(0)),
    "b_enc": torch.zeros(8),
    "W_dec": torch.nn.functional.normalize(torch.randn(8, 4, generator=torch.Generator().manual_seed(1))),
    "b_dec": torch.zeros(4),
    "threshold": torch.tensor(0.1),
    "k": torch.tensor(2),
    "group_sizes": torch.tensor([2, 6]),
}
CFG: dict[str, Any] = {
    "architecture": "jumprelu",
    "metadata": {"sae_lens_version": "6.0.0", "training_architecture_details": {"k": 2, "matryoshka_widths": [2, 8]}},
}


def write(directory: Path, **changes: Any) -> Path:
    directory.mkdir(exist_ok=True)
    torch.save({name: value for name, value in (STATE | changes).items() if value is not None}, directory / "ae.pt")
    return directory


def write_saelens(directory: Path, config: Any = CFG, **changes: Any) -> Path:
    directory.mkdir(exist_ok=True)
    tensors = {name: STATE[name].contiguous() for name in ("W_enc", "b_enc", "W_dec", "b_dec")}
    save_file(tensors | {"threshold": torch.full((8,), 0.1)} | changes, directory / "sae_weights.safetensors")
    (directory / "cfg.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return directory


def test_what_is_left_alone_loads(tmp_path: Path) -> None:
    assert load_any(write(tmp_path / "dl")).sae.config.prefixes == (2, 8)
    ordered = OrderedDict(STATE, W_enc=torch.nn.Parameter(STATE["W_enc"].half()), b_dec=torch.zeros(8)[::2])
    ordered._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]  # as a module's state_dict has it
    torch.save(ordered, tmp_path / "dl" / "ae.pt")
    assert torch.equal(load_any(tmp_path / "dl").sae.W_enc.T, STATE["W_enc"].half().float())
    assert load_any(write_saelens(tmp_path / "sl")).sae.config.prefixes == (2, 8)


@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps(2), b"PK\x03\x04", b"\x80" * 99])
def test_what_torch_did_not_write_is_refused(tmp_path: Path, content: bytes) -> None:
    write(tmp_path)
    (tmp_path / "ae.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"ae\.pt"):
        load_any(tmp_path)


def test_mutated_and_truncated_files_end_in_a_typed_error(tmp_path: Path) -> None:
    data = (write(tmp_path) / "ae.pt").read_bytes()
    draws = random.Random(0)
    for _ in range(400):
        damaged = bytearray(data[: draws.randrange(len(data))] if draws.random() < 0.2 else data)
        for _ in range(draws.choice([1, 2, 8]) if damaged else 0):
            damaged[draws.randrange(len(damaged))] = draws.randrange(256)
        (tmp_path / "ae.pt").write_bytes(damaged)
        try:
            load_any(tmp_path)
        except DmsaeError as error:
            assert str(tmp_path) in str(error)  # noqa: PT017 (some mutations change nothing that is read)


class _Code:
    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._marker),)


def test_no_code_of_a_pickle_runs(tmp_path: Path) -> None:
    write(tmp_path, k=_Code(tmp_path / "ran"))
    with pytest.raises(CheckpointError, match=r"names posix\.mkdir"):
        load_any(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"k": torch.tensor([2, 3])},
        {"k": torch.tensor(float("nan"))},
        {"k": "two"},
        {"k": torch.tensor(-1)},
        {"k": torch.tensor(2**62)},
        {"group_sizes": torch.tensor(8)},
        {"group_sizes": torch.tensor([[2, 6]])},
        {"group_sizes": torch.tensor([2.5, 5.5])},
        {"group_sizes": "26"},
        {"group_sizes": [2, None]},
        {"group_sizes": []},
        {"threshold": torch.zeros(3)},
        {"threshold": 0.1},
        {"W_enc": torch.tensor(1.0)},
        {"W_enc": torch.zeros(4, 8, 1)},
        {"W_enc": torch.zeros(4, 8).to_sparse()},
        {"W_enc": torch.zeros(4, 8, device="meta")},
        {"W_enc": torch.zeros(4, 8, dtype=torch.complex64)},
        {"W_enc": torch.zeros(4, 8, dtype=torch.int64)},
        {"W_enc": torch.full((4, 8), float("nan"))},
        {"b_enc": torch.tensor(1.0)},
        {"b_dec": None},
        {"W_dec": torch.full((8, 4), 1e38), "W_enc": torch.full((4, 8), 1e38)},
    ],
)
def test_odd_values_are_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load_any(write(tmp_path, **changes))


@pytest.mark.parametrize(
    "config",
    [
        "[" * 100_000,
        "[]",
        "\ud800".encode("utf8", "surrogatepass").decode("latin1"),
        CFG | {"metadata": []},
        CFG | {"metadata": {"sae_lens_version": 6}},
        CFG | {"metadata": {"sae_lens_version": "9" * 5000}},
        CFG | {"metadata": CFG["metadata"] | {"training_architecture_details": [1]}},
        CFG | {"metadata": CFG["metadata"] | {"training_architecture_details": {"k": float("inf")}}},
        CFG | {"metadata": CFG["metadata"] | {"training_architecture_details": {"k": "2"}}},
        CFG | {"metadata": CFG["metadata"] | {"training_architecture_details": {"k": 2, "matryoshka_widths": 8}}},
        CFG | {"metadata": CFG["metadata"] | {"training_architecture_details": {"k": 2, "matryoshka_widths": ["a"]}}},
        CFG | {"architecture": ["jumprelu"]},
        CFG | {"architecture": "batchtopk"},
        CFG | {"normalize_activations": {}},
    ],
)
def test_odd_configs_are_named(tmp_path: Path, config: Any) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load_any(write_saelens(tmp_path, config))


def test_odd_tensors_of_saelens_are_named(tmp_path: Path) -> None:
    for changes in ({"b_enc": torch.tensor(0.0)}, {"W_enc": torch.zeros(2)}, {"W_dec": torch.zeros(8, 4).int()}):
        with pytest.raises(CheckpointError, match=str(tmp_path)):
            load_any(write_saelens(tmp_path, **changes))


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_sizes_are_checked_before_anything_is_allocated(tmp_path: Path) -> None:
    """Strides of 0 make two gigabytes of three kilobytes."""
    write(tmp_path, W_enc=torch.zeros(1).expand(20_000, 30_000))
    before = peak_bytes()
    with pytest.raises(CheckpointError, match="does not fit its storage"):
        load_any(tmp_path)
    assert peak_bytes() - before < 200 << 20


def test_a_compressed_archive_is_refused_unread(tmp_path: Path) -> None:
    write(tmp_path)
    with zipfile.ZipFile(tmp_path / "ae.pt") as plain:
        records = {name: plain.read(name) for name in plain.namelist()}
    with zipfile.ZipFile(tmp_path / "ae.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in records.items():
            packed.writestr(name, data)
    with pytest.raises(CheckpointError, match="is compressed, which"):
        load_any(tmp_path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    write_saelens(tmp_path)
    (tmp_path / "cfg.json").unlink()
    os.mkfifo(tmp_path / "cfg.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        load_any(tmp_path)
