"""The parts and seeds of an experiment as jobs of a sweep."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dmsae.activations.store import open_store
from dmsae.config import require
from dmsae.distillation.config import DistillConfig
from dmsae.experiments.catalog import PARTS, settings_of
from dmsae.experiments.grid import FRESH, Grid
from dmsae.experiments.lab import Lab
from dmsae.experiments.results import kept_or_run, kept_result, part_results
from dmsae.progress import SILENT, Progress
from dmsae.sweeps.job import Job


def part_jobs(
    parts: Sequence[str], seeds: Sequence[int], lab: Lab, grid: Grid, directory: Path, progress: Progress = SILENT
) -> list[Job]:
    """Return a job for each part and seed, in the order in which they should begin; what is kept is done.

    All seeds of a part come before the next part: seeds share no runs, parts of one seed do, and would wait.
    """
    remedy = f"Seeds from {FRESH} on are those of second runs and confirmations."
    require(all(0 <= seed < FRESH for seed in seeds), "seeds", list(seeds), f"lie in 0 … {FRESH - 1}", remedy)
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
    for needed in PARTS[part].needs:  # what another part found has to be of the same settings, for every seed
        for kept in part_results(lab.results, needed):
            kept_result(lab.results, needed, kept["seed"], settings_of(needed, lab, grid))
    work = partial(PARTS[part].run, lab, grid, seed)
    kept_or_run(lab.results, part, seed, settings_of(part, lab, grid), work)


def _name(part: str, seed: int) -> str:
    return f"{part}-seed-{seed}"
