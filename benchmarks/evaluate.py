"""How long all native measures take: one SAE and ten, with cold and warm caches; and matching 16k × 16k latents.

Each SAE is evaluated beside nulls by every measure that runs without a judge. Ten SAEs are the one given with its
non-core latents scaled a little. They share nulls, since they have one shape and fire as often, which is the best case;
`--own-nulls` gives each its own, the worst. `--others` takes SAEs that are really different in place of the copies.
Matching is on random unit rows, the hardest case for a sparse solver, and on a permuted, noisy copy, in a process of
its own whose peak memory is its own.

    python benchmarks/evaluate.py SAE STORE [--saes 10] [--root STORES]    # a directory, a key; an hour on two cores
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import torch
from torch.nn.functional import normalize

from dmsae.activations.store import open_store
from dmsae.commands.terminal import TERMINAL
from dmsae.evaluation.assignment import match_rows
from dmsae.evaluation.evaluate import EvaluateConfig, evaluate, load_model
from dmsae.sae.sae import SAE

_MATCHED, _D_MODEL = 16_384, 576


def variants(sae: SAE, n: int) -> dict[str, SAE]:
    """Return SAEs that take as long to evaluate as the one given, and are not the same."""
    made = {}
    for i in range(n):
        other = SAE(sae.config)
        other.load_state_dict(sae.state_dict())
        other.W_dec.data[sae.config.n_core :] *= 1 + 1e-4 * i
        made[f"sae-{i}"] = other
    return made


def matching() -> dict[str, float]:
    """Return seconds and peak memory of matching two dictionaries, unrelated and alike."""
    torch.manual_seed(0)
    first, unrelated = (normalize(torch.randn(_MATCHED, _D_MODEL)) for _ in range(2))
    alike = normalize(first[torch.randperm(_MATCHED)] + 0.02 * torch.randn(_MATCHED, _D_MODEL))
    before = peak_gib()
    seconds = {}
    for name, second in (("unrelated", unrelated), ("alike", alike)):
        start = time.perf_counter()
        match_rows(first, second)
        seconds[name] = round(time.perf_counter() - start, 1)
    return {**seconds, "peak_gib": peak_gib(), "of_it_before_gib": before}


def peak_gib() -> float:
    """Return the peak memory of this process. (That of `getrusage` counts the process that started it, too.)"""
    status = Path("/proc/self/status").read_text(encoding="utf8")
    return round(int(status.partition("VmHWM:")[2].split()[0]) / 2**20, 2)


def main() -> None:
    """Print the table, and one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sae", type=Path, nargs="?", help="directory of an SAE")
    parser.add_argument("store", nargs="?", help="key of its store")
    parser.add_argument("--saes", type=int, default=10, help="how many SAEs to evaluate at once; 0: only the one")
    parser.add_argument("--others", type=Path, nargs="+", default=[], help="directories of other SAEs, for the several")
    parser.add_argument("--root", type=Path, default=None, help="directory of stores")
    parser.add_argument("--own-nulls", action="store_true", help="no two SAEs share nulls")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--matching", action="store_true", help="only the matching")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.matching or arguments.store is None:
        print(json.dumps(matching()))
        return
    sae = SAE.load(arguments.sae)
    store = open_store(arguments.store, arguments.root)
    model = load_model(store, progress=TERMINAL)
    config = EvaluateConfig(share_nulls=0.0) if arguments.own_nulls else EvaluateConfig()
    seconds: dict[str, float] = {}
    cpu_seconds: dict[str, float] = {}
    by_measure: dict[str, float] = {}
    dictionaries: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as scratch:
        several = {"the one": sae} | {str(other): SAE.load(other) for other in arguments.others}
        several = several if arguments.others else variants(sae, arguments.saes)
        runs = {"one, cold": variants(sae, 1), "one, warm": variants(sae, 1)}
        runs |= {f"{len(several)}, warm": several, f"{len(several)}, cold": several} if several else {}
        for name, saes in runs.items():
            cache = Path(scratch) / ("other cache" if name == f"{len(several)}, cold" else "cache")
            with patch("dmsae.disk.layout.evaluation_cache", lambda cache=cache: cache):
                start, start_cpu = time.perf_counter(), time.process_time()
                done = evaluate(saes, store, Path(scratch) / name, config, model=model, progress=TERMINAL)
            seconds[name] = round(time.perf_counter() - start, 1)
            cpu_seconds[name] = round(time.process_time() - start_cpu, 1)
            dictionaries[name] = len(done.subjects)
            by_measure = by_measure or {one: round(found["seconds"], 1) for one, found in done.measures.items()}
            took = f"{seconds[name]:8.0f} s, of the CPU {cpu_seconds[name]:8.0f} s"
            print(f"{name:12} {took}, {dictionaries[name]} dictionaries with nulls", flush=True)
    command = [sys.executable, __file__, "--matching"]
    matched = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"matching {_MATCHED:,} × {_MATCHED:,}: {matched}")
    facts = {"width": sae.config.width, "threads": torch.get_num_threads(), "torch": torch.__version__}
    times = {"seconds": seconds, "cpu_seconds": cpu_seconds, "cold": by_measure, "dictionaries": dictionaries}
    print(json.dumps({"benchmark": "evaluate", **facts, **times, "matching": matched}))


if __name__ == "__main__":
    main()
