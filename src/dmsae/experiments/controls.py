"""Does a distilled core do what no control does? The paper's core and one of detectors beside everything simpler.

Four parts for each seed, which share the SAE of cycle 0:

- `paper`: the first core as the paper selects it, frozen by direction and as detectors, beside random cores, and beside
  SAEs that keep nothing, at L0 from k to k + core.
- `capped`: a core without latents that fire often, as detectors, at a total L0 of k, beside random detectors, cores of
  equal size that other rules choose among the same candidates, and SAEs that keep nothing.
- `consensus`: in the same way, what several SAEs that start from other weights agree on.
- `cycles`: distillations of both kinds, and the same from a random start: how much of the first core persists. Then the
  distilled cores as in the other parts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from dmsae.activations.sources import StoreSource
from dmsae.activations.store import Store
from dmsae.config import Json, require, require_whole
from dmsae.cores.attribution import Attribution, attribute
from dmsae.cores.consensus import ConsensusConfig, consensus_core
from dmsae.cores.controls import RandomKind, Rule, core_by_rule
from dmsae.cores.core import Core, Provenance
from dmsae.cores.selection import next_core
from dmsae.devices import training_device
from dmsae.disk import layout
from dmsae.distillation.config import Cycle0, DistillConfig
from dmsae.distillation.distill import distill
from dmsae.distillation.prices import Held
from dmsae.distillation.transfer import Budget, TransferConfig, sae_specs, transfer
from dmsae.errors import AttributionError, ConfigError
from dmsae.evaluation.price import attribution_share
from dmsae.experiments.rows import rows_of
from dmsae.progress import SILENT, Progress
from dmsae.sae.config import CoreMode
from dmsae.sae.sae import SAE
from dmsae.seeds import derive_seed
from dmsae.training.learner import SAESpec
from dmsae.training.result import TrainResult
from dmsae.training.trainer import train_together

OTHER_RULES = (Rule.FIRING_RATE, Rule.MEAN_ACTIVATION, Rule.RANDOM_SUBSET, Rule.PRINCIPAL_COMPONENTS)


class Part(StrEnum):
    """A piece of the experiment that is run and kept by itself."""

    PAPER = "paper"
    CAPPED = "capped"
    CONSENSUS = "consensus"
    CYCLES = "cycles"


@dataclass(frozen=True, slots=True)
class ControlsConfig:
    """What the parts have in common."""

    distill: DistillConfig = field(default_factory=DistillConfig)
    """The SAEs, how they are trained and scored, the coverage, the number of cycles."""
    max_rate: float = 0.2
    """Cap on the firing rate of latents in a core of detectors."""
    rules: tuple[Rule, ...] = OTHER_RULES
    """Other rules that choose a core of equal size in the part `capped`."""
    random_cores: tuple[RandomKind, ...] = (RandomKind.NORM_MATCHED, RandomKind.COVARIANCE_MATCHED)
    """Random directions beside the dense core of the part `paper`."""
    members: int = 4
    """SAEs among which a consensus is sought."""
    consensus: ConsensusConfig = field(default_factory=ConsensusConfig)

    def __post_init__(self) -> None:
        require(0 < self.max_rate <= 1, "max_rate", self.max_rate, "be above 0 and at most 1")
        require_whole("members", self.members, 2)


class Start(NamedTuple):
    """The SAE of cycle 0 and its scores, which all parts of a seed select from."""

    directory: Path
    sae: SAE
    attribution: Attribution


def run_part(
    part: Part, config: ControlsConfig, store: Store, directory: Path, seed: int, progress: Progress = SILENT
) -> Json:
    """Run one part for one seed in a directory, or what is left of it, and return its figures."""
    config = replace(config, distill=replace(config.distill, seed=seed))
    start = _start(config, store, directory, progress)
    parts: dict[Part, Callable[[ControlsConfig, Store, Path, Start, Progress], Json]] = {
        Part.PAPER: _paper,
        Part.CAPPED: _capped,
        Part.CONSENSUS: _consensus,
        Part.CYCLES: _cycles,
    }
    return parts[part](config, store, directory, start, progress)


def _start(config: ControlsConfig, store: Store, directory: Path, progress: Progress) -> Start:
    """Return cycle 0 of a seed, trained once."""
    here = directory / "start"
    spec = SAESpec(layout.SAE, config.distill.sae(store.d_model, 0))
    train = replace(config.distill.train, seed=derive_seed(config.distill.seed, "cycle", 0))
    train_together([spec], StoreSource(store), here, train, {"cycle": 0}, progress)
    sae = SAE.load(here / layout.SAE)
    if not layout.has_artifact(here, layout.ATTRIBUTION):
        device = training_device(train.device)
        attribute(sae.to(device), store, config.distill.attribution).save(here)
    return Start(here, sae.cpu(), Attribution.load(here))


def _first_core(config: ControlsConfig, store: Store, start: Start, max_rate: float | None) -> Core:
    provenance = Provenance.of(store, config.distill.result_settings())
    return next_core(None, start.sae, start.attribution, 0, config.distill.coverage, provenance, max_rate)


def _transfer(config: ControlsConfig, seed_name: str, **settings: object) -> TransferConfig:
    """Return a transfer of the same shape and training as the distillation."""
    made = config.distill
    train = replace(made.train, seed=derive_seed(made.seed, seed_name))
    shape = {"k": (made.k,), "width": made.width, "nesting": made.nesting, "center_input": made.center_input}
    return TransferConfig(train=train, **shape, **settings)  # type: ignore[arg-type]


def _paper(config: ControlsConfig, store: Store, directory: Path, start: Start, progress: Progress) -> Json:
    core = _first_core(config, store, start, None)
    chosen = _transfer(
        config,
        Part.PAPER,
        core_modes=(CoreMode.DENSE, CoreMode.DETECTOR),
        random_cores=config.random_cores,
        baselines=("unconstrained",),
    )
    results = transfer(chosen, core, store, directory / Part.PAPER, progress=progress)
    return {"rows": _rows(config, results, store, [_held(core, start)])}


def _capped(config: ControlsConfig, store: Store, directory: Path, start: Start, progress: Progress) -> Json:
    core = _first_core(config, store, start, config.max_rate)
    provenance, seed = Provenance.of(store, config.distill.result_settings()), config.distill.seed
    pool = start.attribution.among(start.attribution.firing_rates_P <= config.max_rate)
    beside = {
        str(rule): core_by_rule(rule, start.sae, pool, len(core), store, provenance, seed) for rule in config.rules
    }
    chosen = _detectors(config, Part.CAPPED)
    fitting, left_out = _fitting(chosen, beside, store)
    results = transfer(chosen, core, store, directory / Part.CAPPED, beside=fitting, progress=progress)
    known = [_held(one, start) for one in (core, *fitting.values())]
    return {"rows": _rows(config, results, store, known), "left_out": left_out}


def _consensus(config: ControlsConfig, store: Store, directory: Path, start: Start, progress: Progress) -> Json:
    here = directory / Part.CONSENSUS
    sae, train = start.sae.config, replace(config.distill.train, seed=derive_seed(config.distill.seed, "cycle", 0))
    seeds = {layout.member(i): derive_seed(config.distill.seed, "member", i) for i in range(1, config.members)}
    specs = [SAESpec(name, sae, init_seed=seed) for name, seed in seeds.items()]
    train_together(specs, StoreSource(store), here / "members", train, {"cycle": 0}, progress)
    others = [SAE.load(here / "members" / name) for name in seeds]
    provenance = Provenance.of(store, config.distill.result_settings())
    limits = (config.consensus, config.distill.coverage, config.max_rate)
    try:
        core = consensus_core([start.sae, *others], start.attribution, store, provenance, *limits)
    except AttributionError as error:  # that they agree on nothing is a result
        return {"rows": [], "note": str(error)}
    chosen = _detectors(config, Part.CONSENSUS)
    results = transfer(chosen, core, store, here / "transfer", progress=progress)
    return {"rows": _rows(config, results, store, [_held(core, start)])}


def _detectors(config: ControlsConfig, part: Part) -> TransferConfig:
    """Return a transfer of detectors at a total L0 of k, beside random ones and SAEs that keep nothing."""
    return _transfer(
        config,
        part,
        core_modes=(CoreMode.DETECTOR,),
        budget=Budget.TOTAL,
        random_cores=(RandomKind.NORM_MATCHED,),
        baselines=("unconstrained",),
    )


def _fitting(chosen: TransferConfig, beside: dict[str, Core], store: Store) -> tuple[dict[str, Core], Json]:
    """Return the cores that fit the total budget, and why the others do not."""
    fitting, left_out = {}, {}
    for name, core in beside.items():
        try:
            sae_specs(chosen, core, store)
            fitting[name] = core
        except ConfigError as error:
            left_out[name] = str(error)
    return fitting, left_out


def _held(core: Core, start: Start) -> Held:
    return Held(core, attribution_share(core, start.attribution))


def _rows(config: ControlsConfig, results: Sequence[TrainResult], store: Store, known: Sequence[Held]) -> list[Json]:
    made = config.distill
    rows = rows_of(results, store, made.attribution, made.coverage, known, made.train.device)
    return [row._asdict() for row in rows]


def _cycles(config: ControlsConfig, store: Store, directory: Path, start: Start, progress: Progress) -> Json:
    figures: Json = {"cycles": [], "rows": []}
    cycle0 = Cycle0(source=str(start.directory / layout.SAE))
    for mode, max_rate in ((CoreMode.DENSE, None), (CoreMode.DETECTOR, config.max_rate)):
        for kind in (None, RandomKind.NORM_MATCHED):
            name = f"{mode}-{'random' if kind else 'selected'}"
            chosen = replace(config.distill, core_mode=mode, max_rate=max_rate, random_start=kind, cycle0=cycle0)
            here = directory / Part.CYCLES / name
            done = distill(chosen, store, here / "distill", progress=progress)
            first = set(done.cores[0].identities)
            for core, report in zip(done.cores, done.reports, strict=True):
                of_first = len(first.intersection(core.identities))
                counts = {"run": name, "cycle": report.cycle, "size": len(core), "of_first": of_first}
                norms = report.row_norms._asdict() if report.row_norms else None
                figures["cycles"].append(counts | {"kept": report.core.kept, "fve": report.heldout_fve, "norms": norms})
            if kind is None and len(done.distilled):
                figures["rows"] += _distilled(config, store, here, mode, done.distilled, progress)
    return figures


def _distilled(
    config: ControlsConfig, store: Store, here: Path, mode: CoreMode, core: Core, progress: Progress
) -> list[Json]:
    """Return the rows of a distilled core beside its random control and SAEs that keep nothing."""
    chosen = replace(
        _detectors(config, Part.CYCLES),
        core_modes=(mode,),
        budget=Budget.TOTAL if mode is CoreMode.DETECTOR else Budget.NONCORE,
    )
    results = transfer(chosen, core, store, here / "transfer", progress=progress)
    scores = Attribution.load(layout.cycle_directory(here / "distill", core.cycle))
    return _rows(config, results, store, [Held(core, attribution_share(core, scores))])
