"""Scoring candidate latents from stored pairs, as a multiple of the bare encoder product over the same positions.

Both are timed in turn, in one process, on random weights and activations. The activations have a few strong
directions, so that the pre-activations are heavy-tailed as those of a trained SAE are. Reading the store is part of
the scoring.

    python benchmarks/attribution.py [--positions 16384] [--repeats 5]
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dmsae.attribution import AttributionConfig, attribute
from dmsae.sae import SAE, SAEConfig
from dmsae.store import Split, Store, StoreWriter, shard_file

D_MODEL, WIDTH, N_PREFIX, BATCH = 576, 16384, 512, 2048
CASES = ((40, 0), (320, 0), (40, 200), (320, 200))


def make_store(path: Path, n_positions: int, generator: torch.Generator) -> Store:
    """Write pairs as a harvest would: x in float16, g in float32."""
    writer = StoreWriter(path, {"model": {}})
    directions = torch.randn(64, D_MODEL, generator=generator)
    for index, start in enumerate(range(0, n_positions, 65536)):
        rows = min(65536, n_positions - start)
        strength = torch.randn(rows, 64, generator=generator).relu().pow(3)
        x = torch.randn(rows, D_MODEL, generator=generator) + 0.3 * strength @ directions
        g = 1e-2 * torch.randn(rows, D_MODEL, generator=generator)
        writer.add(shard_file(Split.PAIRS, index), {"x": x.half(), "g": g}, {})
    return writer.finish(D_MODEL)


def make_sae(k: int, n_core: int, generator: torch.Generator) -> SAE:
    """Return an SAE with random weights."""
    config = SAEConfig(D_MODEL, WIDTH, k, (n_core + N_PREFIX, WIDTH), n_core)
    return SAE.init(config, generator, torch.randn(n_core, D_MODEL, generator=generator) / D_MODEL**0.5)


def encoder_seconds(sae: SAE, batches: list[Tensor], out: Tensor) -> float:
    """Return the time of the bare encoder product over some batches."""
    W_enc = sae.W_enc.detach()
    start = time.perf_counter()
    for x in batches:
        torch.mm(x, W_enc.T, out=out[: len(x)])
    return time.perf_counter() - start


def scoring_seconds(sae: SAE, store: Store, config: AttributionConfig) -> float:
    """Return the time of scoring the candidate pool over the whole store."""
    start = time.perf_counter()
    attribute(sae, store, config)
    return time.perf_counter() - start


def main() -> None:
    """Measure, and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description="Scoring against the bare encoder product.")
    parser.add_argument("--positions", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    table = Table("k", "core", "encoder, s", "scoring, s", "ratio", title="attribution: × the encoder product")
    results = []
    with tempfile.TemporaryDirectory() as directory:
        store = make_store(Path(directory), arguments.positions, generator)
        batches = [batch["x"] for batch in store.batches(Split.PAIRS, BATCH)]
        out = torch.empty(BATCH, WIDTH)
        for k, n_core in CASES:
            sae, config = make_sae(k, n_core, generator), AttributionConfig(batch_size=BATCH)
            encoder, scoring = [], []
            for _ in range(arguments.repeats):
                encoder.append(encoder_seconds(sae, batches, out))
                scoring.append(scoring_seconds(sae, store, config))
            ratio = statistics.median(s / e for s, e in zip(scoring, encoder, strict=True))
            times = statistics.median(encoder), statistics.median(scoring)
            table.add_row(str(k), str(n_core), f"{times[0]:.2f}", f"{times[1]:.2f}", f"{ratio:.2f}")
            results.append({"k": k, "n_core": n_core, "encoder_s": times[0], "scoring_s": times[1], "ratio": ratio})
    Console().print(table)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    shape = {"d_model": D_MODEL, "width": WIDTH, "n_prefix": N_PREFIX, "batch_size": BATCH}
    facts = {"positions": arguments.positions, "threads": torch.get_num_threads(), "peak_bytes": peak}
    print(json.dumps({"benchmark": "attribution", **shape, **facts, "results": results}))


if __name__ == "__main__":
    main()
