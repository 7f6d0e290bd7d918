"""`dmsae experiment …`: questions about the method, answered by runs over several seeds."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from dmsae.commands.output import out, plain_table
from dmsae.commands.sweeps import FanOut, sweep
from dmsae.commands.terminal import TERMINAL
from dmsae.disk import layout
from dmsae.errors import SweepError
from dmsae.sweeps.cluster import read_cluster

if TYPE_CHECKING:  # `--help` does not wait for torch
    from dmsae.experiments.tables import TextTable

_NAME = 36
"""Characters that what a row is about gets in a narrow terminal: names of SAEs differ in their last ones, too."""

Name = Literal[
    "cycles",
    "tau",
    "sparsity",
    "random-core",
    "selection",
    "benchmark",
    "worth",
    "price",
    "every-cycle",
    "first-core",
    "consistency",
    "regime",
    "all",
]


@dataclass(frozen=True)
class ExperimentCommand:
    """Answer a question about the method, by runs over several seeds.

    cycles: does a subset of the first core persist, more than from a random start? tau: how much attribution must a
    core hold? sparsity: at which k is most carried over? random-core: does a random core decay while a distilled one
    stays in use? selection: what does gradient × activation buy over simpler rules? benchmark: what is an SAE from a
    distilled core worth, against its measured L0, beside MSAE and BatchTopK? worth: what are SAEs with the first core
    worth by every measure, beside nulls and controls? price: how many latents can be kept, at what price, by other
    rules, in every freeze mode, before and after the cycles, beside random controls? every-cycle: the same after those
    numbers of cycles that price passes over. first-core: what does the first core cost in variance and loss, also
    against SAEs that train as long as the core and its carrier together? consistency: do independent distillations find
    the same core, what does a consensus cost, and is the rest more alike beside a shared core? regime: where does a
    distilled core beat its controls, confirmed with fresh seeds? all: every question but worth.

    Each part and seed is a job of its own, and is kept as a small JSON file as it ends. The same command resumes where
    it stopped, and experiments in one directory share their runs.
    """

    name: Annotated[Name, tyro.conf.Positional]
    """Which question."""
    out: Path
    """Directory for the runs; the figures are in its folder `results`."""
    preset: Literal["smoke", "small", "medium", "paper"] = "small"
    """smoke: to see that it runs. small: 45 minutes at most each on two cores with `--jobs 3`, at the demo's size.
    medium: the same grids at the default recipe's size. paper: the paper's model and sizes, which the authors of dmsae
    have not run."""
    seeds: tuple[int, ...] = ()
    """A whole repetition for each: initial weights, order of activations, random controls. Default: 0 1 2; for smoke,
    which measures nothing, 0 alone."""
    parts: tuple[str, ...] = ()
    """Only these parts of the experiment. Empty: all of them."""
    recipe: str = ""
    """Take the sizes from another recipe than the preset's: one that ships with dmsae, by name, or a .toml file."""
    root: Path | None = None
    """Directory of stores. Default: `stores` in the cache directory."""
    fan_out: Annotated[FanOut, tyro.conf.arg(name="")] = field(default_factory=FanOut)


def command(recipe: str) -> ExperimentCommand:
    """Return the command with its defaults."""
    ask: Any = tyro.MISSING
    return ExperimentCommand(name=ask, out=ask, recipe=recipe, fan_out=FanOut(cluster=read_cluster(recipe)))


def run(command: ExperimentCommand) -> None:
    """Run what is left of an experiment, then show the figures that there are."""
    from dmsae.activations.harvest import Harvest
    from dmsae.commands.recipes import read_sections
    from dmsae.config import require
    from dmsae.experiments.catalog import ALL, EXPERIMENTS
    from dmsae.experiments.grid import GRIDS, RECIPES, SEEDS, Preset
    from dmsae.experiments.lab import Lab
    from dmsae.experiments.sweep import part_jobs

    preset = Preset(command.preset)
    names = ALL if command.name == "all" else (command.name,)
    parts = list(dict.fromkeys(part for name in names for part in EXPERIMENTS[name].parts))
    unknown = [part for part in command.parts if part not in parts]
    require(not unknown, "parts", unknown, f"be among those of the experiment: {', '.join(parts)}")
    sections = read_sections(command.recipe or RECIPES[preset])
    store = Harvest(sections.harvest, command.root, TERMINAL).run()
    lab = Lab(store, sections.distill, command.out)
    seeds = command.seeds or SEEDS[preset]
    jobs = part_jobs(command.parts or parts, seeds, lab, GRIDS[preset], command.out, TERMINAL)
    failure = None
    try:
        sweep(jobs, command.out, command.fan_out)
    except SweepError as error:
        failure = error
    if any((command.out / layout.RESULTS).glob("*.json")):
        experiment_show(command.out / layout.RESULTS)
        experiment_verdicts(command.out / layout.RESULTS)
    if failure:
        raise failure


def experiment_show(results: Annotated[Path, tyro.conf.Positional], markdown: bool = False) -> None:
    """Show the figures of an experiment: mean and standard deviation over seeds.

    Args:
        results: The folder `results` of an experiment, or a copy of it.
        markdown: Print Markdown tables.
    """
    from dmsae.experiments.catalog import current_results, outdated_note
    from dmsae.experiments.tables import tables

    found = current_results(results)
    for table in tables(found.current):
        print_table(table, markdown)
    if note := outdated_note(found):
        TERMINAL.warn(note)


def experiment_verdicts(results: Annotated[Path, tyro.conf.Positional], markdown: bool = False) -> None:
    """Say of each claim, the paper's and ours, whether it holds, with its statistic, interval and seeds.

    Args:
        results: The folder `results` of an experiment, or a copy of it.
        markdown: Print a Markdown table.
    """
    from dmsae.experiments.catalog import current_results, outdated_note
    from dmsae.experiments.claims import CLAIMS
    from dmsae.experiments.tables import verdict_table
    from dmsae.experiments.verdicts import verdicts

    found = current_results(results)
    print_table(verdict_table(verdicts(found.current, CLAIMS)), markdown)
    if note := outdated_note(found):
        TERMINAL.warn(note)


def print_table(table: "TextTable", markdown: bool) -> None:
    """Print a table, as Markdown if asked for."""
    if markdown:
        out.print(table.markdown(), soft_wrap=True, markup=False, highlight=False)
        out.print()
        return
    shown = plain_table(*table.header)
    for row in table.rows:
        shown.add_row(*row)
    shown.columns[0].min_width = min(_NAME, max((len(row[0]) for row in table.rows), default=0))
    out.print(f"\n{table.title}", style="bold")
    out.print(shown)


COMMANDS = {"show": experiment_show, "verdicts": experiment_verdicts}
