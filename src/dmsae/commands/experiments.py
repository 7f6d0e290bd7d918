"""`dmsae experiment …`: questions about the method, answered by runs over several seeds."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dmsae.commands.output import out, plain_table
from dmsae.commands.terminal import TERMINAL

RuleName = Literal["firing_rate", "mean_activation", "random_subset", "principal_components"]
RandomName = Literal["unit", "norm_matched", "covariance_matched"]
PartName = Literal["paper", "capped", "consensus", "cycles"]


def experiment_controls(
    directory: Annotated[Path, tyro.conf.arg(name="out")],
    recipe: str = "demo",
    seeds: tuple[int, ...] = (0, 1, 2),
    parts: tuple[PartName, ...] = ("paper", "capped", "consensus", "cycles"),
    max_rate: float = 0.2,
    rules: tuple[RuleName, ...] = ("firing_rate", "mean_activation", "random_subset", "principal_components"),
    random_cores: tuple[RandomName, ...] = ("norm_matched", "covariance_matched"),
    members: int = 4,
    root: Path | None = None,
) -> None:
    """Distilled cores beside random ones, other selection rules, a consensus, and SAEs that keep nothing.

    Each part and seed is run by itself and kept as a small JSON file; the same command goes on where it stopped.

    Args:
        directory: Directory for the runs; the figures are in its folder `results`.
        recipe: Sizes of everything, from its tables [harvest] and [distill].
        seeds: A whole repetition for each: initial weights, order of activations, random controls.
        parts: paper: the first core as the paper selects it. capped: one without latents that fire often, as
            detectors. consensus: what several SAEs agree on. cycles: distillations, also from a random start.
        max_rate: Cap on the firing rate of latents in a core of detectors.
        rules: Other rules that choose a core of equal size in the part capped.
        random_cores: Random directions beside the dense core of the part paper.
        members: SAEs among which a consensus is sought.
        root: Directory of stores. Default: `stores` in the cache directory.
    """
    from dmsae.activations.harvest import Harvest
    from dmsae.commands.recipes import read_sections
    from dmsae.config import to_dict
    from dmsae.cores.controls import RandomKind, Rule
    from dmsae.experiments.controls import ControlsConfig, Part, run_part
    from dmsae.experiments.results import kept_or_run

    sections = read_sections(recipe)
    kinds = tuple(RandomKind(kind) for kind in random_cores)
    config = ControlsConfig(sections.distill, max_rate, tuple(Rule(rule) for rule in rules), kinds, members)
    store = Harvest(sections.harvest, root, TERMINAL).run()
    for seed in seeds:
        for part in map(Part, parts):
            TERMINAL.note(f"Part {part}, seed {seed}")
            work = partial(run_part, part, config, store, directory / f"seed-{seed}", seed, TERMINAL)
            kept_or_run(directory / "results", part, seed, to_dict(config), store, work)
    experiment_show(directory / "results")


def experiment_show(results: Annotated[Path, tyro.conf.Positional], markdown: bool = False) -> None:
    """Show the figures of an experiment: mean and standard deviation over seeds.

    Args:
        results: The folder `results` of an experiment, or a copy of it.
        markdown: Print Markdown tables.
    """
    from dmsae.experiments.results import read_results
    from dmsae.experiments.tables import tables

    for table in tables(read_results(results)):
        if markdown:
            out.print(table.markdown(), soft_wrap=True, markup=False, highlight=False)
            continue
        shown = plain_table(*table.header)
        for row in table.rows:
            shown.add_row(*row)
        out.print(f"\n{table.title}: mean ± standard deviation", style="bold")
        out.print(shown)


COMMANDS = {"controls": experiment_controls, "show": experiment_show}
