"""Where the time of a four-cycle distillation goes: harvest, training, scoring, and all else.

The real model and corpus, into an empty directory, in one process. Three stages are timed; all else (selection, saving,
loading, checkpoints, bookkeeping) is 'other'. Only the harvest loads and runs the base model, as the number of
harvested stores shows.

    python benchmarks/distill.py            # about ten minutes on two cores
    python benchmarks/distill.py --quick    # two minutes
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from dmsae.activations.harvest import harvest
from dmsae.commands.recipes import read_sections
from dmsae.commands.terminal import TERMINAL
from dmsae.cores.scoring import attribute_on
from dmsae.distillation import distill as distillation
from dmsae.training.trainer import Trainer

CYCLES = 4


def main() -> None:
    """Run a distillation and print where the time went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the tokens")
    arguments = parser.parse_args()
    sections = read_sections("demo")
    gather = sections.harvest
    config = replace(sections.distill, cycles=CYCLES)
    if arguments.quick:
        gather = replace(gather, train_tokens=20_000, heldout_tokens=2_000, pair_tokens=2_000)
        config = replace(config, train=replace(config.train, tokens=80_000))

    spent: dict[str, float] = defaultdict(float)

    def timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[stage] += time.perf_counter() - start

        return run

    training = patch.object(Trainer, "run", timed("training", Trainer.run))
    scoring = patch.object(distillation, "attribute_on", timed("scoring", attribute_on))
    with tempfile.TemporaryDirectory() as scratch, training, scoring:
        start = time.perf_counter()
        store = timed("harvest", harvest)(gather, Path(scratch) / "stores", TERMINAL)
        done = distillation.distill(config, store, Path(scratch) / "run", progress=TERMINAL)
        total = time.perf_counter() - start
        n_stores = len(list((Path(scratch) / "stores").iterdir()))
    spent["other"] = total - sum(spent.values())

    print(f"{'stage':10} {'seconds':>9} {'share':>7}")
    for stage in ("harvest", "training", "scoring", "other"):
        print(f"{stage:10} {spent[stage]:9.1f} {100 * spent[stage] / total:6.1f} %")
    print(f"{'all':10} {total:9.1f}")
    print(f"cores {[len(core) for core in done.cores]}, distilled {len(done.distilled)}; stores harvested: {n_stores}")
    print(
        json.dumps(
            {
                "benchmark": "distill",
                "cycles": CYCLES,
                "train_tokens": gather.train_tokens,
                "pair_tokens": gather.pair_tokens,
                "tokens_per_cycle": config.train.tokens,
                "seconds": {stage: round(value, 2) for stage, value in spent.items()},
                "share": {stage: round(value / total, 4) for stage, value in spent.items()},
                "stores_harvested": n_stores,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
