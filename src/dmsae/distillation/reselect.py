"""Another core from the scores that a distillation has stored, without training anything."""

from pathlib import Path
from typing import NamedTuple

from dmsae.activations.identity import ModelIdentity
from dmsae.config import Json, from_dict, require
from dmsae.cores.attribution import Attribution, QuantileOver
from dmsae.cores.core import Core, Provenance
from dmsae.cores.norms import with_norm
from dmsae.cores.selection import SelectionReport, next_core, report_selection
from dmsae.disk import layout
from dmsae.disk.run import require_distillation
from dmsae.distillation.inspection import last_scored
from dmsae.distillation.matching import RESELECTED
from dmsae.distillation.status import n_cycles
from dmsae.sae.sae import SAE


class Selection(NamedTuple):
    """A core and what its selection did to the pool."""

    core: Core
    report: SelectionReport
    root: Path
    """Where the run's store is."""


def reselect(
    run: Path,
    cycle: int | None = None,
    coverage: float | None = None,
    over: QuantileOver | None = None,
    max_rate: float | None = None,
) -> Selection:
    """Return the core of a cycle (by default the last) at another coverage, over other positions, or with a rate cap.

    What is left out is as it was in the run. The core carries its lineage, like the run's own, and records where the
    run is: the SAE that it was selected from stays there.
    """
    settings = require_distillation(run)
    last = last_scored(run, n_cycles(run, settings))
    cycle = last if cycle is None else cycle
    require(0 <= cycle <= last, "cycle", cycle, f"be one that has been scored, from 0 to {last}")
    here = layout.cycle_directory(run, cycle)
    attribution, sae = Attribution.load(here), SAE.load(here / layout.SAE)
    attribution = attribution.over(over) if over else attribution
    coverage = settings["distill"]["coverage"] if coverage is None else coverage
    max_rate = settings["distill"].get("max_rate") if max_rate is None else max_rate
    previous = Core.load(layout.cycle_directory(run, cycle - 1)) if cycle else None
    chosen: Json = {
        "run": str(run.resolve()),
        "cycle": cycle,
        "coverage": coverage,
        "over": over,
        "max_rate": max_rate,
    }
    model = from_dict(ModelIdentity, settings["model"])
    provenance = Provenance(model, settings["store"], {**settings["distill"], RESELECTED: chosen})
    core = next_core(previous, sae, attribution, cycle, coverage, provenance, max_rate)
    core = with_norm(core, settings["distill"].get("core_norm", "found"), len(previous) if previous else 0)
    return Selection(core, report_selection(attribution, coverage, max_rate), Path(settings["root"]))
