"""Scoring candidate latents from stored pairs, as a multiple of the bare encoder product over the same positions.

Both are timed in turn, in one process, on random weights and activations. The activations have a few strong
directions, so that pre-activations are heavy-tailed like those of a trained SAE, and the SAE has the inference
threshold that training would have given it. Reading the store is part of the scoring. On a busy machine the ratio of
CPU times is the more stable one.

    python benchmarks/attribution.py [--positions 8192] [--repeats 5]
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dmsae.activations.identity import ModelIdentity
from dmsae.activations.request import ImportRequest
from dmsae.activations.splits import Split
from dmsae.activations.store import Store, StoreWriter
from dmsae.cores.attribution import AttributionConfig, attribute
from dmsae.disk.layout import shard_file
from dmsae.sae.batch_topk import select_top
from dmsae.sae.config import DenseCore, SAEConfig
from dmsae.sae.sae import SAE

D_MODEL, WIDTH, N_PREFIX, BATCH = 576, 16384, 512, 2048
CASES = ((40, 0), (320, 0), (40, 200), (320, 200))


def make_store(path: Path, n_positions: int, generator: torch.Generator) -> Store:
    """Write pairs as a harvest would: x in float16, g in float32."""
    request = ImportRequest("random", ModelIdentity.imported("random"), "", 65536, "float16", 0)
    writer = StoreWriter(path, request)
    directions = torch.randn(64, D_MODEL, generator=generator)
    for index, start in enumerate(range(0, n_positions, 65536)):
        rows = min(65536, n_positions - start)
        strength = torch.randn(rows, 64, generator=generator).relu().pow(3)
        x = torch.randn(rows, D_MODEL, generator=generator) + 0.3 * strength @ directions
        g = 1e-2 * torch.randn(rows, D_MODEL, generator=generator)
        writer.add(shard_file(Split.PAIRS, index), {"x": x.half(), "g": g}, {})
    return writer.finish(D_MODEL)


def make_sae(k: int, n_core: int, x_BD: Tensor, generator: torch.Generator) -> SAE:
    """Return an SAE with random weights and the threshold that suits a batch."""
    core = DenseCore(n_core, k_noncore=k) if n_core else None
    config = SAEConfig(D_MODEL, WIDTH, k, (n_core + N_PREFIX, WIDTH), core)
    sae = SAE.init(config, generator, torch.randn(n_core, D_MODEL, generator=generator) / D_MODEL**0.5)
    kept = select_top(x_BD, (sae.W_enc_noncore,), sae.b_enc[n_core:], k * len(x_BD))
    sae.set_threshold_(float(kept.values_S.min()))
    return sae


def encode(W_enc: Tensor, batches: list[Tensor], out: Tensor) -> None:
    """Compute the bare encoder product over some batches."""
    for x in batches:
        torch.mm(x, W_enc.T, out=out[: len(x)])


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that work takes: wall time, and processor time of all cores."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Measure, and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description="Scoring against the bare encoder product.")
    parser.add_argument("--positions", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    table = Table("k", "core", "encoder, s", "scoring, s", "ratio", "CPU ratio", title="× the encoder product")
    results = []
    with tempfile.TemporaryDirectory() as directory:
        store = make_store(Path(directory), arguments.positions, generator)
        batches = [batch["x"] for batch in store.batches(Split.PAIRS, BATCH)]
        out, config = torch.empty(BATCH, WIDTH), AttributionConfig(batch_size=BATCH)
        for k, n_core in CASES:
            sae = make_sae(k, n_core, batches[0], generator)
            encoder, scoring = partial(encode, sae.W_enc.detach(), batches, out), partial(attribute, sae, store, config)
            times = [(*timed(encoder), *timed(scoring)) for _ in range(arguments.repeats)]
            measured = {
                "encoder_s": statistics.median(row[0] for row in times),
                "scoring_s": statistics.median(row[2] for row in times),
                "ratio": statistics.median(row[2] / row[0] for row in times),
                "cpu_ratio": statistics.median(row[3] / row[1] for row in times),
            }
            table.add_row(str(k), str(n_core), *(f"{value:.2f}" for value in measured.values()))
            results.append({"k": k, "n_core": n_core, **measured})
    Console().print(table)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    shape = {"d_model": D_MODEL, "width": WIDTH, "n_prefix": N_PREFIX, "batch_size": BATCH}
    facts = {"positions": arguments.positions, "threads": torch.get_num_threads(), "peak_bytes": peak}
    print(json.dumps({"benchmark": "attribution", **shape, **facts, "results": results}))


if __name__ == "__main__":
    main()
