"""How trained SAEs are shown."""

from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.commands.output import number, out, plain_table
from dmsae.commands.terminal import TERMINAL
from dmsae.evaluation.fidelity import fidelity
from dmsae.sae.sae import SAE
from dmsae.training.config import TrainConfig
from dmsae.training.result import TrainResult


def print_length(config: TrainConfig, store: Store | None) -> None:
    """Say how long each training is, before it begins; in epochs when it trains on a store."""
    steps = config.schedule().steps
    epochs = f", {steps * config.batch_size / max(store.n_rows(Split.TRAIN), 1):.3g} epochs" if store else ""
    TERMINAL.note(f"Each training: {steps:,} steps of {config.batch_size:,} activations{epochs}.")


def print_results(results: list[TrainResult], store: Store) -> None:
    """Print a line per trained SAE: held-out figures with its thresholds, and those of its last training batch."""
    table = plain_table("sae", "k", "state", "step", "FVE", "L0 core", "L0 other", "L0", "train FVE", "dead")
    for result in results:
        sae = SAE.load(result.directory)
        heldout = fidelity(sae, store)
        core, other = (heldout.l0_core, heldout.l0_noncore) if heldout else (None, None)
        table.add_row(
            result.name,
            str(sae.config.k_selected),
            result.state,
            f"{result.step:,}",
            number(heldout.fve if heldout else None),
            number(core, 1),
            number(other, 1),
            number(core + other if core is not None and other is not None else None, 1),
            number(result.metrics.fve if result.metrics else None),
            str(sum(result.metrics.dead_groups[1:])) if result.metrics else "–",
        )
    out.print(table)
    out.print("FVE and L0: held-out text, inference thresholds. train FVE: the last training batch.")
    out.print("k: what BatchTopK keeps per token; with a dense core, of the other latents.")
