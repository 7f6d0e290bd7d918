"""The next-token loss of trained SAEs, measured once and kept beside each in `loss.json`.

It is that of the model with the SAE's reconstruction in place of its activations, on held-out text (see `splice`). What
is kept of another store, other settings or an earlier version is measured again.
"""

from collections.abc import Sequence
from pathlib import Path

from dmsae.activations.store import Store
from dmsae.config import Json, to_dict
from dmsae.disk import layout
from dmsae.disk.artifact import bound, read_sealed, write_sealed
from dmsae.errors import CheckpointError
from dmsae.evaluation.evaluate import load_model
from dmsae.evaluation.measures import MEASURES
from dmsae.evaluation.splice import SpliceConfig, SpliceResult, splice
from dmsae.evaluation.subject import Subject
from dmsae.progress import SILENT, Progress
from dmsae.sae.sae import SAE

_REMEDY = "Remove it: it will be measured again."


def kept_losses(
    directories: Sequence[Path], store: Store, device: str = "auto", progress: Progress = SILENT
) -> dict[Path, SpliceResult]:
    """Return how well the model predicts with each SAE in some directories: as kept there, or measured now and kept.

    The model is loaded only if something has to be measured, and runs on its own text, which an imported store lacks.
    """
    config = SpliceConfig()
    made_from = {"store": store.key, "version": MEASURES["splice"].version, "settings": to_dict(config)}
    kept = {directory: _read(directory / layout.LOSS, made_from) for directory in directories}
    missing = [directory for directory, figures in kept.items() if figures is None]
    if missing:
        store.require_text()
        model = load_model(store, device=device, progress=progress)
        subjects = [Subject(directory.name, SAE.load(directory)) for directory in missing]
        measured = splice(subjects, model, store, config, layout.evaluation_cache(), progress)
        for directory, figures in zip(missing, measured, strict=True):
            facts = made_from | {"figures": figures._asdict()}
            write_sealed(directory / layout.LOSS, facts, bound(directory, directory / f"{layout.SAE}.json"))
            kept[directory] = figures
    return {directory: figures for directory, figures in kept.items() if figures is not None}


def _read(path: Path, made_from: Json) -> SpliceResult | None:
    """Return what is kept; None when nothing is, or it was made from something else."""
    facts: Json = read_sealed(path, _REMEDY) if path.is_file() else {}
    if {name: facts.get(name) for name in made_from} != made_from:
        return None
    try:
        return SpliceResult(**facts["figures"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path} does not hold the loss of an SAE. {_REMEDY}") from error
