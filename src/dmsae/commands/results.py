"""How trained SAEs are shown."""

from collections.abc import Sequence

from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.commands.output import number, out, plain_table
from dmsae.commands.terminal import TERMINAL
from dmsae.distillation.prices import Priced
from dmsae.errors import TrainingError
from dmsae.evaluation.fidelity import kept_fidelity
from dmsae.sae.sae import SAE
from dmsae.training.config import TrainConfig
from dmsae.training.result import TrainResult, TrainState


def print_length(config: TrainConfig, store: Store | None) -> None:
    """Say how long each training is, before it begins; in epochs when it trains on a store."""
    steps = config.schedule().steps
    epochs = f", {steps * config.batch_size / max(store.n_rows(Split.TRAIN), 1):.3g} epochs" if store else ""
    TERMINAL.note(f"Each training: {steps:,} steps of {config.batch_size:,} activations{epochs}.")


def print_results(results: list[TrainResult], store: Store) -> None:
    """Print a line per trained SAE: its held-out figures, those of its last training batch, and why one failed."""
    table = plain_table(
        "sae", "k", "state", "step", "FVE", "prefix 0", "L0 core", "L0 other", "L0", "train FVE", "dead"
    )
    for result in results:
        heldout = kept_fidelity(result.directory, store)
        core, other = (heldout.l0_core, heldout.l0_noncore) if heldout else (None, None)
        table.add_row(
            result.name,
            str(SAE.load(result.directory).config.k_selected),
            result.state,
            f"{result.step:,}",
            number(heldout.fve if heldout else None),
            number(heldout.fve_prefixes[0] if heldout else None),
            number(core, 1),
            number(other, 1),
            number(core + other if core is not None and other is not None else None, 1),
            number(result.metrics.fve if result.metrics else None),
            str(sum(result.metrics.dead_groups[1:])) if result.metrics else "–",
        )
    out.print(table)
    tokens = f"{store.n_rows(Split.HELDOUT):,} held-out activations"
    out.print(f"FVE (all latents, and the core with prefix 0) and L0: {tokens}, inference thresholds.")
    out.print("train FVE: the last training batch. k: what BatchTopK keeps; with a dense core, of the other latents.")
    for result in _failed(results):
        out.print(f"{result.name} {result.state} at step {result.step:,}: {result.cause}.")


def print_prices(rows: Sequence[Priced]) -> None:
    """Print what keeping each core costs at its measured L0."""
    table = plain_table(
        "sae", "kept", "attribution", "L0", "FVE", "free", "price", "prefix 0", "free", "price", "loss", "free", "price"
    )
    for name, price in rows:
        share = "–" if price.attribution_share is None else f"{100 * price.attribution_share:.0f} %"
        full = (number(price.fve), number(price.fve_unconstrained), number(price.price))
        first = (number(price.fve_prefix0), number(price.fve_prefix0_unconstrained), number(price.price_prefix0))
        loss = (number(price.loss), number(price.loss_unconstrained), number(price.price_loss))
        table.add_row(name, str(price.n_kept), share, number(price.l0, 1), *full, *first, *loss)
    out.print(table)
    out.print("Price: how much more an SAE explains that keeps nothing, at the same measured L0 and size of prefix 0;")
    out.print("of the loss, how many nats better the model predicts with that SAE in place.")
    for name, price in rows:
        if price.note:
            out.print(f"{name}: {price.note}")


def require_finished(results: list[TrainResult]) -> None:
    """Raise when no SAE finished its training: what collapsed or diverged is not a result."""
    failed = _failed(results)
    if len(failed) == len(results):
        which = f"{failed[0].name} {failed[0].state}" if len(failed) == 1 else f"All {len(failed)} SAEs failed"
        raise TrainingError(
            f"{which}: {failed[0].cause}. What there is of it is in {failed[0].directory}. Try a smaller k, a lower lr "
            "or a longer warm-up, in a new directory."
        )


def _failed(results: list[TrainResult]) -> list[TrainResult]:
    return [result for result in results if result.state is not TrainState.FINISHED]
