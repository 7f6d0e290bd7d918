"""What SAEs with the first core are worth by every measure, beside nulls, random cores, MSAE and BatchTopK.

They are those of the part `paper`. Of its SAEs that keep nothing, which are Matryoshka SAEs, those nearest in L0 to one
with a core are evaluated; the BatchTopK SAE is trained for the L0 of the detectors.
"""

from collections.abc import Sequence
from dataclasses import replace

from dmsae.config import Json
from dmsae.evaluation.fidelity import kept_fidelity
from dmsae.evaluation.nulls import NullKind
from dmsae.experiments.grid import Grid
from dmsae.experiments.lab import Lab
from dmsae.experiments.parts import paper
from dmsae.sae.config import CoreMode
from dmsae.sae.sae import SAE
from dmsae.training.result import TrainResult


def run(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return the rows and the scores of one seed."""
    config = replace(lab.base, seed=seed)
    core, results = lab.first_core(config), paper.saes(lab, grid, config)
    l0s = _l0s(lab, results)
    chosen = _compared(results, l0s)
    detectors = next((l0 for name, l0 in l0s.items() if name.startswith(str(CoreMode.DETECTOR))), config.k)
    alone = lab.transfer_config(config, "worth", k=(round(detectors),), core_modes=(), baselines=("batchtopk",))
    chosen += (beside := lab.transfer(alone, core))
    names = {one.name for one in chosen}
    rows = lab.rows([*results, *beside], config, [lab.held(core, config)])  # a price needs all that keep nothing
    scores = lab.scores(chosen, grid.measures, (NullKind.UNTRAINED, NullKind.RANDOM_ENCODER))
    return {"rows": [row for row in rows if row["sae"] in names], "scores": scores}


def _l0s(lab: Lab, results: Sequence[TrainResult]) -> dict[str, float]:
    """Return the L0 of each SAE whose training ended with figures."""
    found = {one.name: kept_fidelity(one.directory, lab.store) for one in results}
    return {name: figures.l0_core + figures.l0_noncore for name, figures in found.items() if figures}


def _compared(results: Sequence[TrainResult], l0s: dict[str, float]) -> list[TrainResult]:
    """Return the SAEs with a core, and for each the one without that is nearest in L0."""
    measured = [one for one in results if one.name in l0s]
    free = [one for one in measured if not SAE.load(one.directory).config.n_core]
    kept = [one for one in measured if one not in free]
    nearest = [min(free, key=lambda other: abs(l0s[other.name] - l0s[one.name])) for one in kept] if free else []
    return kept + [one for one in free if one in nearest]
