"""The step of `benchmarks/step.py` compared with those of dictionary_learning 0.1.0 and SAELens 6.54.12.

All take turns with the bare encoder product in one process, on the same batches, each with its own model, loss,
gradient clip and Adam as in its trainer. `make bench-peers` runs this in a separate environment.

    python benchmarks/peers.py [--turns 5] [--patience 300]
"""

import argparse
import importlib
import importlib.util
import json
import statistics
import sys
import types
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from dmsae.sae.config import matryoshka_nesting
from step import D_MODEL, N_BATCHES, TARGETS, Cell, make_batches, make_step, take_turns


@cache
def dictionary_learning_trainers() -> Any:
    """Return the module of the published Matryoshka trainer, without its package's `__init__`, which needs nnsight."""
    spec = importlib.util.find_spec("dictionary_learning")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("dictionary_learning is not installed here; run `make bench-peers`.")
    root = spec.submodule_search_locations[0]
    for name, path in {"dictionary_learning": root, "dictionary_learning.trainers": f"{root}/trainers"}.items():
        package = types.ModuleType(name)
        package.__path__ = [path]
        sys.modules[name] = package
    return importlib.import_module("dictionary_learning.trainers.matryoshka_batch_top_k")


def dictionary_learning_step(width: int, k: int, batches: list[Tensor]) -> Callable[[], None]:
    """Return the step of the published Matryoshka trainer."""
    trainer = dictionary_learning_trainers().MatryoshkaBatchTopKTrainer(
        steps=100_000,
        activation_dim=D_MODEL,
        dict_size=width,
        k=k,
        layer=0,
        lm_name="none",
        group_fractions=[1 / 32, 1 / 16, 1 / 8, 1 / 4, 17 / 32],
        lr=3e-4,
        seed=0,
        device="cpu",
    )
    n_steps = 0

    def step() -> None:
        nonlocal n_steps
        trainer.update(n_steps, batches[n_steps % N_BATCHES])
        n_steps += 1

    return step


def saelens_step(width: int, k: int, batches: list[Tensor]) -> Callable[[], None]:
    """Return the step that SAELens' trainer takes with its Matryoshka BatchTopK SAE."""
    lens: Any = importlib.import_module("sae_lens")
    step_input: Any = importlib.import_module("sae_lens.saes.sae").TrainStepInput
    config = lens.MatryoshkaBatchTopKTrainingSAEConfig(
        d_in=D_MODEL, d_sae=width, k=k, matryoshka_widths=list(matryoshka_nesting(width)), device="cpu"
    )
    sae = lens.MatryoshkaBatchTopKTrainingSAE(config)
    optimiser = torch.optim.Adam(sae.parameters(), lr=3e-4)
    n_steps = 0

    def step() -> None:
        nonlocal n_steps
        batch = step_input(
            sae_in=batches[n_steps % N_BATCHES],
            coefficients={},
            dead_neuron_mask=None,
            n_training_steps=n_steps,
            is_logging_step=False,
        )
        optimiser.zero_grad()
        sae.training_forward_pass(batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(sae.parameters(), 1.0)
        optimiser.step()
        n_steps += 1

    return step


def main() -> None:
    """Print the table, and one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--turns", type=int, default=5, help="undisturbed turns per cell")
    parser.add_argument("--patience", type=float, default=300, help="seconds to wait for them per cell")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    batches = make_batches(D_MODEL, torch.Generator().manual_seed(0))
    rows = []
    for width, k in TARGETS:
        step, sae = make_step(Cell(width, k), batches)
        W_enc = sae.W_enc.detach()
        times, n_disturbed = take_turns(
            {
                "product": partial(torch.mm, batches[0], W_enc.T),
                "dmsae": step,
                "dictionary_learning": dictionary_learning_step(width, k, batches),
                "sae_lens": saelens_step(width, k, batches),
            },
            arguments.turns,
            arguments.patience,
        )
        ratios = {
            name: round(statistics.median(t / p for t, p in zip(times[name], times["product"], strict=True)), 2)
            for name in ("dmsae", "dictionary_learning", "sae_lens")
        }
        print(f"K={width} k={k}: {ratios} ({len(times['product'])} turns, {n_disturbed} disturbed)", flush=True)
        rows.append({"width": width, "k": k, "n_disturbed": n_disturbed, **ratios})
    print(json.dumps({"peers": rows}))


if __name__ == "__main__":
    main()
