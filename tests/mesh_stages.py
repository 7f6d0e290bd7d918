"""The stages of a distillation on a mesh: harvest, attribution, all of it."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

from dmsae.activations.harvest import Harvest
from dmsae.activations.request import HarvestConfig
from dmsae.activations.shards import ShardMaker
from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.cores.attribution import Attribution, AttributionConfig
from dmsae.cores.scoring import attribute_on
from dmsae.distillation.distill import DistillConfig, distill
from dmsae.errors import DmsaeError
from dmsae.sae.comms import Comms
from dmsae.sae.sae import SAE
from dmsae.training.crew import follow, harvest_on, lead


def harvest_here(comms: Comms, config: HarvestConfig, root: Path, broken: int | None = None) -> str:
    """Harvest, and return what each rank hears; one rank may have a model that puts out no finite numbers."""
    select = ShardMaker._select

    def infinite(self: ShardMaker, split: Split, shard: Any, *args: Any) -> Any:
        return select(self, split, shard | {"x": shard["x"] / 0}, *args)

    with patch.object(ShardMaker, "_select", infinite if comms.both.rank == broken else select):
        try:
            lead(comms, lambda on: harvest_on(on, Harvest(config, root))) if comms.is_first else follow(comms)
        except DmsaeError as error:
            return str(error)
    return "nothing"


def score_here(comms: Comms, sae: Path, store: Path, config: AttributionConfig) -> Attribution | str | None:
    """Return the scores that the first rank gets, or what each rank hears."""
    scores: list[Attribution] = []

    def command(on: Comms) -> None:
        scores.append(attribute_on(on, SAE.load(sae), sae, Store.open(store), config, "cpu"))

    try:
        lead(comms, command) if comms.is_first else follow(comms)
    except DmsaeError as error:
        return f"{type(error).__name__}: {error}"
    return scores[0] if scores else None


def distill_here(comms: Comms, config: DistillConfig, store: Path, directory: Path) -> None:
    """Distill a core."""
    lead(comms, lambda on: distill(config, Store.open(store), directory, comms=on)) if comms.is_first else follow(comms)
