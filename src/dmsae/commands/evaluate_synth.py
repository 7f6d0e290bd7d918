"""`dmsae evaluate synth`: SAEs on activations whose features are known."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import tyro

from dmsae.commands.output import number, plain_table
from dmsae.commands.output import out as printed
from dmsae.commands.terminal import TERMINAL
from dmsae.evaluation.saebench.synth import Synth, SynthConfig, run_synth


def evaluate_synth(
    config: Annotated[SynthConfig, tyro.conf.arg(name="")],
    out: Path = Path("synth"),
    env: Path | None = None,
    published: bool = False,
) -> None:
    """Train SAEs on SynthSAEBench and score them against its features, in the environment of 'make saebench-env'.

    A Matryoshka and a BatchTopK SAE, a core of detectors taken from the first, its random and its dense counterpart,
    and an untrained SAE. There is no loss here, so the core is chosen by a rule. Ctrl-C saves; the same command
    resumes.

    Args:
        out: Directory for the results.
        env: SAEBench's environment. Default: $DMSAE_SAEBENCH, else .venv-saebench in the current directory.
        published: The published size: 16,384 features, 4096 latents, 200 million samples. For GPUs. Only the seed and
            the rule are taken from the other flags.
    """
    chosen = replace(SynthConfig.published(), seed=config.seed, rule=config.rule) if published else config
    print_synth(run_synth(chosen, out, env, TERMINAL))
    printed.print(f"Everything is in {out}.")


def print_synth(synth: Synth) -> None:
    """Print a line for each SAE."""
    table = plain_table("SAE", "L0", "F1", "precision", "recall", "MCC", "unique", "FVE", "dead", "F1 core", "MCC core")
    for score in synth.scores:
        of_latents = (score.f1, score.precision, score.recall, score.mcc, score.uniqueness, score.fve)
        core = (number(score.f1_core), number(score.mcc_core))
        table.add_row(score.name, number(score.l0, 1), *map(number, of_latents), str(score.dead), *core)
    printed.print(table)
    printed.print(
        f"k = {synth.k}; {synth.true_l0:.1f} features are active per sample. The core is chosen by {synth.config.rule}."
    )
    printed.print("F1 core, MCC core: of the core's latents alone; for msae, of those latents before they were frozen.")
    if parts := synth.parts():
        printed.print("\nPart of the way from the untrained SAE, the null, to 1:", style="bold")
        table = plain_table("SAE", "F1", "precision", "recall", "MCC", "unique", "FVE")
        for name, *of_scores in parts:
            table.add_row(name, *map(number, of_scores))
        printed.print(table)
