"""What the ranks of a mesh do in tests: importable by them without the tests themselves."""

import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

import dmsae.sae.shard
from dmsae.activations.harvest import Harvest
from dmsae.activations.identity import ModelIdentity
from dmsae.activations.request import HarvestConfig
from dmsae.activations.shards import ShardMaker
from dmsae.activations.sources import StoreSource
from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.activations.stream import ActivationStream, Cursor
from dmsae.activations.token_sample import TokenSample
from dmsae.cores.attribution import Attribution, AttributionConfig
from dmsae.cores.scoring import attribute_on
from dmsae.distillation.distill import DistillConfig, distill
from dmsae.errors import DmsaeError, StoreError
from dmsae.ranks import settled
from dmsae.sae.comms import Comms
from dmsae.sae.config import DenseCore, DetectorCore, SAEConfig, SparseCore
from dmsae.sae.detectors import Detectors
from dmsae.sae.objective import BatchResult, Objective, backward_
from dmsae.sae.sae import SAE, write_sae
from dmsae.sae.selection import keep_largest_of_rows_, nth_largest
from dmsae.sae.shard import gathered, owned_rows, shard
from dmsae.sae.variance import variance
from dmsae.training import mesh_files
from dmsae.training.checkpoints import Checkpoints
from dmsae.training.config import TrainConfig
from dmsae.training.crew import follow, harvest_on, lead, run_on_mesh, train_on
from dmsae.training.learner import Learner, SAESpec
from dmsae.training.mesh import Group, MeshConfig, require_same
from dmsae.training.scale import first_look
from dmsae.training.trainer import train_together
from zipf import Zipf


class Case(NamedTuple):
    """One batch through one SAE."""

    config: SAEConfig
    n_tokens: int
    seed: int
    ties: bool
    """Whether all pre-activations are small whole numbers."""
    few: bool
    """Whether most of them are negative."""
    dead: bool
    warm_start: float | None

    def sae(self) -> SAE:
        generator = torch.Generator().manual_seed(self.seed)
        c, d = self.config.n_core, self.config.d_model
        detectors = None
        if self.config.n_detectors:
            detectors = Detectors(torch.randn(c, generator=generator), torch.rand(c, generator=generator))
        rows = torch.randn(c, d, generator=generator) if c else None
        sae = SAE.init(self.config, generator, rows, detectors).double()
        with torch.no_grad():
            if self.ties:
                sae.W_enc_noncore.copy_(torch.randint(-1, 2, sae.W_enc_noncore.shape, generator=generator))
                sae.W_enc_core.copy_(torch.randint(-1, 2, sae.W_enc_core.shape, generator=generator))
            else:
                sae.b_enc.normal_(std=0.1, generator=generator)
                sae.b_dec.normal_(std=0.1, generator=generator)
            sae.b_enc.sub_(3.0 if self.few else 0.0)
        return sae

    def x(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        shape = (self.n_tokens, self.config.d_model)
        if self.ties:
            return torch.randint(-1, 2, shape, generator=generator).double()
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def dead_K(self) -> Tensor | None:
        generator = torch.Generator().manual_seed(self.seed + 2)
        return torch.rand(self.config.width, generator=generator) < 0.7 if self.dead else None


class Outcome(NamedTuple):
    result: BatchResult
    grads: dict[str, Tensor]
    selected: set[tuple[int, int]]
    """(latent, token) in the whole SAE and the whole batch."""
    n_owned: int


def step(comms: Comms, case: Case) -> Outcome:
    part = shard(case.sae(), comms.latents)
    n_local = case.n_tokens // comms.data.size
    x = case.x()[comms.data.rank * n_local :][:n_local]
    dead = case.dead_K()
    if dead is not None:
        dead = dead[owned_rows(0, comms.latents.rank, comms.latents.size)]
    active = part.train_codes(x, case.warm_start, comms).active
    latents = active.latents_S * comms.latents.size + comms.latents.rank
    tokens = active.tokens_S + comms.data.rank * n_local
    result = backward_(part, x, Objective(), dead, case.warm_start, comms)
    grads = {name: parameter.grad for name, parameter in part.named_parameters() if parameter.grad is not None}
    return Outcome(result, grads, set(zip(latents.tolist(), tokens.tolist(), strict=True)), part.config.width)


def cut(comms: Comms, values: list[Tensor], n: int) -> float:
    return nth_largest(values[comms.both.rank], n, comms.both)


def largest_of_rows(comms: Comms, parts: list[Tensor], n: int) -> Tensor:
    return keep_largest_of_rows_(parts[comms.latents.rank], n, comms.latents)


def there_and_back(comms: Comms, case: Case) -> tuple[int, dict[str, Tensor], float]:
    sae = case.sae()
    part = shard(sae, comms.latents)
    x = case.x()
    n = len(x) // comms.data.size
    whole = in_blocks(part, sae.config, comms, 16)
    return part.config.n_core, whole, variance(x[comms.data.rank * n :][:n], comms.data)


def in_blocks(part: SAE, config: SAEConfig, comms: Comms, elements: int) -> dict[str, Tensor]:
    """Return the tensors of a whole SAE as it is saved, put together from blocks of few elements."""
    with patch.object(dmsae.sae.shard, "_BLOCK_ELEMENTS", elements):
        stream = gathered(part, config, comms.latents)
        rows = torch.cat([block.detach().flatten() for block in stream.blocks])
    names = sorted(stream.shapes)
    flat = rows.split([math.prod(stream.shapes[name]) for name in names])
    return {name: one.view(stream.shapes[name]) for name, one in zip(names, flat, strict=True)}


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


class Streamed(NamedTuple):
    """What one rank got of some batches."""

    batches: list[Tensor]
    read: list[str]
    """The shards that it opened, or the contexts that went through its model."""
    cursor: Cursor


def read_stream(comms: Comms, make: Callable[[], Any], batch_size: int, n: int, at: Cursor | None = None) -> Streamed:
    """Take batches from a stream on all ranks, and note what each of them reads."""
    read: list[str] = []
    of_store, of_model = Store.read, ShardMaker.make

    def opened(self: Store, record: Any) -> Any:
        read.append(record.file)
        return of_store(self, record)

    def made(self: ShardMaker, split: Split, contexts: Any, quota: int, index: int = 0) -> Any:
        read.append(str(index))
        return of_model(self, split, contexts, quota, index)

    stream = ActivationStream(make(), batch_size, 0, "cpu", comms.data, comms.both)
    with patch.object(Store, "read", opened), patch.object(ShardMaker, "make", made), closing(stream):
        stream.seek(at or Cursor())
        return Streamed(list(islice(stream, n)), read, stream.cursor)


def hear_of_stream(comms: Comms, make: Callable[[], Any], batch_size: int, n: int) -> str:
    """Take batches, and return what each rank hears."""
    try:
        read_stream(comms, make, batch_size, n)
    except DmsaeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def train_on_store(comms: Comms, store: Path, directory: Path) -> str:
    """Train on a store, and return what each rank hears."""
    command = partial(_train_on_store, store, directory)
    try:
        lead(comms, command) if comms.is_first else follow(comms)
    except DmsaeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _train_on_store(store: Path, directory: Path, comms: Comms) -> None:
    train_on(comms, specs()[:1], StoreSource(Store.open(store)), directory, TrainConfig(**SHORT))


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


class Summed(NamedTuple):
    """What one rank has after a sum over data ranks of tensors that it was given a place for."""

    held: Tensor
    sent: Tensor
    """The same, summed in a tensor that is sent."""
    is_shared: bool
    left_open: list[str]


def sum_held(comms: Comms, values: list[Tensor], blind: list[int], lacking: str = "posix_fallocate") -> Summed:
    """Sum one tensor of each data rank where `holding` puts it; ranks in `blind` have no memory to share."""
    value = values[comms.data.rank]
    with patch.object(os, lacking, side_effect=OSError) if comms.data.rank in blind else nullcontext():
        axis, (held,) = comms.data.holding([value])
    held.copy_(value)
    axis.sum_(held)
    assert isinstance(axis, Group)
    descriptors = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    memory = [name for name in (str(link.readlink()) for link in descriptors) if "memfd:dmsae" in name]
    return Summed(held.clone(), comms.data.sum_(value.clone()), bool(axis._held), memory)


def sum_often(comms: Comms, n_sums: int) -> list[float]:
    """Sum one tensor again and again while ranks dawdle; return how far each sum is from what it should be."""
    dawdling = random.Random(comms.both.rank)
    axis, (held,) = comms.data.holding([torch.zeros(300_000, dtype=torch.float64)])
    assert isinstance(axis, Group)
    assert axis._held
    off = []
    for turn in range(n_sums):
        time.sleep(dawdling.choice((0.0, 0.0, 0.002, 0.01)))
        held.fill_(turn * (comms.data.rank + 1))
        axis.sum_(held)
        time.sleep(dawdling.choice((0.0, 0.0, 0.002, 0.01)))
        off.append(float((held - turn * sum(range(1, comms.data.size + 1))).abs().max()))
    return off


def resume_failing(comms: Comms, directory: Path, what: str, failing: int) -> str:
    """Resume a training while one rank cannot do something; return what each rank hears."""
    error = StoreError(f"rank {failing} is out of luck")
    with patch(what, side_effect=error) if comms.both.rank == failing else nullcontext():
        try:
            return train_here(comms, directory)
        except DmsaeError as heard:
            return f"{type(heard).__name__}: {heard}"


def settle(comms: Comms, failing: list[int]) -> str:
    """Fail on some ranks, and return what each of them hears."""
    try:
        with settled(comms.both):
            if comms.both.rank in failing:
                raise StoreError(f"rank {comms.both.rank} is out of luck")
    except DmsaeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def same(comms: Comms, values: list[int]) -> str:
    """Return what each rank hears when they compare their settings."""
    try:
        require_same({"batch_size": values[comms.both.rank]}, comms.both)
    except DmsaeError as error:
        return str(error)
    return "nothing"


def be_rank(
    rank: int,
    port: int,
    mesh: MeshConfig,
    log: Path,
    command: Callable[[Comms], Any],
    run: Callable[..., Any] = run_on_mesh,
) -> None:
    """Be one rank of a mesh, as under torchrun, and end with the exit code that a command would have."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(mesh.size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.stderr = (log / f"rank-{rank}.log").open("a")
    try:
        run(mesh, "cpu", {}, command)
    except DmsaeError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(2)
    os._exit(0)


def train_as_rank(
    rank: int, port: int, shape: tuple[int, int], store: Path, directory: Path, changes: dict[str, Any]
) -> None:
    """Train two SAEs from a store as a rank that may be killed."""
    mesh = MeshConfig(data=shape[0], latents=shape[1], timeout_seconds=5)
    config = TrainConfig(**SHORT | changes)

    def command(on: Comms) -> None:
        train_on(on, specs()[:2], StoreSource(Store.open(store)), directory, config)

    be_rank(rank, port, mesh, directory.parent, command)


def harvest_as_rank(rank: int, port: int, n: int, config: HarvestConfig, root: Path, pause: float) -> None:
    """Harvest as a rank that may be killed; it pauses before each batch, so that there is a middle to be killed in."""
    run = ShardMaker._run

    def slowly(self: ShardMaker, *args: Any) -> Any:
        time.sleep(pause)
        return run(self, *args)

    mesh = MeshConfig(data=n, timeout_seconds=20)
    with patch.object(ShardMaker, "_run", slowly):
        be_rank(rank, port, mesh, root.parent, lambda on: harvest_on(on, Harvest(config, root)))


def harvest_here(comms: Comms, config: HarvestConfig, root: Path, broken: int | None = None) -> str:
    """Harvest, and return what each rank hears; one rank may have a model that puts out no finite numbers."""
    select = ShardMaker._select

    def infinite(self: ShardMaker, split: Split, shard: Any, *args: Any) -> Any:
        return select(self, split, shard | {"x": shard["x"] / 0}, *args)

    with patch.object(ShardMaker, "_select", infinite if comms.both.rank == broken else select):
        try:
            lead(comms, lambda on: harvest_on(on, Harvest(config, root))) if comms.is_first else follow(comms)
        except DmsaeError as error:
            return str(error)
    return "nothing"


def score_here(comms: Comms, sae: Path, store: Path, config: AttributionConfig) -> Attribution | str | None:
    """Return the scores that the first rank gets, or what each rank hears."""
    scores: list[Attribution] = []

    def command(on: Comms) -> None:
        scores.append(attribute_on(on, SAE.load(sae), sae, Store.open(store), config, "cpu"))

    try:
        lead(comms, command) if comms.is_first else follow(comms)
    except DmsaeError as error:
        return f"{type(error).__name__}: {error}"
    return scores[0] if scores else None


def distill_here(comms: Comms, config: DistillConfig, store: Path, directory: Path) -> None:
    """Distill a core."""
    lead(comms, lambda on: distill(config, Store.open(store), directory, comms=on)) if comms.is_first else follow(comms)


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
