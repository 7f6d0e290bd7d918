"""One full training step, as a multiple of the bare encoder product `x @ W_enc.T` of the same shape.

A step is forward, backward, clip, Adam and renormalise: `backward_` and `step_`. Step and product take turns in one
process, and the ratio is the median over turns. Turns during which other processes used the cores are measured again.
The product allocates its result, as written; a second ratio is to the same product into a buffer that is kept. A third
is that of a step that finds its candidates by the product in float32, as it does on CPUs without bfloat16.

Data: sums of 4096 fixed random directions, direction i present with probability ∝ i^-0.8 (60 per token on average, at
most 0.8), with uniform strengths and a little noise, divided by their root mean square norm. Weights are random, so
latents fire unevenly. Dead latents have a lower bias: they lose to the others but still have something to rebuild. A
core of detectors has the rows of the dense core beside it, and each fires on a fifth of the tokens. Five prefixes,
prefix sum, gradient clip 1.

    python benchmarks/step.py [--turns 15] [--patience 120]
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from dmsae.sae.config import CoreMode, SAEConfig, core_first, matryoshka_nesting
from dmsae.sae.detectors import Detectors
from dmsae.sae.objective import Objective, backward_
from dmsae.sae.optimiser import Adam, step_
from dmsae.sae.sae import SAE

D_MODEL, BATCH, N_BATCHES = 576, 2048, 4
TARGETS = {(16384, 40): 1.5, (16384, 320): 2.5, (4096, 32): 1.3}
GROWTH = (4096, 8192, 16384, 32768, 65536)
DETECTOR_RATE = 0.2


@dataclass(frozen=True)
class Cell:
    """A shape to measure."""

    width: int
    k: int
    n_core: int = 0
    core_mode: CoreMode = CoreMode.DENSE
    dead_share: float = 0.0
    d_model: int = D_MODEL

    @property
    def target(self) -> float | None:
        """The ratio to reach, where one was set."""
        target = TARGETS.get((self.width, self.k))
        return target if target is None or not (self.n_core or self.dead_share) else 1.25 * target

    @property
    def core(self) -> str:
        """The core as the table shows it."""
        return f"{self.n_core} {self.core_mode}" if self.n_core else "-"


@dataclass
class Measured:
    """Medians over the turns that were not disturbed."""

    ratio: float
    ratio_to_buffered: float
    ratio_in_full: float
    step_ms: float
    product_ms: float
    n_turns: int
    n_disturbed: int


def make_batches(d_model: int, generator: torch.Generator) -> list[Tensor]:
    """Return batches whose directions appear unevenly often."""
    n_directions = 4096
    directions = torch.nn.functional.normalize(torch.randn(n_directions, d_model, generator=generator))
    rates = torch.arange(1, n_directions + 1) ** -0.8
    rates = (rates * (60 / rates.sum())).clamp_(max=0.8)
    batches = []
    for _ in range(N_BATCHES):
        strength = 2 * torch.rand(BATCH, n_directions, generator=generator)
        strength *= torch.rand(BATCH, n_directions, generator=generator) < rates
        batches.append(strength @ directions + 0.05 * torch.randn(BATCH, d_model, generator=generator))
    scale = torch.cat(batches).square().sum(1).mean().sqrt()
    return [batch / scale for batch in batches]


def make_detectors(rows_CD: Tensor, batches: list[Tensor]) -> Detectors:
    """Return offsets and thresholds with which each row fires on the same share of the tokens."""
    thresholds_C = (batches[0] @ rows_CD.T).quantile(1 - DETECTOR_RATE, dim=0)
    return Detectors(torch.zeros_like(thresholds_C), thresholds_C)


def make_step(cell: Cell, batches: list[Tensor]) -> tuple[Callable[[], None], SAE]:
    """Return a function that takes the next training step, and the SAE that it trains."""
    generator = torch.Generator().manual_seed(1)
    prefixes = core_first(matryoshka_nesting(cell.width), cell.n_core)
    core = cell.core_mode.core(cell.n_core, k_noncore=cell.k) if cell.n_core else None
    config = SAEConfig(cell.d_model, cell.width, cell.k, prefixes, core)
    core_rows = torch.nn.functional.normalize(torch.randn(cell.n_core, cell.d_model, generator=generator))
    sae = SAE.init(config, generator, core_rows, make_detectors(core_rows, batches) if config.n_detectors else None)
    dead = torch.rand(cell.width, generator=generator) < cell.dead_share if cell.dead_share else None
    if dead is not None:
        sae.b_enc.data[dead] = -0.05
    optimiser, objective = Adam(sae, lr=3e-4), Objective()
    warm_start: float | None = None
    n_steps = 0

    def step() -> None:
        nonlocal warm_start, n_steps
        result = backward_(sae, batches[n_steps % len(batches)], objective, dead, warm_start)
        step_(sae, optimiser, result.grad_norm, 1.0)
        warm_start = result.warm_start
        n_steps += 1

    return step, sae


def others_seconds() -> float:
    """Return the processor time that everything but this process has used so far; 0 where that is not known."""
    path = Path("/proc/stat")
    if not path.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, path.read_text().split()[1:9])
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    own = resource.getrusage(resource.RUSAGE_SELF)
    return busy - own.ru_utime - own.ru_stime


def seconds(function: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def take_turns(
    contestants: dict[str, Callable[[], object]], n_turns: int, patience: float
) -> tuple[dict[str, list[float]], int]:
    """Time the contestants in turn; return the undisturbed turns (all of them if too few) and how many were not."""
    for function in contestants.values():
        function()
        function()
    clean: list[list[float]] = []
    disturbed: list[list[float]] = []
    deadline = time.monotonic() + patience
    while len(clean) < n_turns and (time.monotonic() < deadline or len(clean) + len(disturbed) < n_turns):
        start, others = time.monotonic(), others_seconds()
        turn = [seconds(function) for function in contestants.values()]
        used = others_seconds() - others
        (clean if used < 0.02 + 0.03 * (time.monotonic() - start) else disturbed).append(turn)
    kept = clean if len(clean) >= min(5, n_turns) else clean + disturbed
    return dict(zip(contestants, map(list, zip(*kept, strict=True)), strict=True)), len(disturbed)


def measure(cell: Cell, batches: list[Tensor], n_turns: int, patience: float) -> Measured:
    """Return the ratio of a step to the encoder product."""
    return measure_step(*make_step(cell, batches), batches[0], n_turns, patience)


def measure_step(step: Callable[[], None], sae: SAE, x: Tensor, n_turns: int, patience: float) -> Measured:
    """Return the ratio of a step that trains an SAE to its encoder product."""
    W_enc = sae.W_enc.detach()
    buffer = torch.empty(len(x), len(W_enc))
    contestants: dict[str, Callable[[], object]] = {
        "step": step,
        "in full": lambda: in_full(step),
        "product": lambda: x @ W_enc.T,
        "buffered": lambda: torch.mm(x, W_enc.T, out=buffer),
    }
    times, n_disturbed = take_turns(contestants, n_turns, patience)
    middle = statistics.median
    return Measured(
        ratio=round(middle(s / p for s, p in zip(times["step"], times["product"], strict=True)), 3),
        ratio_to_buffered=round(middle(s / p for s, p in zip(times["step"], times["buffered"], strict=True)), 3),
        ratio_in_full=round(middle(s / p for s, p in zip(times["in full"], times["product"], strict=True)), 3),
        step_ms=round(1e3 * middle(times["step"]), 1),
        product_ms=round(1e3 * middle(times["product"]), 1),
        n_turns=len(times["step"]),
        n_disturbed=n_disturbed,
    )


def in_full(step: Callable[[], None]) -> None:
    """Take a step without a short list of candidates."""
    with patch("dmsae.sae.batch_topk.is_faster", lambda *_: False):
        step()


def paper_scale() -> dict[str, float]:
    """Take a few steps at D=2304, K=65536, k=320 and return times and this process's peak memory."""
    cell = Cell(65536, 320, d_model=2304)
    batches = make_batches(cell.d_model, torch.Generator().manual_seed(0))
    step, sae = make_step(cell, batches)
    step_seconds = [seconds(step) for _ in range(3)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    n_parameters = sum(parameter.numel() for parameter in sae.parameters())
    W_enc = sae.W_enc.detach()
    return {
        "step_seconds": round(statistics.median(step_seconds), 2),
        "product_seconds": round(statistics.median(seconds(lambda: batches[0] @ W_enc.T) for _ in range(3)), 2),
        "peak_gib": round(peak / 2**30, 2),
        "allowed_gib": round((16 * n_parameters + 2**30) / 2**30, 2),
    }


def main() -> None:
    """Print the table, and one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--turns", type=int, default=15, help="undisturbed turns per cell")
    parser.add_argument("--patience", type=float, default=120, help="seconds to wait for them per cell")
    parser.add_argument("--paper-scale", action="store_true", help="only the step at the paper's scale")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    if arguments.paper_scale:
        print(json.dumps(paper_scale()))
        return
    batches = make_batches(D_MODEL, torch.Generator().manual_seed(0))
    dense, detector = CoreMode.DENSE, CoreMode.DETECTOR
    kinds = [(0, dense, 0.0), (200, dense, 0.0), (200, detector, 0.0), (0, dense, 0.05)]
    cells = [Cell(width, k, *kind) for kind in kinds for width, k in TARGETS]
    cells += [Cell(width, 40) for width in GROWTH if width != 16384]
    heads = f"{'K':>6} {'k':>4} {'core':>12} {'dead':>5} {'step ms':>9} {'product':>9} {'ratio':>6} {'target':>7}"
    print(f"{heads} buffered in full")
    rows = []
    for cell in cells:
        measured = measure(cell, batches, arguments.turns, arguments.patience)
        target = f"{cell.target:.2f}" if cell.target else "-"
        print(
            f"{cell.width:6} {cell.k:4} {cell.core:>12} {cell.dead_share:5.0%} {measured.step_ms:9.1f} "
            f"{measured.product_ms:9.1f} {measured.ratio:6.2f} {target:>7} {measured.ratio_to_buffered:8.2f} "
            f"{measured.ratio_in_full:7.2f}  "
            f"({measured.n_turns} turns, {measured.n_disturbed} disturbed)",
            flush=True,
        )
        rows.append({**asdict(cell), "target": cell.target, **asdict(measured)})
    # In a process of its own, so that its peak memory is its own.
    command = [sys.executable, __file__, "--paper-scale"]
    paper = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"D=2304 K=65536 k=320: {paper}")
    print(json.dumps({"step": rows, "paper_scale": paper}))


if __name__ == "__main__":
    main()
