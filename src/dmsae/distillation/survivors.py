"""What became of a core in the SAEs that were trained from it, and of the random cores beside it."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from dmsae.activations.store import Store
from dmsae.cores.core import Core
from dmsae.distillation.inspection import sae_of
from dmsae.errors import ConfigError
from dmsae.evaluation.survival import SurvivalSummary, between, survival
from dmsae.progress import SILENT, Progress
from dmsae.sae.sae import SAE


class Survivor(NamedTuple):
    """One comparison: the core in the SAE that it came from and in another, or a random core in two SAEs."""

    before: str
    after: str
    summary: SurvivalSummary


def survivors(
    place: Path, core: Core, saes: Sequence[Path], store: Store, progress: Progress = SILENT
) -> list[Survivor]:
    """Return what is left of a core in each SAE that carries it; other cores are compared from one SAE to the next.

    `place` is where the core is: its run, or a directory beside the SAE that it was selected from.
    """
    if not saes:
        raise ConfigError("No SAEs were given: name the directories of those that carry the core.")
    origin = SAE.load(sae_of(place, core))
    kept: list[Survivor] = []
    others: dict[tuple[object, ...], list[tuple[str, SAE]]] = {}
    for path in saes:
        sae = SAE.load(path)
        if not sae.config.core:
            progress.note(f"{path.name} carries no core and is left out.")
            continue
        if torch.equal(sae.W_enc_core, core.encoder_CD):
            summary = survival(core, origin, sae, store, progress=progress).summary()
            kept.append(Survivor("distillation", path.name, summary))
        else:
            same = (sae.config.core.kind, sae.W_enc_core.numpy().tobytes())
            others.setdefault(same, []).append((path.name, sae))
    for carriers in others.values():
        for (name, sae), (next_name, next_sae) in pairwise(carriers):
            core_latents = range(sae.config.n_core)
            summary = between(sae, core_latents, next_sae, core_latents, store, progress=progress).summary()
            kept.append(Survivor(name, next_name, summary))
    if not kept:
        raise ConfigError("None of these SAEs carries the core, and no two of them carry the same other one.")
    return kept
