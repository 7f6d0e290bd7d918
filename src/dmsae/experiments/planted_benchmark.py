"""The method on a problem with a known answer: which SAEs find what was planted, which cores hold what the loss reads.

For each seed another problem is planted and a core is distilled from it twice, dense and of detectors. SAEs are trained
from both, beside random cores and a Matryoshka SAE without a core. As in the other experiments, k counts the non-core
latents beside a dense core, as in the paper, and all latents with detectors; what is compared is read at the measured
L0. Every figure stands beside that of an untrained SAE of the same shape and L0, or of random scores.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from dmsae.activations.store import Store
from dmsae.config import require
from dmsae.cores.attribution import AttributionConfig, QuantileOver, attribute
from dmsae.cores.controls import RandomKind, Rule, core_by_rule
from dmsae.cores.core import Provenance
from dmsae.disk import layout
from dmsae.disk.files import write_json
from dmsae.distillation.config import DistillConfig
from dmsae.distillation.distill import Distillation
from dmsae.distillation.transfer import Budget
from dmsae.evaluation.fidelity import fidelity
from dmsae.evaluation.nulls import NullConfig, NullKind, NullMaker
from dmsae.evaluation.planted import Planted, PlantedConfig
from dmsae.evaluation.recovery import CoreRecovery, Ranking, Recovery, rank_features, recover, recover_core
from dmsae.evaluation.scores import as_json
from dmsae.experiments.lab import Lab, Start
from dmsae.progress import SILENT, Progress
from dmsae.sae.config import CoreMode
from dmsae.sae.sae import SAE
from dmsae.training.config import TrainConfig

_RULES = (Rule.ATTRIBUTION, Rule.FIRING_RATE, Rule.MEAN_ACTIVATION, Rule.RANDOM_SUBSET)


@dataclass(frozen=True, slots=True)
class PlantedBenchmarkConfig:
    """What is planted, and what is distilled from it."""

    planted: PlantedConfig = field(default_factory=PlantedConfig)
    """Its seed is that of the run."""
    distill: DistillConfig = field(
        default_factory=lambda: DistillConfig(
            width=192,
            k=3,
            nesting=(64, 192),
            cycles=2,
            attribution=AttributionConfig(batch_size=1024, n_bootstrap=0),
            train=TrainConfig(tokens=400 * 1024, batch_size=1024, lr=1e-2, device="cpu"),
        )
    )
    """How both cores are distilled, and the SAEs trained from them; core mode and seed are those of the run."""


class ScoredSAE(NamedTuple):
    """What one SAE has found, beside its null."""

    seed: int
    sae: str
    n_core: int
    l0: float
    """Latents that fire per held-out row."""
    fve: float
    """Fraction of the held-out variance explained."""
    recovery: Recovery
    untrained: Recovery
    """The same figures of an untrained SAE of this shape and L0."""
    attribution: dict[str, Ranking]
    """How well scores of core and prefix-0 rank read features, by what the scores are: gradient × activation over all
    positions or over active ones, or, as controls, the firing rate and the mean activation."""
    attribution_untrained: dict[str, Ranking]
    """The same for the untrained SAE, of which no latent is a feature: over all that are matched to one."""


class ScoredCore(NamedTuple):
    """Which features a core holds."""

    seed: int
    core: str
    """Distilled, or chosen from cycle 0 by another rule, with as many latents as the distilled dense core."""
    recovery: CoreRecovery
    chance: float
    """Precision of features chosen at random: the share that the loss reads."""


class PlantedResult(NamedTuple):
    """All figures of a benchmark, over its seeds."""

    config: PlantedBenchmarkConfig
    saes: list[ScoredSAE]
    cores: list[ScoredCore]


def planted_benchmark(
    config: PlantedBenchmarkConfig | None,
    directory: Path,
    seeds: Sequence[int] = (0, 1, 2),
    progress: Progress = SILENT,
) -> PlantedResult:
    """Run the benchmark in a directory, or what is left of it, write `planted.json` there and return the figures."""
    config = config or PlantedBenchmarkConfig()
    require(len(set(seeds)) == len(seeds) > 0, "seeds", list(seeds), "name at least one seed, and none twice")
    saes: list[ScoredSAE] = []
    cores: list[ScoredCore] = []
    for seed in seeds:
        problem = _Problem(config, directory, seed, progress)
        more_saes, more_cores = problem.run()
        saes += more_saes
        cores += more_cores
    result = PlantedResult(config, saes, cores)
    write_json(directory / layout.PLANTED, as_json(result))
    return result


class _Problem:
    """The benchmark for one seed."""

    def __init__(self, config: PlantedBenchmarkConfig, directory: Path, seed: int, progress: Progress) -> None:
        self._seed, self._progress = seed, progress
        self._planted = Planted(replace(config.planted, seed=seed))
        here = directory / f"seed-{seed}"
        self._store: Store = self._planted.store(here / "stores", progress)
        self._config = replace(config.distill, seed=seed)
        self._lab = Lab(self._store, self._config, here, progress)

    def run(self) -> tuple[list[ScoredSAE], list[ScoredCore]]:
        """Return the figures of all SAEs and cores."""
        dense = self._lab.distill(replace(self._config, core_mode=CoreMode.DENSE))
        detector = self._lab.distill(replace(self._config, core_mode=CoreMode.DETECTOR))
        control = (RandomKind.NORM_MATCHED,)
        of_dense = self._lab.transfer_config(self._config, "planted", random_cores=control, baselines=("msae",))
        of_detector = replace(of_dense, core_modes=(CoreMode.DETECTOR,), budget=Budget.TOTAL, baselines=())
        results = self._lab.transfer(of_dense, dense.distilled) + self._lab.transfer(of_detector, detector.distilled)
        cores = [self._distilled("dense", dense), self._distilled("detector", detector)]
        cores += self._by_rules(self._lab.start(self._config), len(dense.distilled))
        return [self._sae(one.name, SAE.load(one.directory)) for one in results], cores

    def _sae(self, name: str, sae: SAE) -> ScoredSAE:
        figures = fidelity(sae, self._store)
        assert figures is not None, "the store holds held-out rows"
        untrained = NullMaker(sae, self._store, NullConfig(seed=self._seed)).make(NullKind.UNTRAINED)
        assert isinstance(untrained, SAE)
        return ScoredSAE(
            seed=self._seed,
            sae=name,
            n_core=sae.config.n_core,
            l0=figures.l0_core + figures.l0_noncore,
            fve=figures.fve,
            recovery=recover(sae, self._planted),
            untrained=recover(untrained, self._planted),
            attribution=self._rankings(sae),
            attribution_untrained=self._rankings(untrained, only_found=False),
        )

    def _rankings(self, sae: SAE, only_found: bool = True) -> dict[str, Ranking]:
        scored = attribute(sae, self._store, self._config.attribution)
        assert scored.mean_activations_P is not None, "scores by gradient × activation have them"
        scores = {str(over): scored.over(over).scores_P for over in QuantileOver}
        scores |= {"rate": scored.firing_rates_P, "mean": scored.firing_rates_P * scored.mean_activations_P}
        return rank_features(scores, sae, self._planted, self._seed, only_found)

    def _distilled(self, name: str, run: Distillation) -> ScoredCore:
        return self._core(f"distilled {name}", run.last_sae, run.distilled.slots_C)

    def _by_rules(self, start: Start, n: int) -> list[ScoredCore]:
        provenance = Provenance.of(self._store, {})
        chosen = {
            rule: core_by_rule(rule, start.sae, start.attribution, n, self._store, provenance, self._seed)
            for rule in _RULES
        }
        return [self._core(str(rule), start.sae, core.slots_C) for rule, core in chosen.items()]

    def _core(self, name: str, sae: SAE, latents: torch.Tensor) -> ScoredCore:
        chance = float(self._planted.is_read_F.double().mean())
        return ScoredCore(self._seed, name, recover_core(sae, latents, self._planted), chance)
