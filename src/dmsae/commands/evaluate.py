"""`dmsae evaluate`: what SAEs are worth, beside what worthless ones get."""

from dataclasses import dataclass, field, make_dataclass
from functools import partial
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any

import tyro

from dmsae.commands.evaluate_compare import evaluate_compare
from dmsae.commands.evaluate_planted import evaluate_planted
from dmsae.commands.evaluate_saebench import evaluate_saebench
from dmsae.commands.evaluate_stability import evaluate_stability
from dmsae.commands.evaluate_synth import evaluate_synth
from dmsae.commands.found import find_saes, store_of
from dmsae.commands.output import BESIDE_NULLS, number, out, plain_table
from dmsae.commands.terminal import TERMINAL
from dmsae.config import to_dict
from dmsae.disk import layout
from dmsae.evaluation.evaluate import EvaluateConfig, evaluate, load_model
from dmsae.evaluation.measures import MEASURES
from dmsae.evaluation.nulls import NullConfig, NullKind
from dmsae.evaluation.scores import Evaluation
from dmsae.progress import SILENT
from dmsae.ranks import settled
from dmsae.sae.comms import Comms
from dmsae.training.crew import run_on_all
from dmsae.training.mesh import MeshConfig, started


@dataclass(frozen=True)
class EvaluateCommand:
    """Measure SAEs on held-out text, each beside nulls that show what a worthless dictionary gets.

    Every SAE is measured together with dictionaries of its own shape that fire as often and know nothing; SAEs that are
    alike in both share them. The table
    shows the score, the strongest null, and the part of the way from null to ceiling. evaluation.json holds all that
    the command asked for. Finished results are kept: Ctrl-C loses little, the same command resumes, and to ask for more
    SAEs or measures costs only these. Processes that torchrun starts share SAEs and nulls among them.
    """

    saes: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Directories of SAEs: of a training, a transfer, a distillation (its last SAE), or of another known format."""
    store: str = ""
    """Key of the store whose held-out text is used, or its first letters. Default: the one that the first SAE names."""
    measures: tuple[str, ...] = EvaluateConfig.measures
    """What to measure, by name."""
    nulls: tuple[NullKind, ...] = tuple(NullKind)
    """The nulls beside each SAE. Fewer are faster; none: `--nulls` alone."""
    share_nulls: float = EvaluateConfig.share_nulls
    """SAEs of one width whose L0s, and latents in the core and each prefix group, differ by no more than this share are
    compared with the nulls of the first of them. 0: each has nulls of its own."""
    out: Path = Path("evaluation")
    """Directory for the results."""
    model: str = ""
    """Where the base model is now, if it is no longer where the store's activations were harvested from."""
    device: str = "auto"
    """Where the base model runs: `cpu`, `cuda`, or `auto`."""
    root: Path | None = None
    """Directory of stores. Default: the one that the first SAE's run used."""
    null: NullConfig = field(default_factory=NullConfig)
    timeout_seconds: float = 86_400.0
    """Of several processes that torchrun has started, one whose share of a measure takes longer is given up."""


def command(_recipe: str) -> EvaluateCommand:
    """Return the command, with a group of flags for each measure."""
    settings: list[tuple[str, Any, Any]] = [
        (name, measure.config, field(default_factory=measure.config)) for name, measure in MEASURES.items()
    ]
    made: Any = make_dataclass("EvaluateCommand", settings, bases=(EvaluateCommand,), frozen=True)
    measures = "\n".join(f"- {name}: {measure.about}" for name, measure in MEASURES.items())
    verbs = "\n".join(f"- dmsae evaluate {verb}: {_first_line(function)}" for verb, function in COMMANDS.items())
    made.__doc__ = f"{cleandoc(EvaluateCommand.__doc__ or '')}\n\nMeasures:\n{measures}\n\nAlso:\n{verbs}"
    filled: EvaluateCommand = made(saes=tyro.MISSING)
    return filled


def run(command: EvaluateCommand) -> None:
    """Evaluate SAEs and print their scores."""
    mesh = MeshConfig(data=started(), timeout_seconds=command.timeout_seconds)
    run_on_all(mesh, command.device, to_dict(command), partial(_run, command))


def _run(command: EvaluateCommand, comms: Comms) -> None:
    """Evaluate with all ranks; the first one prints."""
    everyone, progress = comms.both, TERMINAL if comms.is_first else SILENT
    with settled(everyone):
        settings = {name: getattr(command, name) for name in MEASURES}
        config = EvaluateConfig(command.measures, command.nulls, command.null, command.share_nulls, settings)
        found = find_saes(command.saes)
        store = store_of(found, command.store, command.root)
    model = partial(load_model, store, command.model, command.device, progress)
    saes = {name: one.sae for name, one in found.items()}
    evaluation = evaluate(saes, store, command.out, config, model, progress, everyone)
    if comms.is_first:
        print_scores(evaluation)
        out.print(f"Everything is in {command.out / layout.EVALUATION}.")


def _first_line(function: Any) -> str:
    return cleandoc(function.__doc__).splitlines()[0]


def print_scores(evaluation: Evaluation) -> None:
    """Print a line for each score of each SAE."""
    kinds = list(dict.fromkeys(kind for row in evaluation.rows() for kind in row.nulls))
    table = plain_table(
        "measure", "figure", "SAE", "score", "null", "ceiling", "part", *(k.replace("_", " ") for k in kinds)
    )
    for row in evaluation.rows():
        figures = (row.score, row.null, row.ceiling, row.part, *(row.nulls.get(kind) for kind in kinds))
        table.add_row(row.measure, row.figure, row.sae, *map(number, figures))
    out.print(table)
    if kinds:
        out.print(BESIDE_NULLS)
    for note in evaluation.notes():
        out.print(note)
    for name, reason in evaluation.not_run.items():
        out.print(f"{name} has not run. {reason}")


COMMANDS: dict[str, Any] = {
    "compare": evaluate_compare,
    "stability": evaluate_stability,
    "saebench": evaluate_saebench,
    "synth": evaluate_synth,
    "planted": evaluate_planted,
}
"""`dmsae evaluate <verb>`: what is no measure of single SAEs."""
