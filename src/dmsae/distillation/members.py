"""Distillation in one pass: SAEs that start from other weights, and the core that they agree on.

The first of them is trained exactly as cycle 0 of a distillation in cycles would be, and stands where it would stand;
its latents are the candidates.
"""

from pathlib import Path

from dmsae.activations.sources import ActivationSource
from dmsae.activations.store import Store
from dmsae.cores.attribution import Attribution
from dmsae.cores.consensus import consensus_core
from dmsae.cores.core import Core, Provenance
from dmsae.cores.norms import with_norm
from dmsae.disk import layout
from dmsae.disk.artifact import bound
from dmsae.distillation.config import DistillConfig
from dmsae.distillation.outcome import CycleFailed
from dmsae.errors import AttributionError
from dmsae.progress import SILENT, Progress
from dmsae.sae.comms import ALONE, Comms
from dmsae.sae.sae import SAE
from dmsae.seeds import derive_seed
from dmsae.training.config import TrainConfig
from dmsae.training.crew import train_on
from dmsae.training.learner import SAESpec
from dmsae.training.result import TrainState


def train_members(
    config: DistillConfig,
    train: TrainConfig,
    source: ActivationSource,
    here: Path,
    progress: Progress = SILENT,
    comms: Comms = ALONE,
) -> None:
    """Train the members of a consensus in the folder of cycle 0, on one stream."""
    sae = config.sae(source.d_model, 0)
    seeds = {layout.member(i): derive_seed(config.seed, "member", i) for i in range(1, config.members)}
    specs = [SAESpec(layout.SAE, sae), *(SAESpec(name, sae, init_seed=seed) for name, seed in seeds.items())]
    results = train_on(comms, specs, source, here, train, {"cycle": 0}, progress)
    if failed := [result for result in results if result.state is not TrainState.FINISHED]:
        cause = f"{failed[0].name} {failed[0].state} at step {failed[0].step} ({failed[0].cause})"
        raise CycleFailed(0, cause, "Try a smaller k or a lower lr, in a new directory.")


def select_consensus(config: DistillConfig, store: Store, here: Path, sae: SAE, attribution: Attribution) -> Core:
    """Return the latents of the first member that enough of the others have too."""
    if layout.has_artifact(here, layout.CORE):
        return Core.load(here)
    others = [SAE.load(here / layout.member(member)) for member in range(1, config.members)]
    provenance = Provenance.of(store, config.result_settings())
    members = [sae.cpu(), *others]
    try:
        core = consensus_core(
            members, attribution, store, provenance, config.consensus, config.coverage, config.max_rate
        )
    except AttributionError as error:
        raise CycleFailed(0, f"cannot be selected from: {error}", "Change it in a new directory.") from error
    core = with_norm(core, config.core_norm)
    core.save(here, bound(here, here / f"{layout.ATTRIBUTION}.json"))
    return core
