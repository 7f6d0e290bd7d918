"""What keeping a core costs in each SAE of a transfer, against its unconstrained SAEs at the same measured L0."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from dmsae.activations.store import Store
from dmsae.cores.attribution import Attribution, QuantileOver
from dmsae.cores.core import Core
from dmsae.disk import layout
from dmsae.distillation.inspection import sae_of
from dmsae.distillation.matching import RESELECTED
from dmsae.errors import CheckpointError, ConfigError, DmsaeError
from dmsae.evaluation.fidelity import Half, kept_fidelity
from dmsae.evaluation.kept_loss import kept_losses
from dmsae.evaluation.price import Point, Price, attribution_share, price, require_matched
from dmsae.progress import SILENT, Progress
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE
from dmsae.training.result import TrainResult, TrainState


class Priced(NamedTuple):
    """The price of the core in one SAE."""

    name: str
    price: Price


class Held(NamedTuple):
    """A core and the share of the attribution that it holds, in the pool that it was selected from."""

    core: Core
    share: float


def held(place: Path, core: Core) -> Held | None:
    """Return what share of the attribution a core of a run holds; None when its scores are not there."""
    try:
        here = sae_of(place, core).parent
    except CheckpointError:
        return None
    if not layout.has_artifact(here, layout.ATTRIBUTION):
        return None
    scores = Attribution.load(here)
    if over := core.provenance.config.get(RESELECTED, {}).get("over"):
        scores = scores.over(QuantileOver(over))
    return Held(core, attribution_share(core, scores))


def prices(
    results: Sequence[TrainResult],
    store: Store,
    known: Sequence[Held] = (),
    losses: Mapping[str, float] | None = None,
    half: Half | None = None,
) -> list[Priced]:
    """Return the price of the core in every SAE that carries one; nothing when no unconstrained SAE stands beside them.

    `known` are cores whose share of the attribution is known; an SAE that carries one is told by its frozen rows.
    `losses` are the next-token losses of the SAEs, by name (see `next_token_losses`). `half`: price them on a half of
    the held-out activations.
    """
    finished = [result for result in results if result.state is TrainState.FINISHED]
    saes = {result.name: SAE.load(result.directory) for result in finished}
    points = {}
    for result in finished:
        if (figures := kept_fidelity(result.directory, store, half=half)) is not None:
            points[result.name] = Point.of(figures, (losses or {}).get(result.name))
    free = {name: points[name] for name in points if not saes[name].config.core}
    if not any(_matches(saes[name].config, one.config) for name in free for one in saes.values()):
        return []
    priced = []
    for name, kept in points.items():
        sae = saes[name]
        if not sae.config.core:
            continue
        beside = [point for other, point in free.items() if _matches(saes[other].config, sae.config)]
        priced.append(Priced(name, price(kept, beside, sae.config.n_core, held_share(sae, known))))
    return priced


def next_token_losses(
    results: Sequence[TrainResult], store: Store, device: str = "auto", progress: Progress = SILENT
) -> dict[str, float]:
    """Return the loss of the model with each SAE in place, by name; nothing, and why, when the model cannot run."""
    finished = {result.directory: result.name for result in results if result.state is TrainState.FINISHED}
    try:
        measured = kept_losses(list(finished), store, device, progress)
    except DmsaeError as error:
        progress.note(f"No next-token loss: {error}")
        return {}
    return {finished[directory]: figures.ce for directory, figures in measured.items()}


def held_share(sae: SAE, known: Sequence[Held]) -> float | None:
    """Return what the core of an SAE holds of the attribution, if it is one of those known."""
    rows = sae.W_enc_core
    return next((one.share for one in known if torch.equal(one.core.encoder_CD, rows)), None)


def _matches(free: SAEConfig, kept: SAEConfig) -> bool:
    """Return whether one SAE may set the price of the other."""
    if not kept.core:
        return False
    try:
        require_matched(kept, free)
    except ConfigError:
        return False
    return True
