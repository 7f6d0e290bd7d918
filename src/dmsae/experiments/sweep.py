"""The parts and seeds of an experiment as jobs of a sweep."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dmsae.activations.store import open_store
from dmsae.distillation.config import DistillConfig
from dmsae.experiments.catalog import PARTS, settings_of
from dmsae.experiments.grid import Grid
from dmsae.experiments.lab import Lab
from dmsae.experiments.results import kept_or_run, kept_result
from dmsae.progress import SILENT, Progress
from dmsae.sweeps.job import Job


def part_jobs(
    parts: Sequence[str], seeds: Sequence[int], lab: Lab, grid: Grid, directory: Path, progress: Progress = SILENT
) -> list[Job]:
    """Return a job for each part and seed, in the order in which they should begin; what is kept is done.

    All seeds of a part come before the next part: seeds share no runs, parts of one seed do, and would wait.
    """
    return [
        Job(
            name=_name(part, seed),
            call=partial(run_part, part, seed, lab.store.path.resolve(), lab.base, grid, directory, progress),
            settings=settings_of(part, lab, grid) | {"seed": seed},
            needs=tuple(_name(needed, other) for needed in PARTS[part].needs for other in seeds),
            is_done=kept_result(lab.results, part, seed, settings_of(part, lab, grid)) is not None,
        )
        for part in parts
        for seed in seeds
    ]


def run_part(
    part: str, seed: int, store: Path, base: DistillConfig, grid: Grid, directory: Path, progress: Progress = SILENT
) -> None:
    """Run a part for one seed, in any process that can open the store, and keep what it finds."""
    lab = Lab(open_store(store), base, directory, progress)
    work = partial(PARTS[part].run, lab, grid, seed)
    kept_or_run(lab.results, part, seed, settings_of(part, lab, grid), work)


def _name(part: str, seed: int) -> str:
    return f"{part}-seed-{seed}"
