"""A core is found where neither activation alone nor gradient alone says what matters, and by no simpler rule."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dmsae.activations.splits import Split
from dmsae.cores.attribution import Attribution, AttributionConfig
from dmsae.cores.controls import Rule, core_by_rule
from dmsae.cores.core import Provenance
from dmsae.disk import layout
from dmsae.distillation.distill import Cycle0, DistillConfig, distill
from dmsae.sae.config import CoreMode
from dmsae.sae.sae import SAE
from dmsae.training.config import TrainConfig
from planted import Planted, misleading_store

TRAIN = TrainConfig(tokens=200 * 512, batch_size=512, lr=1e-2, log_every=100, device="cpu")
SCORES = AttributionConfig(batch_size=512, n_bootstrap=0)
MODES = (CoreMode.DENSE, CoreMode.DETECTOR)
ALIKE = 0.9
N_SUBSETS = 20


class Found(NamedTuple):
    precision: float
    """Share of the latents that are read directions."""
    recall: float
    """Share of the read directions that a latent is."""


def found(planted: Planted, encoder: Tensor, decoder: Tensor) -> Found:
    """A latent is a direction if both its rows point that way, within the space that the data spans."""
    inside = [torch.nn.functional.normalize(rows @ planted.directions.T, dim=1) for rows in (encoder, decoder)]
    (read, wrote), (reads, writes) = zip(*(rows.max(dim=1) for rows in inside), strict=True)
    is_read = (read >= ALIKE) & (wrote >= ALIKE) & (reads == writes) & (reads < planted.n_read)
    return Found(float(is_read.float().mean()), len(set(reads[is_read].tolist())) / planted.n_read)


def mean(results: list[Found]) -> Found:
    return Found(*(sum(values) / len(results) for values in zip(*results, strict=True)))


def distilled(planted: Planted, directory: Path, seed: int) -> dict[CoreMode, tuple[int, Found]]:
    """The size of each mode's core, and what it holds; both begin with the same cycle 0."""
    results = {}
    first = layout.cycle_directory(directory / CoreMode.DENSE, 0) / layout.SAE
    for mode in MODES:
        config = DistillConfig(
            width=96,
            k=3,
            nesting=(48, 96),
            cycles=2,
            core_mode=mode,
            cycle0=Cycle0("" if mode is CoreMode.DENSE else str(first)),
            train=TRAIN,
            attribution=SCORES,
            seed=seed,
        )
        done = distill(config, planted.store, directory / mode)
        core = done.distilled
        results[mode] = len(core), found(planted, core.encoder_CD, done.last_sae.W_dec[core.slots_C])
    return results


def controls(planted: Planted, cycle0: Path, n: int) -> dict[str, Found]:
    """What as many latents of cycle 0 hold when they are chosen by activation, by gradient, or by nothing."""
    sae, scores = SAE.load(cycle0), Attribution.load(cycle0)
    provenance = Provenance.of(planted.store, {})
    results = {}
    for rule in (Rule.FIRING_RATE, Rule.MEAN_ACTIVATION, Rule.RANDOM_SUBSET, Rule.PRINCIPAL_COMPONENTS):
        draws = []
        for seed in range(N_SUBSETS if rule is Rule.RANDOM_SUBSET else 1):
            core = core_by_rule(rule, sae, scores, n, planted.store, provenance, seed)
            of_sae = rule is not Rule.PRINCIPAL_COMPONENTS
            decoder = sae.W_dec[core.slots_C] if of_sae else core.encoder_CD
            draws.append(found(planted, core.encoder_CD, decoder))
        results[str(rule)] = mean(draws)
    g = torch.cat([batch["g"] for batch in planted.store.batches(Split.PAIRS, 2048)])
    along = (g @ sae.W_dec[: sae.config.prefixes[0]].T).abs()
    for name, strength in {"mean": along.mean(0), "quantile": along.quantile(SCORES.quantile, dim=0)}.items():
        top = strength.topk(n).indices
        results[f"gradient, {name}"] = found(planted, sae.W_enc[top], sae.W_dec[top])
    return results


@pytest.mark.usefixtures("one_thread")
def test_distillation_finds_what_matters_and_simpler_rules_do_not(tmp_path: Path) -> None:
    """The bounds are loose on purpose. They were set after a look at ten seeds and hold for nine of them.

    In all ten a distilled core had a precision of 0.57 to 1 (mean 0.92 dense, 0.86 detector) and a recall of 0.67 to 1
    (0.98 and 0.95). It falls short of 1 where an SAE has learned a mixture of two directions. Simpler rules had at most
    0.18 of either, but in seed 9, whose dense core has ten latents, up to 0.4 and 0.67.
    """
    cores: dict[CoreMode, list[Found]] = {mode: [] for mode in MODES}
    for seed in range(3):
        planted = misleading_store(tmp_path / f"store-{seed}", seed=seed)
        run = tmp_path / f"run-{seed}"
        of_mode = distilled(planted, run, seed)
        for mode, (_, core) in of_mode.items():
            cores[mode].append(core)
            assert core.precision >= 0.5, (seed, mode)
            assert core.recall >= 0.65, (seed, mode)
        n_core, _ = of_mode[CoreMode.DENSE]
        for name, control in controls(planted, layout.cycle_directory(run / CoreMode.DENSE, 0), n_core).items():
            assert max(control) <= 0.3, (seed, name, control)
    for mode in MODES:
        assert mean(cores[mode]).precision >= 0.75, mode
        assert mean(cores[mode]).recall >= 0.8, mode
