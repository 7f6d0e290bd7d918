"""Peak memory of a training process beside what the plan says, at several sizes and meshes.

Each row is a training of a few steps in processes of its own, with a checkpoint after each step, to the saved SAEs; a
rank's memory is what its peak exceeds the same process after a training of nothing much. The last line is one JSON
object.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dmsae.activations.sources import as_source
from dmsae.sae.config import SAEConfig, matryoshka_nesting
from dmsae.training.config import TrainConfig
from dmsae.training.learner import SAESpec
from dmsae.training.memory import training_memory
from dmsae.training.mesh import MeshConfig, join, leave
from dmsae.training.trainer import train_together

BATCH = 2048
SIZES = ((576, 4096, 32, 4), (576, 16_384, 320, 1), (1024, 32_768, 64, 1))
"""Model width, dictionary width, k, SAEs trained together."""
MESHES = ((1, 1), (2, 1), (1, 2))
MIB = 1 << 20


def peak() -> int:
    """Return the largest size that this process has had, in bytes."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else 1024 * size


def work(d_model: int, width: int, k: int, n: int, data: int, latents: int) -> None:
    """Train for a few steps as one rank, and print how much memory that took and how much was foreseen."""
    torch.set_num_threads(1)
    mesh = MeshConfig(data=data, latents=latents)
    comms = join(mesh, "cpu")
    with tempfile.TemporaryDirectory() as scratch:
        place = comms.both.of_first(scratch)
        tiny = [SAESpec("tiny", SAEConfig(16, 64, 4, (16, 64)))]
        recipe = TrainConfig(tokens=256, batch_size=64, norm_batches=1, checkpoint_seconds=0, device="cpu")
        train_together(
            tiny,
            as_source(torch.ones(512, 16) + torch.eye(16).repeat(32, 1)),
            Path(place) / "tiny",
            recipe,
            comms=comms,
        )
        x = torch.randn(2 * BATCH, d_model, generator=torch.Generator().manual_seed(0))
        before = peak()
        saes = [SAEConfig(d_model, width, k, matryoshka_nesting(width))] * n
        recipe = TrainConfig(tokens=4 * BATCH, batch_size=BATCH, norm_batches=1, checkpoint_seconds=0, device="cpu")
        specs = [SAESpec(f"sae-{i}", sae) for i, sae in enumerate(saes)]
        train_together(specs, as_source(x), Path(place) / "saes", recipe, comms=comms)
        foreseen = training_memory(saes, BATCH, mesh, x.nbytes).process
        # In one piece, newline included: the ranks write to one pipe, and without a buffer.
        sys.stdout.write(json.dumps({"before": before, "peak": peak(), "foreseen": foreseen}) + "\n")
        sys.stdout.flush()
        comms.both.of_each(None)  # the first rank's directory is there until all are done
    leave()


def measured(size: tuple[int, ...], mesh: tuple[int, int]) -> list[dict[str, int]]:
    """Return what every rank of a training reports."""
    numbers = [str(number) for number in (*size, *mesh)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={mesh[0] * mesh[1]}"]
    done = subprocess.run([*command, __file__, "--work", *numbers], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(lines) != mesh[0] * mesh[1]:
        raise SystemExit(f"The training of {size} on {mesh} failed:\n{done.stderr}")
    return [json.loads(line) for line in lines]


def main() -> None:
    """Print a row for every size and mesh."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", nargs=6, type=int)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args()
    if options.work:
        work(*options.work)
        return
    sizes = ((64, 256, 8, 2),) if options.tiny else SIZES
    table = Table("D", "K", "k", "SAEs", "mesh", "process", "measured", "plan", "plan / measured")
    rows: list[dict[str, Any]] = []
    for size in sizes:
        for mesh in MESHES:
            largest = max(measured(size, mesh), key=lambda one: one["peak"])
            start, peak_bytes, foreseen = (largest[name] for name in ("before", "peak", "foreseen"))
            ratio = (start + foreseen) / peak_bytes
            rows.append({"size": size, "mesh": mesh, "ratio": round(ratio, 3), **largest})
            sizes_mib = (f"{number // MIB:,}" for number in (peak_bytes, peak_bytes - start, foreseen))
            table.add_row(*map(str, size), f"{mesh[0]}×{mesh[1]}", *sizes_mib, f"{ratio:.3f}")
    Console(width=120).print(table)
    print("MiB. process: the peak of the largest rank. plan / measured: of the whole process, its start as measured.")
    print(json.dumps({"benchmark": "memory", "rows": rows}))


if __name__ == "__main__":
    main()
