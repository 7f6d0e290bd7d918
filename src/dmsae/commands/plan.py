"""`dmsae plan`: what a recipe will need."""

from dataclasses import dataclass, field

import torch
from rich.filesize import decimal as human_bytes

from dmsae.activations.harvest import Harvest
from dmsae.activations.request import HarvestConfig
from dmsae.commands.output import out, plain_table
from dmsae.commands.recipes import read_sections
from dmsae.commands.terminal import TERMINAL
from dmsae.config import require, require_whole
from dmsae.distillation.distill import DistillConfig
from dmsae.distillation.transfer import TransferConfig
from dmsae.errors import DmsaeError
from dmsae.planning.models import ModelFacts, model_facts
from dmsae.planning.plan import Needs, plan
from dmsae.training.mesh import MeshConfig

_GPU_GB = 80.0


@dataclass(frozen=True)
class PlanCommand:
    """Say what a recipe needs at each stage: memory per device, host memory, disk, traffic between ranks, hours.

    Memory is from a model of what is allocated. Hours are from a few steps that are measured now, on this machine's
    device, and from a dry run of the harvest if its model and text are here; nothing is written.
    """

    gpus: int = 0
    """Devices that share the training, as data ranks unless --mesh says otherwise. 0: this process alone."""
    gpu_memory: float | None = None
    """Memory of each in GB (10⁹ bytes). Default: that of the GPU that is here, else 80."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    harvest: HarvestConfig = field(default_factory=HarvestConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    recipe: str = ""
    """Take the settings from a recipe: one that ships with dmsae, by name, or a .toml file. Flags win."""

    def __post_init__(self) -> None:
        require_whole("gpus", self.gpus, 0)
        if self.gpus and self.mesh.size > 1:
            must = f"be the ranks of the mesh, {self.mesh.data} × {self.mesh.latents}"
            require(self.mesh.size == self.gpus, "gpus", self.gpus, must)
        if self.gpu_memory is not None:
            require(0 < self.gpu_memory < 1e6, "gpu_memory", self.gpu_memory, "be a number of GB")


def command(recipe: str) -> PlanCommand:
    """Return the command with the defaults of a recipe."""
    sections = read_sections(recipe)
    return PlanCommand(harvest=sections.harvest, distill=sections.distill, transfer=sections.transfer, recipe=recipe)


def run(command: PlanCommand) -> None:
    """Print the needs of every stage."""
    facts = model_facts(command.harvest.model, TERMINAL)
    mesh = command.mesh if command.mesh.size > 1 else MeshConfig(data=max(1, command.gpus))
    available = _available(command)
    seconds = _harvest_seconds(command.harvest)
    TERMINAL.note("Measuring a few training steps …")
    device = command.distill.train.device
    needs = plan(command.harvest, command.distill, command.transfer, facts, mesh, available, seconds, device)
    _print(needs, facts, mesh, available)


def _available(command: PlanCommand) -> int | None:
    """Return the memory of each device in bytes; None for a CPU, whose memory is shared with everything else."""
    if command.gpu_memory is not None:
        return round(command.gpu_memory * 1e9)
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return round(_GPU_GB * 1e9) if command.gpus else None


def _harvest_seconds(config: HarvestConfig) -> float | None:
    try:
        return sum(Harvest(config, progress=TERMINAL).dry_run().seconds.values())
    except DmsaeError as error:
        TERMINAL.note(f"No time for the harvest: {error}")
        return None


def _print(needs: Needs, facts: ModelFacts, mesh: MeshConfig, available: int | None) -> None:
    out.print(
        f"model    width {facts.d_model:,}, {facts.n_layers} blocks, {facts.n_parameters / 1e9:.2f}e9 parameters, "
        f"vocabulary {facts.vocabulary:,} ({facts.source})"
    )
    ranks = f"{mesh.data} data × {mesh.latents} latents" if mesh.size > 1 else "one process"
    out.print(f"ranks    {ranks}" + (f", {human_bytes(available)} each" if available else ""))
    table = plain_table("stage", "memory", "host", "disk", "sent a step", "hours", "what")
    for one in needs.stages:
        table.add_row(
            one.name,
            "–" if one.device_bytes is None else human_bytes(one.device_bytes),
            "–" if one.host_bytes is None else human_bytes(one.host_bytes),
            human_bytes(one.disk_bytes),
            human_bytes(one.wire_bytes) if mesh.size > 1 else "–",
            "–" if one.hours is None else f"{one.hours:,.2f}",
            one.what,
        )
    out.print(table)
    out.print(
        f"memory: of each device, besides what a process has at its start ({_process_bytes()} here without a GPU)."
    )
    shared = f" on {mesh.size} devices like this machine's, as if they shared it without loss" if mesh.size > 1 else ""
    if mesh.size > 1:
        shares = mesh.share_memory and available is None and mesh.data > 1
        no_gradients = " Gradients count, which ranks of one machine share instead of sending them." if shares else ""
        out.print(f"sent: by each rank, in one step of one SAE.{no_gradients}")
    out.print(f"hours: from steps measured now{shared}; not measured: scoring and evaluation.")
    over = [one for one in needs.stages if available is not None and (one.device_bytes or 0) > available]
    for one in over:
        out.print(f"{one.name} does not fit: split the latents over more ranks (--mesh.latents), or lower the batch.")


def _process_bytes() -> str:
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return human_bytes(peak if sys.platform == "darwin" else 1024 * peak)
