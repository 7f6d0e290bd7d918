"""A four-cycle distillation beside the same loop on dictionary_learning's trainer and buffer, end to end.

Both start from the bundled text and model, in one process, one after the other, and see the same tokens in each cycle.
dmsae runs the model once, and keeps what it gave. The other loop runs it anew in each cycle, as that package's buffer
does, both for activations and for gradients. A core's encoder rows are frozen and compete like all others (`sparse`),
which is what its trainer can do by masking a gradient.

The buffer needs nnsight below 0.4, which does not go with present transformers. In its place stands a forward pass that
stops at the hook, on contexts that are tokenised already, so the buffer here is faster than it is with nnsight.

    python benchmarks/peer_distill.py [--tokens 102400] [--width 2048] [--k 32]    # about 15 minutes on two cores
"""

import argparse
import importlib
import json
import sys
import tempfile
import time
import types
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmsae.activations.base_model import BaseModel
from dmsae.activations.contexts import Contexts
from dmsae.activations.harvest import Harvest
from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.commands.recipes import read_sections
from dmsae.commands.terminal import TERMINAL
from dmsae.cores.selection import select_core
from dmsae.distillation.config import DistillConfig
from dmsae.distillation.distill import distill
from dmsae.sae.config import CoreMode, matryoshka_nesting
from dmsae.sae.sae import SAE
from peers import dictionary_learning_trainers

CYCLES = 4
BATCH = 2048
_BUFFER_CONTEXTS = 128


class Saved:
    """What nnsight gives for something that is saved inside a trace."""

    value: Any = None

    def save(self) -> "Saved":
        """Return itself: its value is there when the trace has ended."""
        return self

    def stop(self) -> None:
        """Do nothing: the pass below stops at the hook anyway."""


class Traced:
    """Stands for nnsight's language model, and for the module in it that is hooked."""

    dtype = torch.float32

    def __init__(self, base: BaseModel) -> None:
        self._base, self.output, self.inputs = base, Saved(), Saved()
        self.seconds = 0.0

    @contextmanager
    def trace(self, contexts: list[Tensor], **_settings: Any) -> Iterator[None]:
        """Run the model on some contexts when the block ends."""
        yield
        start = time.perf_counter()
        tokens_NL = torch.stack(contexts)
        self.output.value = self._base.activations(tokens_NL)
        self.inputs.value = ((), {"attention_mask": tokens_NL >= 0})
        self.seconds += time.perf_counter() - start


class PeerLoop:
    """Algorithm 1 with dictionary_learning's Matryoshka trainer and its activation buffer."""

    def __init__(self, base: BaseModel, contexts: dict[Split, Contexts], config: DistillConfig, d_model: int) -> None:
        self._base, self._contexts, self._config, self._d_model = base, contexts, config, d_model
        self._trainers: Any = dictionary_learning_trainers()
        stand_in = types.ModuleType("nnsight")
        stand_in.__dict__["LanguageModel"] = object
        sys.modules["nnsight"] = stand_in
        self._buffer_class: Any = importlib.import_module("dictionary_learning.buffer").ActivationBuffer
        self.spent: dict[str, float] = defaultdict(float)
        self.scale = 1.0

    def run(self) -> tuple[Any, list[int]]:
        """Return the SAE of the last cycle and the sizes of the cores."""
        rows_CD, sizes = torch.zeros(0, self._d_model), []
        for _ in range(CYCLES + 1):
            ae = self._trained(rows_CD)
            start = time.perf_counter()
            rows_CD = ae.W_enc.detach().T[select_core(self._scores(ae, len(rows_CD)), self._config.coverage)]
            self.spent["scoring, with its model passes"] += time.perf_counter() - start
            sizes.append(len(rows_CD))
        return ae, sizes

    def _trained(self, rows_CD: Tensor) -> Any:
        traced = Traced(self._base)
        data = cycle(list(self._contexts[Split.TRAIN].tokens_NL))
        buffer = self._buffer_class(
            data,
            traced,
            traced,
            d_submodule=self._d_model,
            n_ctxs=_BUFFER_CONTEXTS,
            ctx_len=self._contexts[Split.TRAIN].tokens_NL.shape[1],
            refresh_batch_size=16,
            out_batch_size=BATCH,
        )
        start = time.perf_counter()
        trainer, steps = self._trainer(rows_CD), self._config.train.tokens // BATCH
        for step in range(steps):
            batch = next(buffer)
            if step == 0:
                self.scale = float(batch.pow(2).sum(1).mean().sqrt())
            trainer.update(step, batch / self.scale)
        self.spent["model"] += traced.seconds
        self.spent["training"] += time.perf_counter() - start - traced.seconds
        return trainer.ae

    def _trainer(self, rows_CD: Tensor) -> Any:
        config, n_core, steps = self._config, len(rows_CD), self._config.train.tokens // BATCH
        sizes = matryoshka_nesting(config.width)
        fractions = [size / config.width for size in torch.tensor(sizes).diff(prepend=torch.zeros(1)).tolist()]
        fractions = [fractions[0] + n_core / config.width, *fractions[1:-1], fractions[-1] - n_core / config.width]
        trainer = self._trainers.MatryoshkaBatchTopKTrainer(
            steps=steps,
            activation_dim=self._d_model,
            dict_size=config.width,
            k=config.k,
            layer=0,
            lm_name="none",
            group_fractions=fractions,
            lr=config.train.lr,
            warmup_steps=steps // 10,
            threshold_start_step=steps // 10,
            seed=0,
            device="cpu",
        )
        if n_core:
            frozen = torch.arange(n_core)
            trainer.ae.W_enc.data[:, :n_core] = rows_CD.T
            trainer.ae.W_enc.register_hook(lambda grad: grad.index_fill(1, frozen, 0.0))
        return trainer

    def _scores(self, ae: Any, n_core: int) -> Tensor:
        """Return gradient × activation of the core and prefix-0, its 0.99 quantile over positions."""
        candidates, found = n_core + matryoshka_nesting(self._config.width)[0], []
        for some in self._contexts[Split.PAIRS].split(8):
            at = self._base.gradients(some.tokens_NL)
            x_BD, g_BD = (one.flatten(0, 1) for one in (at.x_NLD, at.g_NLD))
            with torch.no_grad():
                f_BK = ae.encode(x_BD / self.scale, use_threshold=False)[:, :candidates]
                found.append((f_BK * (g_BD @ ae.W_dec[:candidates].T)).abs())
        return torch.cat(found).quantile(0.99, dim=0)


def fve(x_BD: Tensor, x_hat_BD: Tensor) -> float:
    """Return the share of the variance that a reconstruction explains."""
    return float(1 - (x_BD - x_hat_BD).pow(2).sum() / (x_BD - x_BD.mean(0)).pow(2).sum())


def ours(scratch: Path, gather: Any, config: DistillConfig) -> tuple[Harvest, Store, float, list[int], float]:
    """Return the harvest, its store, seconds, the sizes of the cores, and what the last SAE explains."""
    start = time.perf_counter()
    made = Harvest(gather, scratch / "stores", TERMINAL)
    store = made.run()
    done = distill(config, store, scratch / "run", progress=TERMINAL)
    seconds = time.perf_counter() - start
    sae, x_BD = SAE.load(scratch / "run" / f"cycle-{CYCLES}" / "sae"), store.heldout().float()
    return made, store, seconds, [len(core) for core in done.cores], fve(x_BD, sae.decode(sae.encode(x_BD)).detach())


def main() -> None:
    """Run both and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=102_400, help="training tokens, seen once in each cycle")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--k", type=int, default=32)
    arguments = parser.parse_args()
    sections = read_sections("demo")
    gather = replace(sections.harvest, train_tokens=arguments.tokens, heldout_tokens=4_096, pair_tokens=4_096)
    train = replace(sections.distill.train, tokens=arguments.tokens)
    shape = {"width": arguments.width, "k": arguments.k, "cycles": CYCLES, "core_mode": CoreMode.SPARSE}
    config = replace(sections.distill, **shape, train=train)
    with tempfile.TemporaryDirectory() as scratch:
        made, store, seconds, sizes, explained = ours(Path(scratch), gather, config)
        loop = PeerLoop(made.model, made.contexts(), config, store.d_model)
        start = time.perf_counter()
        ae, peer_sizes = loop.run()
        peer_seconds = time.perf_counter() - start
        x_BD = store.heldout().float()
        with torch.no_grad():
            peer_explained = fve(x_BD, ae(x_BD / loop.scale) * loop.scale)
    print(f"{'':22} {'seconds':>8}  {'cores':24} {'held-out FVE':>12}")
    print(f"{'dmsae':22} {seconds:8.0f}  {sizes!s:24} {explained:12.3f}")
    print(f"{'dictionary_learning':22} {peer_seconds:8.0f}  {peer_sizes!s:24} {peer_explained:12.3f}")
    for stage, spent in loop.spent.items():
        print(f"  {stage:20} {spent:8.0f}")
    print(f"ratio {peer_seconds / seconds:.1f}")
    facts = {"tokens": arguments.tokens, "width": arguments.width, "k": arguments.k, "cycles": CYCLES}
    times = {"dmsae": round(seconds, 1), "dictionary_learning": round(peer_seconds, 1)}
    spent_in = {stage: round(value, 1) for stage, value in loop.spent.items()}
    machine = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    print(
        json.dumps(
            {
                "benchmark": "peer_distill",
                **facts,
                "seconds": times,
                "peer_spent": spent_in,
                "ratio": round(peer_seconds / seconds, 2),
                "fve": {"dmsae": round(explained, 4), "dictionary_learning": round(peer_explained, 4)},
                **machine,
            }
        )
    )


if __name__ == "__main__":
    main()
