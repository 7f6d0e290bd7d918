"""Trainings on a mesh of SAEs of every kind, and their checkpoints."""

import math
import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from dmsae.activations.identity import ModelIdentity
from dmsae.activations.stream import ActivationStream, Cursor
from dmsae.activations.token_sample import TokenSample
from dmsae.errors import DmsaeError, StoreError
from dmsae.sae.comms import Comms
from dmsae.sae.config import DenseCore, DetectorCore, SAEConfig, SparseCore
from dmsae.sae.detectors import Detectors
from dmsae.sae.objective import BatchResult
from dmsae.sae.sae import SAE, write_sae
from dmsae.sae.shard import gathered, owned_rows, shard
from dmsae.sae.variance import variance
from dmsae.training import mesh_files
from dmsae.training.checkpoints import Checkpoints
from dmsae.training.config import TrainConfig
from dmsae.training.crew import follow, train_on
from dmsae.training.learner import Learner, SAESpec
from dmsae.training.scale import first_look
from dmsae.training.trainer import train_together
from mesh_steps import in_blocks
from zipf import Zipf


def save_whole(comms: Comms, directory: Path, name: str) -> None:
    """Save an SAE with known weights and a sample of known tokens, of which each rank has its part."""
    spec = next(one for one in specs() if one.name == name)
    config = TrainConfig(**SHORT)
    learner = Learner(spec, config, config.schedule(), torch.zeros(32), 1.0, comms)
    whole, made = SAE(spec.sae), torch.Generator().manual_seed(5)
    whole.load_state_dict({name: torch.randn(t.shape, generator=made) for name, t in whole.state_dict().items()})
    learner.sae.load_state_dict(shard(whole, comms.latents).state_dict())
    part = learner.folded(1.7)
    identity = ModelIdentity("model", "", "0" * 64, "1" * 64, "hook", "float32")
    at = torch.arange(16, dtype=torch.int32)
    tokens = TokenSample(identity, at.view(2, 8), at // 8, at % 8, torch.randn(16, 32, generator=made))
    if comms.data.rank == 0:
        part.keep_sample_(tokens, comms.latents)
        stream = gathered(part, learner.whole, comms.latents)
        if comms.is_first:
            write_sae(directory, learner.whole, stream, part.sample, {"made": 1})
        stream.drain()
    comms.both.settle(None)


CORE = 0.3 * torch.randn(5, 32, generator=torch.Generator().manual_seed(1))


DETECTORS = Detectors(torch.linspace(-0.5, 0.5, 5), torch.linspace(0.5, 3, 5))


PREFIXES = (13, 29, 48)


def specs() -> list[SAESpec]:
    """SAEs of every kind; a core of five latents is not divisible by two."""
    return [
        SAESpec("plain", SAEConfig(32, 48, 4, (8, 24, 48))),
        SAESpec("dense", SAEConfig(32, 48, 6, PREFIXES, DenseCore(5, 4)), CORE, total_budget=True),
        SAESpec("sparse", SAEConfig(32, 48, 4, PREFIXES, SparseCore(5)), CORE),
        SAESpec("detector", SAEConfig(32, 48, 6, PREFIXES, DetectorCore(5, 4)), CORE, DETECTORS),
    ]


SHORT: dict[str, Any] = {"tokens": 24 * 64, "batch_size": 64, "lr": 1e-3, "norm_batches": 3, "log_every": 1}
SHORT |= {"device": "cpu"}
"""A training of 24 steps."""


class StopAt:
    """A `Progress` that interrupts its own process after some step."""

    def __init__(self, step: int | None) -> None:
        self._left, self.notes = step, list[str]()

    @contextmanager
    def bar(self, _what: str, _total: int, _unit: str) -> Iterator["StopAt"]:
        yield self

    def skip(self, count: int) -> None:
        self.advance(count)

    def advance(self, count: int, _note: str = "") -> None:
        if self._left is not None:
            self._left -= count
            if self._left == 0:
                signal.raise_signal(signal.SIGINT)

    def note(self, message: str) -> None:
        self.notes.append(message)

    warn = note


def train_here(comms: Comms, directory: Path, stop_at: int | None = None, **changes: Any) -> str:
    """Train SAEs of every kind; return "finished", or "stopped" when a signal came."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config = TrainConfig(**SHORT | {"checkpoint_seconds": math.inf} | changes)
    try:
        train_together(specs(), Zipf(), directory, config, progress=StopAt(stop_at), comms=comms)
    except KeyboardInterrupt:
        return "stopped"
    return "finished"


class Learned(NamedTuple):
    results: list[BatchResult]
    tensors: dict[str, Tensor]
    facts: list[dict[str, Any]]
    scale: float
    dead_groups: list[list[int]]
    inference: list[tuple[float, ...]]
    folded: dict[str, Tensor]


def learn(comms: Comms, name: str, n_steps: int) -> Learned:
    """Train one of the SAEs in float64, and return all there is to know about it."""
    spec = next(one for one in specs() if one.name == name)
    config = TrainConfig(**SHORT | {"batch_size": 16, "dead_after_tokens": 32, "threshold_start": 2})
    with closing(ActivationStream(Zipf(), config.batch_size, 0, "cpu", comms.data, comms.both)) as stream:
        scale, b_dec = first_look(_Double(stream), 3, comms)  # type: ignore[arg-type]
        learner = Learner(spec, config, config.schedule(), b_dec, scale, comms)
        learner.sae.double()
        learner.hold_gradients()
        stream.seek(Cursor())
        results, groups, inference = [], [], []
        for step_ in range(n_steps):
            x = next(stream).double() / scale
            results.append(learner.advance(step_, x, variance(x, comms.data)))
            groups.append(learner.dead_groups())
            mine = x[: max(0, 12 - comms.data.rank * len(x))]
            inference.append(tuple(learner.inference_metrics(mine, 12)))
    folded = in_blocks(learner.folded(scale), learner.whole, comms, 64)
    return Learned(results, learner.tensors(), [learner.facts()], scale, groups, inference, folded)


class _Double:
    """A stream in float64."""

    def __init__(self, stream: ActivationStream) -> None:
        self._stream = stream

    def __next__(self) -> Tensor:
        return next(self._stream).double()


def save_parts(comms: Comms, directory: Path, tensors: dict[str, Tensor], starts: dict[str, int], n: int) -> None:
    """Save what each rank owns of whole tensors, as the checkpoint of step n."""
    mine = {
        name: tensor[owned_rows(starts[name], comms.latents.rank, comms.latents.size)] if name in starts else tensor
        for name, tensor in tensors.items()
    }
    with patch.object(mesh_files, "_LARGE_BYTES", 64):
        Checkpoints(directory, starts, comms).save(n, mine, {"step": n})


def load_parts(comms: Comms, directory: Path, starts: dict[str, int]) -> tuple[dict[str, Tensor], Any]:
    """Return what a rank loads."""
    checkpoints = Checkpoints(directory, starts, comms)
    newest = checkpoints.newest()
    assert newest is not None
    return checkpoints.load(newest)


def resume_failing(comms: Comms, directory: Path, what: str, failing: int) -> str:
    """Resume a training while one rank cannot do something; return what each rank hears."""
    error = StoreError(f"rank {failing} is out of luck")
    with patch(what, side_effect=error) if comms.both.rank == failing else nullcontext():
        try:
            return train_here(comms, directory)
        except DmsaeError as heard:
            return f"{type(heard).__name__}: {heard}"


class Hidden(Zipf):
    """A source that the second rank cannot open."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unhidden, ()


def _unhidden() -> Zipf:
    if os.environ["RANK"] == "1":
        raise StoreError("There is no store here.")
    return Zipf()


def lead_or_follow(comms: Comms, directory: Path) -> str:
    """Train on a source that one rank cannot open, and return what each rank hears."""
    try:
        train_on(comms, specs()[:1], Hidden(), directory, TrainConfig(**SHORT)) if comms.is_first else follow(comms)
    except DmsaeError as error:
        return str(error)
    return "nothing"
