"""`dmsae train`: one SAE."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from dmsae.activations.sources import StoreSource
from dmsae.activations.store import Store, open_store
from dmsae.commands.recipes import read_sections
from dmsae.commands.results import print_results, require_finished
from dmsae.commands.terminal import TERMINAL
from dmsae.config import to_dict
from dmsae.cores.core import Core
from dmsae.disk import layout
from dmsae.distillation.carrier import carrier
from dmsae.distillation.matching import warn_of_other_starts
from dmsae.distillation.transfer import keep_fidelity, require_latents
from dmsae.errors import ConfigError
from dmsae.sae.comms import Comms
from dmsae.sae.config import CoreMode, SAEConfig, core_first, matryoshka_nesting
from dmsae.training.config import TrainConfig
from dmsae.training.crew import run_on_mesh, train_on
from dmsae.training.mesh import MeshConfig


@dataclass(frozen=True)
class TrainCommand:
    """Train one SAE of any kind from a store.

    Matryoshka (groups of 1/32, 1/16, 1/8, 1/4 and the rest) or BatchTopK (one group), with or without a frozen core.
    Ctrl-C saves; the same command resumes.
    """

    store: str
    """Key of the store to train on, or its first letters."""
    out: Path
    """Directory for the results."""
    kind: Literal["msae", "batchtopk"] = "msae"
    """A Matryoshka SAE with nested prefixes, or a BatchTopK SAE with one."""
    width: int = 4096
    """Number K of latents."""
    k: int = 40
    """Active latents per token (non-core ones beside a core that does not compete)."""
    nesting: tuple[int, ...] = ()
    """Cumulative prefix sizes without a core, ending in the width. Empty: what `kind` says."""
    core: Path | None = None
    """Freeze the encoder rows of this core (a distillation run, or a directory with a core in it)."""
    core_mode: CoreMode = CoreMode.DENSE
    """dense: the core fires freely. sparse: it competes. detector: its offsets and thresholds are frozen too."""
    center_input: bool = True
    """Whether the encoder sees x − b_dec."""
    config: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)
    recipe: str = ""
    """Take the settings from a recipe: one that ships with dmsae, by name, or a .toml file. Flags win."""
    root: Path | None = None
    """Directory of stores."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """How training is spread over the processes that torchrun starts."""

    def sae(self, d_model: int, n_core: int) -> SAEConfig:
        """Return what is to be trained."""
        if self.kind == "batchtopk" and self.nesting:
            raise ConfigError(
                f"nesting = {self.nesting}; it must be left out with kind = batchtopk, which has one group."
            )
        nesting = self.nesting or ((self.width,) if self.kind == "batchtopk" else matryoshka_nesting(self.width))
        core = self.core_mode.core(n_core, self.k) if n_core else None
        return SAEConfig(d_model, self.width, self.k, core_first(nesting, n_core), core, self.center_input)


def command(recipe: str) -> TrainCommand:
    """Return the command with the defaults of a recipe."""
    ask: Any = tyro.MISSING
    return TrainCommand(store=ask, out=ask, config=read_sections(recipe).train, recipe=recipe)


def run(command: TrainCommand) -> None:
    """Train one SAE and print how it ended."""
    run_on_mesh(command.mesh, command.config.device, to_dict(command), partial(_run, command))


def _run(command: TrainCommand, comms: Comms) -> None:
    store = open_store(command.store, command.root)
    core = _core(command, store)
    sae = command.sae(store.d_model, len(core) if core else 0)
    spec = carrier(layout.SAE, sae, core)
    (result,) = train_on(comms, [spec], StoreSource(store), command.out, command.config, progress=TERMINAL)
    keep_fidelity(command.out, [result], store, command.config.device, TERMINAL)
    print_results([result], store)
    require_finished([result])


def _core(command: TrainCommand, store: Store) -> Core | None:
    if command.core is None:
        return None
    core = Core.load(command.core)
    require_latents(core)
    core.provenance.model.require_same(store.model, "the core", f"the store {store.key}")
    warn_of_other_starts(command.core, core.provenance.store, store, command.root, TERMINAL)
    return core
