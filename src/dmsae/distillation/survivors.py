"""What became of a core in the SAEs that were trained from it, and of the random cores beside it."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from dmsae.activations.store import Store
from dmsae.cores.core import Core
from dmsae.disk import layout
from dmsae.distillation.inspection import sae_of
from dmsae.errors import ConfigError
from dmsae.evaluation.survival import Survival, SurvivalSummary, between, survival
from dmsae.progress import SILENT, Progress
from dmsae.sae.sae import SAE

DISTILLATION = "distillation"
"""What the SAE is called that a distilled core was selected from."""


class Survivor(NamedTuple):
    """One comparison: a core in the SAE that it came from and in another, or a core in two SAEs that carry it."""

    before: str
    after: str
    summary: SurvivalSummary


class Origin(NamedTuple):
    """A core and the SAE that it was selected from."""

    name: str
    core: Core
    sae: SAE


def survivors(
    place: Path,
    core: Core,
    saes: Sequence[Path],
    store: Store,
    progress: Progress = SILENT,
    others: Sequence[Core] = (),
) -> list[Survivor]:
    """Return what is left of cores in the SAEs that carry them, and what of each is the same from one SAE to the next.

    `place` is where the core is: its run, or a directory beside the SAE that it was selected from. `others` are cores
    that were selected from SAEs of the same run. A random core comes from no SAE: it is compared between SAEs alone.
    """
    if not saes:
        raise ConfigError("No SAEs were given: name the directories of those that carry the core.")
    origins = [Origin(name, one, SAE.load(sae_of(place, one))) for name, one in _distinct(core, others)]
    kept: list[Survivor] = []
    carriers: dict[tuple[object, ...], list[tuple[str, SAE]]] = {}
    for path in saes:
        sae = SAE.load(path)
        if not sae.config.core:
            progress.note(f"{path.name} carries no core and is left out.")
            continue
        for origin in origins:
            if torch.equal(sae.W_enc_core, origin.core.encoder_CD):
                summary = survival(origin.core, origin.sae, sae, store, progress=progress).summary()
                kept.append(Survivor(origin.name, path.name, summary))
        same = (sae.config.core.kind, sae.W_enc_core.numpy().tobytes())
        carriers.setdefault(same, []).append((path.name, sae))
    for carrying in carriers.values():
        for (name, sae), (next_name, next_sae) in pairwise(carrying):
            latents = range(sae.config.n_core)
            summary = between(sae, latents, next_sae, latents, store, progress=progress).summary()
            kept.append(Survivor(name, next_name, summary))
    if not kept:
        raise ConfigError("None of these SAEs carries the core, and no two of them carry the same other one.")
    return kept


def _distinct(core: Core, others: Sequence[Core]) -> list[tuple[str, Core]]:
    """Return cores by the name of where they were selected; of several with the same rows only the first."""
    found = {core.digest(): (DISTILLATION, core)}
    for other in others:
        if other.is_selected:
            found.setdefault(other.digest(), (f"cycle {other.cycle}", other))
    return list(found.values())


def since_last_cycle(run: Path, core: Core, store: Store) -> Survival | None:
    """Return what became of a distilled core's latents from the last cycle but one to the last, one by one.

    None when the run has one cycle, as a consensus has, or is not there.
    """
    before, after = (layout.cycle_directory(run, cycle) for cycle in (core.cycle - 1, core.cycle))
    if not len(core) or not all(layout.has_artifact(here / layout.SAE, layout.SAE) for here in (before, after)):
        return None
    previous = Core.load(before)
    slots = dict(zip(previous.identities, previous.slots_C.tolist(), strict=True))
    if not previous.is_selected or any(identity not in slots for identity in core.identities):
        return None
    then = [slots[identity] for identity in core.identities]
    return between(SAE.load(before / layout.SAE), then, SAE.load(after / layout.SAE), core.slots_C, store)
