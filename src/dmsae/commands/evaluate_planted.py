"""`dmsae evaluate planted`: the method on a problem with a known answer."""

from pathlib import Path

from dmsae.commands.output import out as printed
from dmsae.commands.terminal import TERMINAL
from dmsae.disk import layout


def evaluate_planted(out: Path = Path("planted"), seeds: tuple[int, ...] = (0, 1, 2), markdown: bool = False) -> None:
    """Plant features and a loss that reads some of them, and see which SAEs and cores find them.

    Takes a few minutes and needs neither text nor a model. Every figure stands beside that of an untrained SAE or of
    random scores.

    Args:
        out: Directory for stores, runs and planted.json. The same command resumes what is there.
        seeds: For each, one problem is planted and everything is trained on it.
        markdown: Print Markdown tables.
    """
    from dmsae.commands.experiments import print_table
    from dmsae.experiments.planted_benchmark import planted_benchmark
    from dmsae.experiments.planted_tables import planted_tables

    for table in planted_tables(planted_benchmark(None, out, seeds, TERMINAL)):
        print_table(table, markdown)
    printed.print(f"Everything is in {out / layout.PLANTED}.")
