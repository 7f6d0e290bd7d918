"""`dmsae distill`: the whole of Algorithm 1, harvest included."""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from dmsae.activations.catalog import is_complete
from dmsae.activations.caveats import repeat_warnings
from dmsae.activations.harvest import Harvest
from dmsae.activations.request import HarvestConfig
from dmsae.activations.sources import ActivationSource, LiveSource
from dmsae.activations.store import Store, open_store
from dmsae.commands.output import number, out
from dmsae.commands.recipes import read_sections, warn_of_train_table
from dmsae.commands.results import print_length
from dmsae.commands.selection import show_selection
from dmsae.commands.survival import print_survivors
from dmsae.commands.sweeps import FanOut, require_sweepable, seed_jobs, sweep
from dmsae.commands.terminal import TERMINAL
from dmsae.config import to_dict
from dmsae.disk import layout
from dmsae.disk.run import require_claimable
from dmsae.distillation.distill import MAY_CHANGE, Distillation, DistillConfig, distill, run_settings
from dmsae.distillation.outcome import CycleReport, require_cycles
from dmsae.distillation.survivors import Survivor
from dmsae.errors import ConfigError
from dmsae.formats import require_checkpoint
from dmsae.sae.comms import ALONE, Comms
from dmsae.training.crew import harvest_on, run_on_mesh
from dmsae.training.mesh import MeshConfig, require_fits


@dataclass(frozen=True)
class DistillCommand:
    """Distill a core: train, score, select, restart with only the selected encoder rows, and intersect the last two.

    Harvests the activations first if they are not there. Run the same command again to resume.
    """

    out: Path
    """Directory for the run."""
    config: Annotated[DistillConfig, tyro.conf.arg(name="")] = field(default_factory=DistillConfig)
    harvest: HarvestConfig = field(default_factory=HarvestConfig)
    store: str = ""
    """Key of an existing store. Empty: the one that the harvest settings describe."""
    live: bool = False
    """Keep no training activations on disk: run the model again for every cycle. For corpora that do not fit."""
    recipe: str = ""
    """Take the settings from a recipe: one that ships with dmsae, by name, or a .toml file. Flags win."""
    root: Path | None = None
    """Directory of stores. It is remembered by what is made from this run."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """How training is spread over the processes that torchrun starts."""
    seeds: tuple[int, ...] = ()
    """Several distillations, one for each of these seeds, in folders `seed-0`, … of `out`. Each is a job."""
    fan_out: Annotated[FanOut, tyro.conf.arg(name="")] = field(default_factory=FanOut)

    def __post_init__(self) -> None:
        if self.live and self.store:
            raise ConfigError("--live trains on what the harvest settings describe: leave out --store.")


def command(recipe: str) -> DistillCommand:
    """Return the command with the defaults of a recipe."""
    ask: Any = tyro.MISSING
    sections = read_sections(recipe)
    fan_out = FanOut(cluster=sections.cluster)
    return DistillCommand(out=ask, config=sections.distill, harvest=sections.harvest, recipe=recipe, fan_out=fan_out)


def run(command: DistillCommand) -> None:
    """Distill, printing a line per cycle, and then the result."""
    if command.seeds:
        _run_seeds(command)
        return
    run_on_mesh(command.mesh, command.config.train.device, to_dict(command), partial(_run, command))


def _run(command: DistillCommand, comms: Comms) -> None:
    # Impossible shapes are refused before anything is harvested.
    command.config.sae(d_model=1, n_core=0)
    require_fits(command.mesh, command.config.train.batch_size, {"distill": command.config.width})
    if command.config.cycle0.source:
        require_checkpoint(command.config.cycle0.source)
    require_cycles(command.out, command.config.n_cycles)
    warn_of_train_table(command.recipe, "distill", TERMINAL)
    source = LiveSource(Harvest(command.harvest, command.root, TERMINAL), progress=TERMINAL) if command.live else None
    store = _store(command, source, comms)
    TERMINAL.note(f"Store {store.key}: {store.model.name} at {store.model.hook}")
    print_length(command.config.train, None if source else store)
    done = distill(command.config, store, command.out, _CyclePrinter(), source=source, progress=TERMINAL, comms=comms)
    out.print()
    show_distillation(done)
    distilled = command.out / layout.DISTILLED
    out.print(f"\nThe core is in {distilled}. Look at it: dmsae core show {command.out}")


def _run_seeds(command: DistillCommand) -> None:
    """Distill once for each seed, on activations that are harvested before."""

    def of_seed(seed: int, out: Path) -> DistillCommand:
        return replace(command, out=out, config=replace(command.config, seed=seed), seeds=(), fan_out=FanOut())

    require_sweepable(command.out)
    jobs = seed_jobs(command.seeds, of_seed, run, command.out)
    source = LiveSource(Harvest(command.harvest, command.root, TERMINAL), progress=TERMINAL) if command.live else None
    _store(of_seed(command.seeds[0], layout.seed_directory(command.out, command.seeds[0])), source, ALONE)
    sweep(jobs, command.out, command.fan_out)


def _store(command: DistillCommand, source: ActivationSource | None, comms: Comms) -> Store:
    """Return the store to score and train on, harvested if need be; of one that exists, what its harvest warned of."""
    if command.store:
        TERMINAL.note("--store names a store: the harvest settings are not used.")
        store = open_store(command.store, command.root)
        repeat_warnings(store, TERMINAL)
        return store
    wanted = replace(command.harvest, train_tokens=0) if source else command.harvest
    harvest = Harvest(wanted, command.root, TERMINAL)
    if is_complete(harvest.path):
        store = harvest.run()
        repeat_warnings(store, TERMINAL)
        return store
    # A directory of another run is refused before the long work, not after it.
    settings = run_settings(command.config, harvest.path.name, harvest.identity, source, harvest.path.parent)
    require_claimable(command.out, settings, MAY_CHANGE)
    return harvest_on(comms, harvest)


def show_distillation(done: Distillation) -> None:
    """Print what persisted."""
    found = f"in both of the last cores ({' and '.join(str(len(core)) for core in done.cores[-2:])})"
    if len(done.cores) == 1:
        found = f"which {done.distilled.provenance.config['consensus']['members']} SAEs agree on"
    out.print(f"Distilled core: {len(done.distilled)} latents, {found}.", style="bold")
    if not len(done.distilled):
        out.print("No latent was selected twice. Try a larger k, more tokens per cycle, or a higher coverage.")
        return
    births = ", ".join(f"{count} from cycle {cycle}" for cycle, count in done.distilled.births().items())
    out.print(f"Born: {births}.")
    report = done.reports[-1]
    if report.row_norms is not None:
        low, middle, high = report.row_norms
        out.print(f"Norms of the last core's encoder rows: {low:.2f} to {high:.2f}, median {middle:.2f}.")
    if report.selection is not None:
        out.print("The last selection:")
        show_selection(report.selection)
    followed = [
        Survivor(f"cycle {one.cycle - 1}", f"cycle {one.cycle}", one.survival) for one in done.reports if one.survival
    ]
    if followed:
        out.print("What became of each core in the next cycle:")
        print_survivors(followed)
    if report.n_frozen and report.l0_core > 0.5 * report.n_frozen:
        TERMINAL.warn(
            f"In the last cycle {report.l0_core:.0f} of its {report.n_frozen} core latents fired on the average token. "
            "Compare such SAEs at their measured total L0, and beside a random core."
        )


class _CyclePrinter:
    """Prints a header once, then a line for each cycle as it ends."""

    _widths = (5, 5, 5, 5, 7, 16, 7, 10)

    def __call__(self, report: CycleReport) -> None:
        if report.cycle == 0:
            self._line("cycle", "core", "kept", "new", "dropped", "L0 of the core", "FVE", "train loss")
        share = f"{report.l0_core:.1f} of {report.n_frozen}" if report.n_frozen else "–"
        if report.n_frozen:
            share += f" ({100 * report.l0_core / report.n_frozen:.0f} %)"
        core = report.core
        counts = (str(value) for value in (report.cycle, core.size, core.kept, core.new, core.dropped))
        self._line(*counts, share, number(report.heldout_fve), number(report.train_loss))

    def _line(self, *cells: str) -> None:
        out.print("  ".join(f"{cell:>{width}}" for cell, width in zip(cells, self._widths, strict=True)))
