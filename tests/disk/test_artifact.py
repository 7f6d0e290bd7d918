"""Sealed results: any change is noticed, and so is a file of another run or cycle in the place of this one's."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dmsae.disk.artifact import bound, read_artifact, read_sealed, write_artifact, write_sealed
from dmsae.errors import CheckpointError


def test_a_flip_of_any_bit_of_sealed_facts_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_sealed(path, {"state": "finished", "births": {2: 1, 10: 3}, "cause": "“none”", "x": [0.1, float("nan")]})
    written, data = repr(read_sealed(path)), path.read_bytes()

    @given(st.integers(0, 8 * len(data) - 1))
    def flip(bit: int) -> None:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            assert repr(read_sealed(path)) == written  # a flip between blanks changes nothing
        except CheckpointError as error:
            assert str(path) in str(error)  # noqa: PT017 (most flips are noticed)

    flip()


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"{}", b"\xff", b"[" * 100_000, b'{"a": 1}'])
def test_what_is_not_sealed_json_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "fidelity.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"fidelity\.json is not the JSON of a saved fidelity.*Remove it"):
        read_sealed(path, "Remove it.")


def test_an_earlier_version_sealed_nothing_but_what_is_sealed_stays_so(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    path.write_text('{"a": 1}')
    assert read_sealed(path, must_be_sealed=False) == {"a": 1}
    write_sealed(path, {"a": 1})
    path.write_text(path.read_text().replace("1,", "2,", 1))
    with pytest.raises(CheckpointError, match="has changed since it was written"):
        read_sealed(path, must_be_sealed=False)


def test_what_is_bound_to_another_file_notices_when_that_is_exchanged(tmp_path: Path) -> None:
    for cycle in (1, 2):
        here = tmp_path / f"cycle-{cycle}"
        write_artifact(here / "sae", "sae", {"w": torch.full((2,), float(cycle))}, {})
        write_artifact(here, "attribution", {"a": torch.zeros(1)}, {}, bound(here, here / "sae" / "sae.json"))
        read_artifact(here, "attribution")
    for suffix in ("json", "safetensors"):
        shutil.copy(tmp_path / "cycle-1" / f"attribution.{suffix}", tmp_path / "cycle-2")
    with pytest.raises(
        CheckpointError, match=r"cycle-2/attribution\.json was made for another .*cycle-2/sae/sae\.json"
    ):
        read_artifact(tmp_path / "cycle-2", "attribution")
    shutil.rmtree(tmp_path / "cycle-2" / "sae")
    read_artifact(tmp_path / "cycle-2", "attribution")  # what was copied without the other is still whole


@pytest.mark.parametrize(
    "edit",
    [
        lambda facts: facts.pop("tensors_sha256"),
        lambda facts: facts.update(tensors_sha256=3),
        lambda facts: facts.update(tensors_sha256="0" * 64),
    ],
)
def test_resealed_facts_without_the_right_tensors_are_named(
    tmp_path: Path, edit: Callable[[dict[str, object]], object]
) -> None:
    write_artifact(tmp_path, "core", {"a": torch.zeros(1)}, {"n": 1})
    facts = json.loads((tmp_path / "core.json").read_text())
    del facts["facts_sha256"]
    edit(facts)
    write_sealed(tmp_path / "core.json", facts)
    with pytest.raises(CheckpointError, match=r"core\.(json|safetensors)"):
        read_artifact(tmp_path, "core")
