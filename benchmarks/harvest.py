"""How close harvesting and reading back come to what the model and the encoder cost by themselves.

Everything runs in one process on the bundled model (SmolLM2-135M-Instruct, weights rounded to 4 bits). The contestants
take turns, and each turn gives one ratio: a busy machine slows neighbouring turns alike. The median of those ratios
counts; its 95 % interval (bootstrap over turns) and the plain ratio of both medians stand beside it, so that a figure
that only one statistic gives can be seen as such. Prints a table and, as the last line, one JSON object.
"""

import gc
import json
import platform
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dmsae.activations.base_model import ModelConfig
from dmsae.activations.contexts import Contexts
from dmsae.activations.harvest import Harvest
from dmsae.activations.identity import ModelIdentity
from dmsae.activations.request import HarvestConfig, ImportRequest
from dmsae.activations.shards import ShardMaker, to_stored_dtypes
from dmsae.activations.sources import StoreSource
from dmsae.activations.splits import Split
from dmsae.activations.store import Store, StoreWriter
from dmsae.activations.stream import ActivationStream
from dmsae.commands.terminal import TERMINAL
from dmsae.disk.layout import shard_file
from dmsae.text.corpus import TextConfig


@dataclass(frozen=True)
class Options:
    """Sizes; the defaults end in about ten minutes on two cores."""

    hook: int = 8
    """Layer of the bundled model."""
    contexts: int = 64
    """Contexts of 128 tokens per measured harvest of x: an eighth of a default shard."""
    gradient_contexts: int = 8
    """Contexts of 128 tokens per measured harvest of g."""
    rounds: int = 21
    """How often each contestant runs."""
    shard_tokens: int = 16_384
    """Rows per shard of the stores that are read back."""
    shards: int = 8
    """Shards of the smallest store that is read back; the others have 2 and 8 times as many."""
    batch_size: int = 2048
    """Rows per batch that is read."""
    width: int = 16_384
    """Latents of the encoder that the reader is compared with."""


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    name: str
    ours: float
    bare: float
    unit: str
    ratio: float
    low: float
    high: float
    ratio_of_medians: float
    target: float


class Timing(NamedTuple):
    """Median seconds of both contestants; the median over turns of bare seconds by ours, with its 95 % interval."""

    ours: float
    bare: float
    ratio: float
    low: float
    high: float

    def result(self, name: str, unit: str, amount: float, per_bare: float, target: float) -> Result:
        """Return the line for `amount` units by ours against `per_bare` units by the bare contestant."""
        scale = amount / per_bare
        return Result(
            name,
            ours=amount / self.ours,
            bare=per_bare / self.bare,
            unit=unit,
            ratio=scale * self.ratio,
            low=scale * self.low,
            high=scale * self.high,
            ratio_of_medians=scale * self.bare / self.ours,
            target=target,
        )


def compare(rounds: int, ours: Callable[[], Any], bare: Callable[[], Any]) -> Timing:
    """Let both take turns, who goes first changing each time; one unmeasured turn warms up."""
    seconds: dict[Callable[[], Any], list[float]] = {ours: [], bare: []}
    for turn in range(rounds + 1):
        for contestant in (ours, bare) if turn % 2 else (bare, ours):
            start = time.perf_counter()
            contestant()
            if turn:
                seconds[contestant].append(time.perf_counter() - start)
    ratios = [b / a for a, b in zip(seconds[ours], seconds[bare], strict=True)]
    draws = random.Random(0)
    medians = sorted(statistics.median(draws.choices(ratios, k=rounds)) for _ in range(2000))
    return Timing(
        statistics.median(seconds[ours]),
        statistics.median(seconds[bare]),
        statistics.median(ratios),
        medians[50],
        medians[-51],
    )


def truncated(model: Any, hook: int) -> Callable[[Tensor], Tensor]:
    """Return the model's blocks up to the hook as a plain function, with no hook in them."""
    inner = model.model

    @torch.no_grad()
    def forward(tokens_NL: Tensor) -> Tensor:
        x_NLD: Tensor = inner.embed_tokens(tokens_NL)
        rotary = inner.rotary_emb(x_NLD, torch.arange(tokens_NL.shape[1])[None])
        for block in inner.layers[: hook + 1]:
            x_NLD = block(x_NLD, attention_mask=None, position_embeddings=rotary)
        return x_NLD

    return forward


def bare_gradient(model: Any, hook: int, lower: Callable[[Tensor], Tensor], tokens_NL: Tensor) -> Tensor:
    """Return the gradient of the summed loss at the block's output, with nothing around it."""
    inner = model.model
    leaf_NLD = lower(tokens_NL).requires_grad_()
    x_NLD = leaf_NLD
    rotary = inner.rotary_emb(x_NLD, torch.arange(tokens_NL.shape[1])[None])
    for block in inner.layers[hook + 1 :]:
        x_NLD = block(x_NLD, attention_mask=None, position_embeddings=rotary)
    targets_NL = F.pad(tokens_NL[:, 1:], (0, 1), value=-100)
    loss = F.cross_entropy(model.lm_head(inner.norm(x_NLD)).flatten(0, 1), targets_NL.flatten(), reduction="sum")
    return torch.autograd.grad(loss, leaf_NLD)[0]


def measure_harvest(options: Options, scratch: Path) -> list[Result]:
    """Compare making and writing shards with the bare passes on the same contexts."""
    config = HarvestConfig(
        model=ModelConfig(hook=options.hook, device="cpu"),
        text=TextConfig(),
        train_tokens=128 * options.contexts,
        heldout_tokens=0,
        pair_tokens=128 * options.gradient_contexts,
        shard_tokens=128 * options.contexts,
    )
    harvest = Harvest(config, scratch, TERMINAL)
    model, mask = harvest.model, harvest.model.keep_mask
    contexts = harvest.contexts()
    maker = ShardMaker(model, config)
    writer = StoreWriter(scratch / "harvest", harvest.request)
    lower = truncated(model.model, options.hook)
    results = []
    for split, n_contexts in ((Split.TRAIN, options.contexts), (Split.PAIRS, options.gradient_contexts)):
        some = contexts[split].take(slice(n_contexts))
        batches = [batch.long() for batch in some.tokens_NL.split(config.batch_contexts)]
        assert torch.allclose(lower(batches[0]), model.activations(batches[0]), atol=1e-3), "not the same forward pass"

        def ours(split: Split = split, some: Contexts = some) -> None:
            shard, dropped = maker.make(split, some, quota=int(mask(some.tokens_NL).sum()))
            writer.add(shard_file(split, len(writer.records)), to_stored_dtypes(shard, config), dropped)

        def bare(split: Split = split, batches: list[Tensor] = batches) -> None:
            for batch in batches:
                if split is Split.TRAIN:
                    lower(batch)
                else:
                    bare_gradient(model.model, options.hook, lower, batch)

        timing = compare(options.rounds, ours, bare)
        n_tokens = some.tokens_NL.numel()
        name = "harvest x, and write it" if split is Split.TRAIN else "harvest x and g, and write them"
        results.append(timing.result(name, "tok/s", n_tokens, n_tokens, 0.95))
    return results


def synthetic_store(path: Path, n_shards: int, rows: int, d_model: int) -> Store:
    """Return a store of random float16 activations: what reading costs does not depend on what is read."""
    request = ImportRequest("noise", ModelIdentity.imported("noise"), "", rows, "float16", 0)
    writer = StoreWriter(path, request)
    for index in range(n_shards):
        writer.add(shard_file(Split.TRAIN, index), {"x": torch.randn(rows, d_model).half()}, {})
    return writer.finish(d_model)


class PeakMemory:
    """The most resident memory of this process while the block ran, above what it had at the start."""

    def __enter__(self) -> "PeakMemory":
        gc.collect()
        self._process = psutil.Process()
        self._start = self._peak = self._rss()
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self._peak = max(self._peak, self._rss())

    def _rss(self) -> int:
        return int(self._process.memory_info().rss)

    @property
    def growth_bytes(self) -> int:
        """Peak above the start."""
        return self._peak - self._start


def measure_reading(options: Options, scratch: Path, d_model: int = 576) -> tuple[list[Result], dict[str, float]]:
    """Compare the reader's batches per second with the encoder products that could consume them."""
    store = synthetic_store(scratch / "store-1x", options.shards, options.shard_tokens, d_model)
    stream = ActivationStream(StoreSource(store), options.batch_size)
    x_BD, W_DK = torch.randn(options.batch_size, d_model), torch.randn(d_model, options.width)
    pre_BK = torch.empty(options.batch_size, options.width)
    # One turn reads a whole epoch, so that it pays for its share of opening, verifying and mixing shards.
    n_batches = store.n_rows(Split.TRAIN) // options.batch_size

    def read() -> None:
        for _ in range(n_batches):
            next(stream)

    def encode() -> None:
        torch.mm(x_BD, W_DK, out=pre_BK)

    timing = compare(options.rounds, read, encode)
    stream.close()
    name = f"read a batch, against an encoder product of width {options.width:,}"
    speed = timing.result(name, "batches/s", n_batches, 1, 10.0)
    return [speed], {"1x": read_through(store, options), **_larger(options, scratch, d_model)}


def _larger(options: Options, scratch: Path, d_model: int) -> dict[str, float]:
    growth = {}
    for times in (2, 8):
        store = synthetic_store(scratch / f"store-{times}x", times * options.shards, options.shard_tokens, d_model)
        growth[f"{times}x"] = read_through(store, options)
    return growth


def read_through(store: Store, options: Options) -> float:
    """Return by how many megabytes memory grew while an epoch was read."""
    with PeakMemory() as memory:
        stream = ActivationStream(StoreSource(store), options.batch_size)
        for _ in range(store.n_rows(Split.TRAIN) // options.batch_size):
            next(stream)
        stream.close()
    return memory.growth_bytes / 1e6


def cpu_name() -> str:
    """Return the processor's name as the system gives it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def main(options: Options) -> None:
    """Measure, print the table, print the JSON line."""
    out = Console(width=160)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        TERMINAL.note("Harvesting against bare passes …")
        results = measure_harvest(options, scratch)
        TERMINAL.note("Reading back …")
        reading, growth = measure_reading(options, scratch)
        results += reading
    table = Table("what", "ours", "bare", "unit", "ratio", "95 %", "of medians", "target", box=None)
    for r in results:
        speeds, interval = (f"{r.ours:,.1f}", f"{r.bare:,.1f}"), f"{r.low:.2f}–{r.high:.2f}"
        table.add_row(r.name, *speeds, r.unit, f"{r.ratio:.2f}", interval, f"{r.ratio_of_medians:.2f}", f"≥ {r.target}")
    out.print(table)
    shard_mb = options.shard_tokens * 576 * 2 / 1e6
    text = ", ".join(f"{size}: {mb:.0f} MB" for size, mb in growth.items())
    out.print(f"Memory growth while an epoch is read, by size of the store (a shard is {shard_mb:.0f} MB): {text}")
    facts = {
        "benchmark": "harvest",
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "options": asdict(options),
        "results": [asdict(result) for result in results],
        "read_growth_mb": growth,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main(tyro.cli(Options))
