"""What a harvest warned of, said again whenever its store is used: the warning is as true the second time."""

from dmsae.activations.contexts import warn_of_few_documents
from dmsae.activations.probe import Probe, warn_of_missing_bos
from dmsae.activations.request import HarvestRequest
from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.progress import Progress


def repeat_warnings(store: Store, progress: Progress) -> None:
    """Warn of few documents and of a BOS token that the model misses; of imported activations neither is known."""
    if not isinstance(store.request, HarvestRequest):
        return
    warn_of_few_documents(store.request, {split: store.n_documents(split) for split in Split}, progress)
    if store.probe is None:
        progress.note(
            f"The store {store.key} does not record whether its model misses a BOS token: it is an older one."
        )
    else:
        warn_of_missing_bos(Probe(**store.probe), progress)
