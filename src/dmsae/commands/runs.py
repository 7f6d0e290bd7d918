"""Commands that train: one SAE, a distillation, a transfer; and the status of any of them."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dmsae.activations.base_model import training_device
from dmsae.activations.harvest import Harvest, HarvestConfig
from dmsae.activations.store import Split, Store, default_root, find_store, is_complete
from dmsae.activations.stream import ActivationStream, LiveGroups, StoreGroups
from dmsae.commands.cores import load_core, show_distillation
from dmsae.commands.output import number, out, plain_table
from dmsae.config import read_recipe
from dmsae.cores.core import Core
from dmsae.disk.run import require_claimable
from dmsae.distillation.distill import CycleReport, DistillConfig, distil, distilled_directory, run_settings
from dmsae.distillation.status import stages
from dmsae.distillation.transfer import TransferConfig, require_latents, require_same_model, transfer
from dmsae.errors import ConfigError
from dmsae.evaluation.fidelity import fidelity
from dmsae.progress import console
from dmsae.sae.sae import CoreMode, SAEConfig, core_first, load_sae, matryoshka_prefixes
from dmsae.training.learner import Member, State
from dmsae.training.schedule import TrainConfig
from dmsae.training.trainer import Outcome, Trainer


@dataclass(frozen=True)
class TrainCommand:
    """Train one SAE of any kind from a store.

    Matryoshka (groups of 1/32, 1/16, 1/8, 1/4 and the rest) or BatchTopK (one group), with or without a frozen core.
    Ctrl-C saves; the same command goes on from there.
    """

    store: str
    """Key of the store to train on, or its first letters."""
    out: Path
    """Directory for the results."""
    kind: Literal["matryoshka", "batchtopk"] = "matryoshka"
    """Nested prefixes, or one."""
    width: int = 4096
    """Number K of latents."""
    k: int = 40
    """Latents active per token (non-core ones when the core is dense)."""
    prefixes: tuple[int, ...] = ()
    """Cumulative prefix sizes without a core, ending in the width. Empty: what `kind` says."""
    core: Path | None = None
    """Freeze the encoder rows of this core (a distillation run, or a directory with a core in it)."""
    core_mode: CoreMode = CoreMode.DENSE
    """Whether the core fires freely or competes."""
    center_input: bool = True
    """Whether the encoder sees x − b_dec."""
    config: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)
    recipe: str = ""
    """Take the settings from a recipe: one that ships with dmsae, by name, or a .toml file. Flags win."""
    root: Path | None = None
    """Directory of stores."""


@dataclass(frozen=True)
class DistillCommand:
    """Distil a core: train, score, select, restart with only the selected encoder rows, and intersect the last two.

    Harvests the activations first if they are not there. The same command run again goes on where it stopped.
    """

    out: Path
    """Directory for the run."""
    config: Annotated[DistillConfig, tyro.conf.arg(name="")] = field(default_factory=DistillConfig)
    harvest: HarvestConfig = field(default_factory=HarvestConfig)
    store: str = ""
    """Key of an existing store. Empty: the one that the harvest settings describe."""
    live: bool = False
    """Keep no training activations on the disk: run the model anew for every cycle. For corpora that do not fit."""
    recipe: str = ""
    """Take the settings from a recipe: one that ships with dmsae, by name, or a .toml file. Flags win."""
    root: Path | None = None
    """Directory of stores."""


@dataclass(frozen=True)
class TransferCommand:
    """Train new SAEs from a core, at many sparsities at once, beside random cores and baselines if asked.

    All of them share one stream of activations and one seed. The same command run again goes on where it stopped.
    """

    core: Path
    """A distillation run, or a directory with a core in it."""
    out: Path
    """Directory for the SAEs."""
    config: Annotated[TransferConfig, tyro.conf.arg(name="")] = field(default_factory=TransferConfig)
    store: str = ""
    """Key of the store to train on. Empty: the one that the core was distilled from."""
    live: bool = False
    """Train on activations straight from the model, as the harvest settings describe them; none are kept."""
    harvest: HarvestConfig = field(default_factory=HarvestConfig)
    recipe: str = ""
    """Take the settings from a recipe: one that ships with dmsae, by name, or a .toml file. Flags win."""
    root: Path | None = None
    """Directory of stores."""


def run_train(command: TrainCommand) -> None:
    """Train one SAE and print how it fared."""
    store = _open_store(command.store, command.root)
    core = load_core(command.core) if command.core else None
    if core is not None:
        require_latents(core)
        require_same_model(core, store)
    stream = ActivationStream(
        StoreGroups(store, command.config.seed),
        command.config.batch_size,
        command.config.seed,
        training_device(command.config.device),
    )
    member = Member("sae", _sae_config(command, store, core), core.encoder_CD if core else None)
    made_from = {"store": store.key, "model": store.model}
    try:
        print_outcomes(Trainer([member], command.config, stream, command.out, made_from).run(), store)
    finally:
        stream.close()


def run_distill(command: DistillCommand) -> None:
    """Distil, printing a line per cycle, and then what came of it."""
    command.config.sae(d_model=1, n_core=0)  # impossible shapes are refused before anything is harvested
    _mind_train_table(command.recipe, "distill")
    live = _live(command)
    if command.store:
        store = _open_store(command.store, command.root)
        console.print("--store names a store: the harvest settings are not used.")
    else:
        job = Harvest(replace(command.harvest, train_tokens=0) if live else command.harvest, command.root)
        if not is_complete(job.path):  # a directory of another run is refused before the long work, not after it
            require_claimable(command.out, run_settings(command.config, job.path.name, job.request["model"], live))
        store = job.run()
    console.print(f"Store {store.key}: {store.model['name']} at {store.model['hook']}")
    _print_length(command.config.train, None if live else store)
    done = distil(command.config, store, command.out, _CyclePrinter(), live)
    out.print()
    show_distillation(done)
    out.print(f"\nThe core is in {distilled_directory(command.out)}. Look at it: dmsae core show {command.out}")


def run_transfer(command: TransferCommand) -> None:
    """Train SAEs from a core and print how they fared."""
    _mind_train_table(command.recipe, "transfer")
    core = load_core(command.core)
    store = _open_store(command.store or core.provenance.store, command.root)
    _print_length(command.config.train, None if command.live else store)
    outcomes = transfer(command.config, core, store, command.out, _live(command))
    out.print(f"SAEs of width {command.config.width:,} from a core of {len(core)} latents, in {command.out}:")
    print_outcomes(outcomes, store)


def run_status(run: Annotated[Path, tyro.conf.Positional]) -> None:
    """Say what a run has done and what is next.

    Args:
        run: Directory of a training, distillation or transfer.
    """
    table = plain_table("stage", "state", "")
    found = stages(run)
    for stage in found:
        table.add_row(*stage)
    out.print(table)
    failed = [stage.name for stage in found if stage.state in (State.COLLAPSED, State.DIVERGED)]
    left = [stage.name for stage in found if stage.state in ("waiting", "in progress")]
    if failed and left:
        out.print(f"Stopped: {failed[0]} failed. Begin again in a new directory, with a smaller k or a lower lr.")
    elif left:
        out.print(f"Next: {left[0]}. The command that began this run goes on with it.")
    else:
        out.print("Nothing is left to do.")


def print_outcomes(outcomes: list[Outcome], store: Store) -> None:
    """Print a line per trained SAE: held-out figures with its thresholds, and what its last training batch told."""
    table = plain_table("sae", "k", "state", "step", "FVE", "L0 core", "L0 other", "L0", "train FVE", "dead")
    for one in outcomes:
        sae = load_sae(one.directory)
        found = fidelity(sae, store)
        core, other = (found.l0_core, found.l0_noncore) if found else (None, None)
        table.add_row(
            one.name,
            str(sae.config.k),
            one.state,
            f"{one.step:,}",
            number(found.fve if found else None),
            number(core, 1),
            number(other, 1),
            number(core + other if core is not None and other is not None else None, 1),
            number(one.metrics.get("fve")),
            str(sum(one.metrics["dead_groups"][1:])) if one.metrics else "–",
        )
    out.print(table)
    out.print("FVE and L0: held-out text, inference thresholds. train FVE: the last training batch.")
    out.print("k: what BatchTopK keeps per token; beside a dense core the target's share of the other latents.")


class _CyclePrinter:
    """Prints a header once, then a line for each cycle as it ends."""

    _widths = (5, 5, 5, 5, 7, 16, 7, 8)

    def __call__(self, report: CycleReport) -> None:
        if report.cycle == 0:
            self._line("cycle", "core", "kept", "new", "dropped", "L0 of the core", "FVE", "loss")
        share = f"{report.l0_core:.1f} of {report.n_frozen}" if report.n_frozen else "–"
        if report.n_frozen:
            share += f" ({100 * report.l0_core / report.n_frozen:.0f} %)"
        core = report.core
        counts = (str(value) for value in (report.cycle, core.size, core.kept, core.new, core.dropped))
        self._line(*counts, share, number(report.heldout_fve), number(report.train_loss))

    def _line(self, *cells: str) -> None:
        out.print("  ".join(f"{cell:>{width}}" for cell, width in zip(cells, self._widths, strict=True)))


def _print_length(config: TrainConfig, store: Store | None) -> None:
    """Say how long each training is, before it begins; in epochs where it is known how long those are."""
    steps = config.schedule().steps
    epochs = f", {steps * config.batch_size / max(store.n_rows(Split.TRAIN), 1):.3g} epochs" if store else ""
    console.print(f"Each training: {steps:,} steps of {config.batch_size:,} activations{epochs}.")


def _mind_train_table(recipe: str, section: str) -> None:
    """Say so when a recipe's [train] table looks as if it were meant for another command."""
    settings = read_recipe(recipe) if recipe else {}
    if "train" in settings and "train" not in settings.get(section, {}):
        console.print(
            f"Mind: [train] is for 'dmsae train'; here [{section}.train] counts.", style="yellow", markup=False
        )


def _live(command: DistillCommand | TransferCommand) -> LiveGroups | None:
    if command.live and command.store:
        raise ConfigError("--live trains on what the harvest settings describe: leave out --store.")
    return LiveGroups(Harvest(command.harvest, command.root)) if command.live else None


def _open_store(key: str, root: Path | None) -> Store:
    return Store.open(find_store(root or default_root(), key))


def _sae_config(command: TrainCommand, store: Store, core: Core | None) -> SAEConfig:
    if command.kind == "batchtopk" and command.prefixes:
        raise ConfigError(f"prefixes = {command.prefixes}, but kind = batchtopk has only one.")
    nesting = command.prefixes or (
        (command.width,) if command.kind == "batchtopk" else matryoshka_prefixes(command.width)
    )
    n_core = len(core) if core else 0
    mode = command.core_mode if core else CoreMode.DENSE
    prefixes = core_first(nesting, n_core)
    return SAEConfig(store.d_model, command.width, command.k, prefixes, n_core, mode, command.center_input)
