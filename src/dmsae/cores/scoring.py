"""Attribution on a mesh: every rank loads the SAE, and they share the pairs among them."""

from pathlib import Path
from typing import Any

from dmsae.activations.store import Store
from dmsae.cores.attribution import Attribution, AttributionConfig, attribute
from dmsae.devices import training_device
from dmsae.progress import Progress
from dmsae.sae.comms import Comms
from dmsae.sae.sae import SAE
from dmsae.training.crew import share


def attribute_on(
    comms: Comms, sae: SAE, directory: Path, store: Store, config: AttributionConfig, device: str
) -> Attribution:
    """Return the scores of the SAE that is saved in a directory, by all ranks of a mesh whose first one calls this."""
    scores: Attribution = share(comms, _Scoring(sae, directory, store, config, device))
    return scores


class _Scoring:
    def __init__(self, sae: SAE, directory: Path, store: Store, config: AttributionConfig, device: str) -> None:
        self._sae, self._directory, self._store = sae.to(training_device(device)), directory, store
        self._config, self._device = config, device

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to another process as what it takes to load the SAE and open the store there."""
        return _again, (self._directory.absolute(), self._store, self._config, self._device)

    def run(self, progress: Progress, comms: Comms) -> Attribution:
        """Score the share of this rank, and return the scores from all."""
        return attribute(self._sae, self._store, self._config, comms.both)


def _again(directory: Path, store: Store, config: AttributionConfig, device: str) -> _Scoring:
    return _Scoring(SAE.load(directory), directory, store, config, device)
