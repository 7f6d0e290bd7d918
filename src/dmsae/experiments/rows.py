"""One row of an experiment's table: an SAE, what core it carries, and its held-out figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from dmsae.activations.store import Store
from dmsae.cores.attribution import Attribution, AttributionConfig, QuantileOver, attribute
from dmsae.cores.selection import select_core
from dmsae.devices import training_device
from dmsae.disk import layout
from dmsae.distillation.prices import Held, held_share, next_token_losses, prices
from dmsae.evaluation.fidelity import Half, kept_fidelity
from dmsae.progress import SILENT, Progress
from dmsae.sae.sae import SAE
from dmsae.training.result import TrainResult


class Row(NamedTuple):
    """Figures of one trained SAE; None where a figure has no meaning or no value."""

    sae: str
    """Its name in the transfer."""
    n_core: int
    state: str
    """How its training ended."""
    fve: float | None
    """Held-out variance explained, at inference thresholds, as are the L0s."""
    fve_prefix0: float | None
    """The same for the core with prefix-0."""
    l0_core: float | None
    l0: float | None
    """Latents that fire per token, the core included."""
    median_rate: float | None
    """Median share of attribution pairs on which a core latent fires."""
    kept_all: int | None
    """Core latents that attribution selects again, with its quantile over all positions."""
    kept_active: int | None
    """The same over active positions."""
    price: float | None
    """FVE lost against an unconstrained SAE at the same L0."""
    price_prefix0: float | None
    """The same for core + prefix-0."""
    loss: float | None
    """Next-token loss of the model with the reconstruction in place, in nats, where it was asked for."""
    price_loss: float | None
    """Nats lost against an unconstrained SAE at the same L0."""
    attribution_share: float | None
    """Share of the attribution that the core holds in the pool that it was selected from."""


def rows_of(
    results: Sequence[TrainResult],
    store: Store,
    config: AttributionConfig,
    coverage: float,
    known: Sequence[Held] = (),
    device: str = "auto",
    progress: Progress = SILENT,
    losses: bool | None = None,
    half: Half | None = None,
) -> list[Row]:
    """Return the rows of the SAEs of a transfer, in order.

    `losses`: whether to run the model for next-token losses, which take as long as a short training. None: where there
    is a price. `half`: measure SAEs on a half of the held-out activations.
    """
    measured = bool(prices(results, store)) if losses is None else losses
    in_nats = next_token_losses(results, store, device, progress) if measured else {}
    priced = dict(prices(results, store, known, in_nats, half))
    rows = []
    for result in results:
        figures, sae = kept_fidelity(result.directory, store, half=half), SAE.load(result.directory)
        n_core, price = sae.config.n_core, priced.get(result.name)
        again = _selected_again(result.directory, sae, store, config, coverage, device) if n_core and figures else None
        rows.append(
            Row(
                sae=result.name,
                n_core=n_core,
                state=str(result.state),
                fve=figures.fve if figures else None,
                fve_prefix0=figures.fve_prefixes[0] if figures else None,
                l0_core=figures.l0_core if figures else None,
                l0=figures.l0_core + figures.l0_noncore if figures else None,
                median_rate=again[0] if again else None,
                kept_all=again[1] if again else None,
                kept_active=again[2] if again else None,
                price=price.price if price else None,
                price_prefix0=price.price_prefix0 if price else None,
                loss=in_nats.get(result.name),
                price_loss=price.price_loss if price else None,
                attribution_share=held_share(sae, known) if n_core else None,
            )
        )
    return rows


def _selected_again(
    directory: Path, sae: SAE, store: Store, config: AttributionConfig, coverage: float, device: str
) -> tuple[float, int, int]:
    """Return the core's median firing rate, and how many of it are selected again over all and active positions."""
    if layout.has_artifact(directory, layout.ATTRIBUTION):
        scored = Attribution.load(directory)
    else:
        scored = attribute(sae.to(training_device(device)), store, config)
        scored.save(directory)
    n_core = sae.config.n_core
    counts = []
    for over in (QuantileOver.ALL, QuantileOver.ACTIVE):
        chosen = scored.latents_P[select_core(scored.over(over).scores_P, coverage)]
        counts.append(int((chosen < n_core).sum()))
    return float(torch.median(scored.firing_rates_P[:n_core])), counts[0], counts[1]
