"""The step of `benchmarks/step.py` on a trained SAE and real activations, and where its time goes.

For each shape an SAE is trained for some steps on the demo's store (harvested if it is not there). Then step and bare
encoder product take turns, as there. A profile lists the operations of a few steps by their own time, so that it shows
what a step does beside the product.

    python benchmarks/trained_step.py [--steps 150] [--turns 15] [--patience 120]    # about ten minutes on two cores
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import Tensor

from dmsae.activations.harvest import harvest
from dmsae.activations.sources import StoreSource
from dmsae.commands.recipes import read_sections
from dmsae.commands.terminal import TERMINAL
from step import BATCH, TARGETS, Cell, make_step, measure_step

_PROFILED = 5
_SHOWN = 8


def real_batches() -> list[Tensor]:
    """Return the activations of the demo's store in batches, divided by their root mean square norm."""
    source = StoreSource(harvest(read_sections("demo").harvest, progress=TERMINAL))
    rows: list[Tensor] = []
    while (block := source.block(epoch=0, index=len(rows), seed=0)) is not None:
        rows.append(block.float())
    x_ND = torch.cat(rows)
    x_ND = x_ND / x_ND.square().sum(1).mean().sqrt()
    return [batch for batch in x_ND.split(BATCH) if len(batch) == BATCH]


def profile(step: Callable[[], None]) -> dict[str, float]:
    """Return the share of a step's time that each operation takes by itself, the largest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(_PROFILED):
            step()
    times = {one.key: one.self_cpu_time_total for one in profiler.key_averages()}
    total = sum(times.values())
    largest = sorted(times.items(), key=lambda item: -item[1])[:_SHOWN]
    return {name: round(spent / total, 3) for name, spent in largest}


def main() -> None:
    """Print a line and a profile for each shape, and one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="training steps before the measurement")
    parser.add_argument("--turns", type=int, default=15, help="undisturbed turns per shape")
    parser.add_argument("--patience", type=float, default=120, help="seconds to wait for them per shape")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    batches, rows = real_batches(), []
    for width, k in TARGETS:
        step, sae = make_step(Cell(width, k, d_model=batches[0].shape[1]), batches)
        for _ in range(arguments.steps):
            step()
        measured = measure_step(step, sae, batches[0], arguments.turns, arguments.patience)
        print(
            f"K={width} k={k}: step {measured.step_ms} ms, {measured.ratio} of the product, "
            f"{measured.ratio_to_buffered} of it into a kept buffer, {measured.ratio_in_full} without a short list "
            f"({measured.n_turns} turns, {measured.n_disturbed} disturbed)",
            flush=True,
        )
        shares = profile(step)
        print("    " + ", ".join(f"{name} {share:.1%}" for name, share in shares.items()), flush=True)
        rows.append({"width": width, "k": k, **asdict(measured), "profile": shares})
    print(json.dumps({"benchmark": "trained_step", "steps": arguments.steps, "rows": rows, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
