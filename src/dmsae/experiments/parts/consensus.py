"""What several SAEs that start from other weights agree on, as detectors: one pass instead of cycles."""

from dataclasses import replace

from dmsae.config import Json
from dmsae.cores.consensus import consensus_core
from dmsae.cores.core import Core, Provenance
from dmsae.disk import layout
from dmsae.distillation.config import DistillConfig
from dmsae.errors import AttributionError
from dmsae.experiments.grid import Grid
from dmsae.experiments.lab import Lab
from dmsae.experiments.pricing import detectors
from dmsae.sae.sae import SAE
from dmsae.seeds import derive_seed
from dmsae.training.learner import SAESpec


def run(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return the rows of one seed; that the SAEs agree on nothing is a result too."""
    config = replace(lab.base, seed=seed, max_rate=grid.max_rate)
    try:
        core = agreed(lab, grid, config)
    except AttributionError as error:
        return {"rows": [], "note": str(error)}
    results = lab.transfer(detectors(lab, config, "consensus"), core)
    return {"rows": lab.rows(results, config, [lab.held(core, config)])}


def agreed(lab: Lab, grid: Grid, config: DistillConfig) -> Core:
    """Return the core that cycle 0 and SAEs of other initial weights agree on."""
    start = lab.start(config)
    train = replace(config.train, seed=derive_seed(config.seed, "cycle", 0))
    seeds = {layout.member(i): derive_seed(config.seed, "member", i) for i in range(1, grid.members)}
    specs = [SAESpec(name, start.sae.config, init_seed=seed) for name, seed in seeds.items()]
    others = [SAE.load(result.directory) for result in lab.train(specs, train)]
    provenance = Provenance.of(lab.store, config.result_settings())
    limits = (grid.consensus, config.coverage, config.max_rate)
    return consensus_core([start.sae, *others], start.attribution, lab.store, provenance, *limits)
