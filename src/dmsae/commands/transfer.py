"""`dmsae transfer`: new SAEs from a core."""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from dmsae.activations.harvest import Harvest
from dmsae.activations.request import HarvestConfig
from dmsae.activations.sources import LiveSource
from dmsae.activations.store import Store
from dmsae.commands.output import out
from dmsae.commands.recipes import read_sections, warn_of_train_table
from dmsae.commands.results import print_length, print_prices, print_results, require_finished
from dmsae.commands.survival import print_survivors
from dmsae.commands.sweeps import FanOut, require_sweepable, seed_jobs, sweep
from dmsae.commands.terminal import TERMINAL
from dmsae.config import to_dict
from dmsae.cores.controls import Rule
from dmsae.cores.core import Core
from dmsae.cores.norms import with_norm
from dmsae.disk import layout
from dmsae.disk.files import write_json
from dmsae.distillation.matching import open_store_of, warn_of_other_starts
from dmsae.distillation.prices import held, next_token_losses, prices
from dmsae.distillation.rules import cores_by_rule
from dmsae.distillation.survivors import survivors
from dmsae.distillation.transfer import TransferConfig, transfer
from dmsae.errors import ConfigError, DmsaeError
from dmsae.sae.comms import Comms
from dmsae.training.crew import run_on_mesh
from dmsae.training.mesh import MeshConfig
from dmsae.training.result import TrainResult


@dataclass(frozen=True)
class TransferCommand:
    """Train new SAEs from a core, at many sparsities at once, beside random cores and baselines if asked.

    All of them share one stream of activations and one seed. Run the same command again to resume.
    """

    core: Path
    """A distillation run, or a directory with a core in it."""
    out: Path
    """Directory for the SAEs."""
    config: Annotated[TransferConfig, tyro.conf.arg(name="")] = field(default_factory=TransferConfig)
    rules: tuple[Rule, ...] = ()
    """Controls: also train cores of equal size that other rules take from the SAE of cycle 0 of the distillation."""
    store: str = ""
    """Key of the store to train on. Empty: the one that the core was distilled from."""
    live: bool = False
    """Train on activations straight from the model, as the harvest settings describe them; none are kept."""
    harvest: HarvestConfig = field(default_factory=HarvestConfig)
    recipe: str = ""
    """Take the settings from a recipe: one that ships with dmsae, by name, or a .toml file. Flags win."""
    root: Path | None = None
    """Directory of stores. Default: the one that the distillation used."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """How training is spread over the processes that torchrun starts."""
    seeds: tuple[int, ...] = ()
    """Several transfers, one for each of these seeds, in folders `seed-0`, … of `out`. Each is a job. A `core` with
    folders of the same names, from a distillation over seeds, gives each its own."""
    fan_out: Annotated[FanOut, tyro.conf.arg(name="")] = field(default_factory=FanOut)

    def __post_init__(self) -> None:
        if self.live and self.store:
            raise ConfigError("--live trains on what the harvest settings describe: leave out --store.")


def command(recipe: str) -> TransferCommand:
    """Return the command with the defaults of a recipe."""
    ask: Any = tyro.MISSING
    sections = read_sections(recipe)
    settings: dict[str, Any] = {"config": sections.transfer, "harvest": sections.harvest, "recipe": recipe}
    return TransferCommand(core=ask, out=ask, **settings, fan_out=FanOut(cluster=sections.cluster))


def run(command: TransferCommand) -> None:
    """Train SAEs from a core and print how each ended."""
    if command.seeds:
        require_sweepable(command.out)
        sweep(seed_jobs(command.seeds, partial(_of_seed, command), run, command.out), command.out, command.fan_out)
        return
    run_on_mesh(command.mesh, command.config.train.device, to_dict(command), partial(_run, command))


def _of_seed(command: TransferCommand, seed: int, out: Path) -> TransferCommand:
    """Return the transfer of one seed, from the core of that seed if there is one."""
    own = layout.seed_directory(command.core, seed)
    config = replace(command.config, train=replace(command.config.train, seed=seed))
    core = own if own.is_dir() else command.core
    return replace(command, core=core, out=out, config=config, seeds=(), fan_out=FanOut())


def _run(command: TransferCommand, comms: Comms) -> None:
    warn_of_train_table(command.recipe, "transfer", TERMINAL)
    core = Core.load(command.core)
    store = open_store_of(command.core, command.store or core.provenance.store, command.root)
    warn_of_other_starts(command.core, core.provenance.store, store, command.root, TERMINAL)
    source = LiveSource(Harvest(command.harvest, command.root, TERMINAL), progress=TERMINAL) if command.live else None
    print_length(command.config.train, None if source else store)
    beside = _beside(command, core, store)
    results = transfer(
        command.config, core, store, command.out, beside=beside, source=source, progress=TERMINAL, comms=comms
    )
    out.print(f"SAEs of width {command.config.width:,} from a core of {len(core)} latents, in {command.out}:")
    print_results(results, store)
    require_finished(results)
    _print_prices(command, {"": core, **beside}, results, store)
    _print_survival(command, {"": core, **beside}, [result.directory for result in results], store)


def _beside(command: TransferCommand, core: Core, store: Store) -> dict[str, Core]:
    """Return the cores of other rules, which need the run that the core came from."""
    if not command.rules:
        return {}
    if not (command.core / layout.SETTINGS).is_file():
        raise ConfigError(f"--rules chooses from cycle 0 of a distillation, and {command.core} is none: give its run.")
    return cores_by_rule(command.core, command.rules, len(core), store, command.config.train.seed)


def _print_prices(command: TransferCommand, cores: dict[str, Core], results: list[TrainResult], store: Store) -> None:
    """Print what each core costs, if SAEs were trained that tell."""
    if "unconstrained" not in command.config.baselines:
        return
    known = [held(command.core, core) for core in cores.values()]
    norm = command.config.core_norm
    shares = [one._replace(core=with_norm(one.core, norm)) for one in known if one is not None]
    losses = next_token_losses(results, store, command.config.train.device, TERMINAL)
    rows = prices(results, store, shares, losses)
    write_json(command.out / layout.PRICES, {name: price._asdict() for name, price in rows})
    out.print()
    print_prices(rows)


def _print_survival(command: TransferCommand, cores: dict[str, Core], saes: list[Path], store: Store) -> None:
    """Print what is left of each core in the SAEs that carry it, or why that cannot be said."""
    core, *others = (with_norm(one, command.config.core_norm) for one in cores.values())
    try:
        rows = survivors(command.core, core, saes, store, TERMINAL, others)
    except DmsaeError as error:
        TERMINAL.note(f"No survival table: {error}")
        return
    out.print()
    print_survivors(rows)
