"""SAEs from distilled cores at several sparsities, beside random cores, MSAE and BatchTopK: every measure against L0.

All share data and seeds. Dense and sparse cores follow the paper (k counts the non-core latents); detectors are trained
at a total L0 of k. What is compared is read at the measured L0. Random cores, in every mode, stand at the smallest and
largest k.
"""

from collections.abc import Sequence
from dataclasses import replace

from dmsae.config import Json
from dmsae.cores.controls import RandomKind
from dmsae.cores.core import Core
from dmsae.distillation.config import DistillConfig
from dmsae.distillation.transfer import Budget, TransferConfig, above, below, sae_specs
from dmsae.errors import ConfigError
from dmsae.evaluation.fidelity import kept_fidelity
from dmsae.evaluation.nulls import NullKind
from dmsae.experiments.grid import Grid, scaled
from dmsae.experiments.lab import Lab
from dmsae.sae.config import CoreMode
from dmsae.training.result import TrainResult

_PAPER_MODES = (CoreMode.DENSE, CoreMode.SPARSE)


def run(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return the rows and the scores of one seed, and which sparsities a core of detectors leaves no room for."""
    config = replace(lab.base, seed=seed)
    ks = tuple(dict.fromkeys(scaled(config.k, factor) for factor in grid.benchmark_k_factors))
    dense = lab.distill(config)
    detectors = lab.distill(replace(config, core_mode=CoreMode.DETECTOR, max_rate=grid.max_rate))
    results = _paper(lab, config, dense.distilled, ks)
    chosen, left_out = _detectors(lab, config, detectors.distilled, ks)
    if chosen:
        results += _beside_random(lab, chosen, detectors.distilled)
    return {"rows": lab.rows(results, config), "scores": _scores(lab, grid, results), "left_out": left_out}


def _scores(lab: Lab, grid: Grid, results: Sequence[TrainResult]) -> list[Json]:
    """Return the scores of all SAEs. Nulls depend on little but L0, which every second Matryoshka SAE covers."""
    msae = sorted((one for one in results if one.name.startswith("msae-")), key=_k)
    compared = msae[1::2] or msae
    others = [one for one in results if one not in compared]
    return lab.scores(compared, grid.measures, (NullKind.RANDOM_ENCODER,)) + lab.scores(others, grid.measures, ())


def _paper(lab: Lab, config: DistillConfig, core: Core, ks: tuple[int, ...]) -> list[TrainResult]:
    """Train SAEs with dense and sparse cores, and baselines; some at the L0 of dense cores, which lies far above k."""
    chosen = lab.transfer_config(config, "benchmark", k=ks)
    beside = replace(chosen, random_cores=(RandomKind.NORM_MATCHED,))
    dense, sparse = (_beside_random(lab, replace(beside, core_modes=(mode,)), core) for mode in _PAPER_MODES)
    others = replace(chosen, core_modes=(), baselines=("msae", "batchtopk"))
    results = dense + sparse + lab.transfer(others, core)
    # The L0 at inference misses k by a few per cent, so that the ends have to lie further out.
    lowest = below(min(ks))
    if lowest not in ks:
        results += lab.transfer(replace(others, k=(lowest,), baselines=("msae",)), core)
    if reached := tuple(sorted(_around(lab, dense) - {*ks, lowest})):
        results += lab.transfer(replace(others, k=reached, core_modes=(CoreMode.SPARSE,), baselines=("msae",)), core)
    return results


def _beside_random(lab: Lab, chosen: TransferConfig, core: Core) -> list[TrainResult]:
    """Train SAEs from a core at all sparsities, but those from a random one at the smallest and largest alone."""
    ends = tuple(k for k in chosen.k if k in (min(chosen.k), max(chosen.k)))
    results = lab.transfer(replace(chosen, k=ends), core)
    if inner := tuple(k for k in chosen.k if k not in ends):
        results += lab.transfer(replace(chosen, k=inner, random_cores=()), core)
    return sorted(results, key=_k)


def _around(lab: Lab, results: Sequence[TrainResult]) -> set[int]:
    """Return sparsities around the measured L0 of dense cores: what is compared lies between them."""
    found = [kept_fidelity(one.directory, lab.store) for one in results if one.name.startswith(str(CoreMode.DENSE))]
    l0s = [figures.l0_core + figures.l0_noncore for figures in found if figures is not None]
    return {below(min(l0s)), above(max(l0s))} if l0s else set()


def _k(result: TrainResult) -> int:
    """Return the sparsity that an SAE was trained for."""
    return int(result.name.rpartition("-k")[2])


def _detectors(lab: Lab, config: DistillConfig, core: Core, ks: tuple[int, ...]) -> tuple[TransferConfig | None, Json]:
    """Return the transfer of detectors at those k that their own activity leaves room for, and why not at others."""
    chosen = lab.transfer_config(
        config,
        "benchmark",
        k=ks,
        core_modes=(CoreMode.DETECTOR,),
        budget=Budget.TOTAL,
        random_cores=(RandomKind.NORM_MATCHED,),
    )
    fitting, left_out = [], {}
    for k in ks:
        try:
            sae_specs(replace(chosen, k=(k,)), core, lab.store)
            fitting.append(k)
        except ConfigError as error:
            left_out[f"{CoreMode.DETECTOR}-k{k}"] = str(error)
    return replace(chosen, k=tuple(fitting)) if fitting else None, left_out
