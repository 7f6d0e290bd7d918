"""The checkpoints of a training: one sealed file from one process, a sealed folder from the ranks of a mesh.

A rank of a mesh writes only what it owns, through torch.distributed.checkpoint in its safetensors format, so nothing is
gathered and nothing is pickled. The folder of a step appears whole or not at all: ranks write into `unfinished`, the
first one adds `state.json` with a checksum of every tensor and of itself, and renames it; then it removes what is
older. One process keeps its one file, because that needs no folder to be replaced in one piece, and older versions
wrote it.

Whoever wrote a checkpoint, any mesh resumes from it: a tensor with a row for each latent is put together from the parts
of those who wrote it, and each rank takes its own rows. The newest checkpoint counts.
"""

import shutil
from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from dmsae.config import Json
from dmsae.disk import layout
from dmsae.disk.artifact import read_sealed, write_sealed
from dmsae.disk.checkpoint import (
    checksum,
    load_checkpoint,
    mesh_steps,
    read_state,
    remove_checkpoint,
    save_checkpoint,
)
from dmsae.disk.files import fsync_directory
from dmsae.errors import CheckpointError
from dmsae.ranks import settled
from dmsae.sae.comms import Comms
from dmsae.sae.shard import owned_rows
from dmsae.training.mesh_files import REMEDY, read_parts, write_parts

_UNFINISHED = "unfinished"


class Checkpoints:
    """Saves and loads what a rank owns of a training in a directory.

    `starts` names the tensors that have a row for each latent, with the latent at which each begins.
    """

    def __init__(self, directory: Path, starts: Mapping[str, int], comms: Comms) -> None:
        self._file, self._folder = directory / layout.CHECKPOINT, directory / layout.MESH_CHECKPOINT
        self._directory, self._starts, self._comms = directory, starts, comms

    def save(self, step: int, tensors: dict[str, Tensor], state: Json) -> None:
        """Replace the checkpoint; `state` counts on the first rank alone."""
        if self._comms.both.size == 1:
            save_checkpoint(self._file, tensors, state)
            self._forget_meshes(but=None)
            return
        unfinished, place = self._folder / _UNFINISHED, self._folder / str(step)
        with settled(self._comms.both):
            if self._comms.is_first:
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir(parents=True)
        mine = {self._key(name): tensor.detach() for name, tensor in tensors.items()}
        with settled(self._comms.both):
            write_parts(unfinished, mine, self._comms.both)
        sums = self._comms.both.of_each({key: checksum(tensor) for key, tensor in mine.items()})
        with settled(self._comms.both):
            if self._comms.is_first:
                facts = {"state": state, "n_shards": self._comms.latents.size, "checksums": dict(ChainMap(*sums))}
                write_sealed(unfinished / layout.MESH_STATE, facts)
                if not place.exists():  # a step that is saved twice has the same state twice
                    unfinished.rename(place)
                    fsync_directory(self._folder)
                self._forget_meshes(but=place)
                remove_checkpoint(self._file)

    def load(self, path: Path) -> tuple[dict[str, Tensor], Json]:
        """Return a checkpoint as what this rank owns of it, and its state."""
        if path.is_dir():
            return self._read(path)
        tensors, state = load_checkpoint(path)
        return {name: self._own(name, tensor) for name, tensor in tensors.items()}, state

    def state(self) -> Json | None:
        """Return all of the newest checkpoint but its tensors, without reading those; None when there is none."""
        path = self.newest()
        if path is None:
            return None
        state: Json = read_sealed(path / layout.MESH_STATE, REMEDY)["state"] if path.is_dir() else read_state(path)
        return state

    def newest(self) -> Path | None:
        """Return the file or folder from which a training resumes; None when there is none."""
        steps = mesh_steps(self._directory)
        if self._file.is_file() and (not steps or read_state(self._file)["step"] >= steps[-1]):
            return self._file
        return self._folder / str(steps[-1]) if steps else None

    def unusable(self, error: Exception) -> CheckpointError:
        """Return what to say of a checkpoint whose content no training of this kind would have written."""
        return CheckpointError(
            f"{self.newest()} is not a checkpoint that this run can resume from: {error!r}. Restore it; or remove it, "
            "and the same command starts again from the beginning."
        )

    def remove(self) -> None:
        """Remove every checkpoint, and what was left of one if its writers were killed."""
        remove_checkpoint(self._file)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, folder: Path) -> tuple[dict[str, Tensor], Json]:
        facts = read_sealed(folder / layout.MESH_STATE, REMEDY)
        n_shards, sums = facts["n_shards"], facts["checksums"]
        names = dict.fromkeys(_name(key) for key in sums)
        tensors: dict[str, Tensor] = {}
        for name in names:
            if name not in self._starts:
                (tensors[name],) = read_parts(folder, [name], sums)
            elif n_shards == self._comms.latents.size:
                (tensors[name],) = read_parts(folder, [self._key(name)], sums)
            else:
                parts = read_parts(folder, [f"{name}@{rank}" for rank in range(n_shards)], sums)
                tensors[name] = self._own(name, _joined(parts, self._starts[name]))
        state: Json = facts["state"]
        return tensors, state

    def _own(self, name: str, tensor: Tensor) -> Tensor:
        """Return the rows of a whole tensor that this rank owns, as a copy if there are other rows."""
        latents = self._comms.latents
        if name not in self._starts or latents.size == 1:
            return tensor
        return tensor[owned_rows(self._starts[name], latents.rank, latents.size)].clone()

    def _key(self, name: str) -> str:
        """Return the name under which this rank's part of a tensor is written."""
        return f"{name}@{self._comms.latents.rank}" if name in self._starts else name

    def _forget_meshes(self, but: Path | None) -> None:
        """Remove all checkpoints of meshes but one."""
        if but is None:
            shutil.rmtree(self._folder, ignore_errors=True)
            return
        for other in self._folder.iterdir():
            if other != but:
                shutil.rmtree(other, ignore_errors=True)


def _name(key: str) -> str:
    return key.rsplit("@", 1)[0]


def _joined(parts: list[Tensor], start: int) -> Tensor:
    """Return a whole tensor from the rows that each rank owned."""
    whole = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:])
    for rank, part in enumerate(parts):
        whole[owned_rows(start, rank, len(parts))] = part
    return whole
