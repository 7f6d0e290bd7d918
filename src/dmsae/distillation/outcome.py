"""How a distillation went: a report of each cycle, and what is written when the last of them has ended or failed."""

from pathlib import Path
from typing import NamedTuple

from dmsae.config import Json, require
from dmsae.cores.attribution import Attribution
from dmsae.cores.compare import CarryOver, carry_over
from dmsae.cores.core import DISTILLED_SEAL, Core
from dmsae.cores.norms import RowNorms, row_norms
from dmsae.cores.selection import SelectionReport
from dmsae.devices import machine
from dmsae.disk import layout
from dmsae.disk.artifact import bound, seal_of, write_sealed
from dmsae.distillation.status import read_summary
from dmsae.errors import TrainingError
from dmsae.evaluation.fidelity import Fidelity
from dmsae.evaluation.survival import SurvivalSummary
from dmsae.sae.sae import SAE
from dmsae.training.metrics import read_metrics


class CycleReport(NamedTuple):
    """What happened in one cycle."""

    cycle: int
    core: CarryOver
    births: dict[int, int]
    """How many latents of the selected core each cycle contributed."""
    n_frozen: int
    """Size of the core that the cycle was trained with."""
    l0_core: float
    """Latents of that core that fire on the average token of the attribution pairs."""
    heldout_fve: float | None
    """Variance explained of held-out activations, with inference thresholds; None when the store holds none."""
    heldout_fve_prefixes: list[float]
    """The same for each prefix, the smallest first; empty when the store holds none."""
    selection: SelectionReport | None
    """What selection did to the pool; None for a consensus, which selects by other means."""
    row_norms: RowNorms | None
    """Norms of the selected rows; None when none was selected."""
    train_loss: float | None
    """Objective of the last training batch; None for an SAE that was not trained here."""
    survival: SurvivalSummary | None
    """What became of that core since the cycle before; None without one, or without held-out activations."""


class CycleFailed(TrainingError):
    """A cycle from which no core can be selected: no later run of the same command would change that."""

    def __init__(self, cycle: int, cause: str, remedy: str) -> None:
        super().__init__(f"Cycle {cycle} {cause}. {remedy}")
        self.cycle, self.cause, self.remedy = cycle, cause.rstrip("."), remedy


def report(
    here: Path,
    cores: list[Core],
    sae: SAE,
    attribution: Attribution,
    selection: SelectionReport | None,
    heldout: Fidelity | None,
    survived: SurvivalSummary | None = None,
) -> CycleReport:
    """Return the report of the cycle that the last of the cores was selected after."""
    metrics = read_metrics(here / layout.SAE)
    n_frozen = sae.config.n_core
    return CycleReport(
        cycle=cores[-1].cycle,
        core=carry_over(cores[-1], cores[-2] if len(cores) > 1 else None),
        births=cores[-1].births(),
        n_frozen=n_frozen,
        l0_core=float(attribution.firing_rates_P[:n_frozen].sum()),
        heldout_fve=heldout.fve if heldout else None,
        heldout_fve_prefixes=heldout.fve_prefixes if heldout else [],
        selection=selection,
        row_norms=row_norms(cores[-1]),
        train_loss=metrics[-1].loss if metrics else None,
        survival=survived,
    )


def finish(
    directory: Path, distilled: Core | None, reports: list[CycleReport], failure: CycleFailed | None = None
) -> Core:
    """Write the distilled core and the summary, and return the core; a failure is raised when both are written."""
    _keep_earlier(directory, len(reports))
    if distilled is not None:
        distilled.save(directory / layout.DISTILLED, _last_cores(directory, distilled.cycle, len(reports)))
    summary: Json = {
        "n_distilled": None if distilled is None else len(distilled),
        "births": {} if distilled is None else distilled.births(),
        "cycles": [_as_json(one) for one in reports],
        "failure": {"cycle": failure.cycle, "cause": failure.cause} if failure else None,
        "made_with": machine(),
    }
    if distilled is not None:
        summary[DISTILLED_SEAL] = seal_of(directory / layout.DISTILLED / f"{layout.CORE}.json")
    write_sealed(directory / layout.SUMMARY, summary)
    if failure is not None or distilled is None:
        assert failure is not None, "without a failure there are as many cores as a result needs"
        raise TrainingError(_told(directory, failure, distilled)) from failure
    return distilled


def _last_cores(directory: Path, cycle: int, n_cycles: int) -> dict[str, str]:
    """Return what binds a distilled core to the cores of the one or two cycles that it is made of."""
    last = [layout.cycle_directory(directory, one) for one in (cycle - 1, cycle)][-min(n_cycles, 2) :]
    return bound(directory / layout.DISTILLED, *(here / f"{layout.CORE}.json" for here in last))


def _as_json(report: CycleReport) -> Json:
    parts = {name: part._asdict() for name, part in report._asdict().items() if hasattr(part, "_asdict")}
    return report._asdict() | parts


def require_cycles(directory: Path, cycles: int) -> None:
    """Raise when a run has gone further than it is asked to go."""
    numbers = (path.name.rpartition("-")[2] for path in directory.glob(layout.cycle_directory(Path(), "*").name))
    there = max((int(number) for number in numbers if number.isdigit()), default=0)
    must = f"be at least {there}, because {directory} has already begun cycle {there}"
    require(cycles >= there, "cycles", cycles, must, "Give a new directory for a shorter run.")


def _keep_earlier(directory: Path, n_reports: int) -> None:
    """Move what a run with fewer cycles gave to names of its own. A kill between the two moves does no harm."""
    earlier = read_summary(directory)
    if not earlier or len(earlier["cycles"]) >= n_reports:
        return
    distilled, summary = layout.earlier_results(directory, len(earlier["cycles"]) - 1)
    if (directory / layout.DISTILLED).is_dir() and not distilled.exists():
        (directory / layout.DISTILLED).rename(distilled)
    (directory / layout.SUMMARY).rename(summary)


def _told(directory: Path, failure: CycleFailed, distilled: Core | None) -> str:
    """Return what failed and what is left of the run."""
    if distilled is not None:
        kept = (
            f"The cycles before it are kept, and so is the distilled core of {len(distilled)} latents that cycles "
            f"{failure.cycle - 2} and {failure.cycle - 1} agree on: {directory / layout.DISTILLED}"
        )
    elif failure.cycle == 1:
        first = layout.cycle_directory(directory, 0)
        kept = f"The core of cycle 0 is in {first}; a distilled core would need two"
    else:
        kept = "There is no core"
    return f"Cycle {failure.cycle} {failure.cause}. {kept}. {failure.remedy}"
