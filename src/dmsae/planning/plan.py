"""What a recipe needs at each stage, before it starts: memory, disk, traffic between ranks, hours."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from dmsae.activations.dtypes import torch_dtype
from dmsae.activations.request import HarvestConfig
from dmsae.activations.shards import row_bytes
from dmsae.activations.sources import MIX_SHARDS
from dmsae.activations.splits import Split
from dmsae.config import require
from dmsae.distillation.config import DistillConfig
from dmsae.distillation.transfer import TransferConfig, k_noncore, unconstrained_ks
from dmsae.planning.models import ModelFacts, model_bytes
from dmsae.planning.probe import seconds_by_k
from dmsae.sae.comms import batch_bytes, step_bytes
from dmsae.sae.config import SAEConfig
from dmsae.training.config import TrainConfig
from dmsae.training.memory import TrainingMemory, fitting_together, saved_bytes, training_memory, whole_bytes
from dmsae.training.mesh import MeshConfig, require_fits

CORE_SHARE = 0.1
"""Share of prefix-0 that a core is taken to have in a plan: cores are small beside the width and move little."""
_TOKEN = 5
"""Bytes of a stored token and its flag."""


class Stage(NamedTuple):
    """What one stage of a recipe needs; None where it is not known."""

    name: str
    what: str
    device_bytes: int | None
    """On each device, besides what a process has at its start."""
    host_bytes: int | None
    """In the host's memory, for each rank."""
    disk_bytes: int
    """Written and kept."""
    wire_bytes: int
    """Sent by each rank in a step; ranks that share memory send less."""
    hours: float | None


class Needs(NamedTuple):
    """A plan: its stages in order, and how many passes the SAEs of a transfer take."""

    stages: list[Stage]
    passes: int


def plan(
    harvest: HarvestConfig,
    distill: DistillConfig,
    transfer: TransferConfig,
    facts: ModelFacts,
    mesh: MeshConfig,
    available: int | None = None,
    harvest_seconds: float | None = None,
    device: str = "auto",
) -> Needs:
    """Return what the stages of a recipe need.

    `available` is the memory of each device, by which the SAEs of a transfer are spread over passes. `harvest_seconds`
    are from a measured dry run. Hours are those of one device like this one, divided by the ranks.
    """
    n_shards = math.ceil(harvest.train_tokens / harvest.shard_tokens)
    require_fits(mesh, distill.train.batch_size, {"distill": distill.width}, n_shards)
    require_fits(mesh, transfer.train.batch_size, {"transfer": transfer.width}, n_shards)
    if available is not None:  # on GPUs: their ranks share no memory
        mesh = replace(mesh, share_memory=False)
    shards = -(-MIX_SHARDS // mesh.data)  # of a block, those that a rank reads
    block = shards * harvest.shard_tokens * facts.d_model * torch_dtype(harvest.dtype).itemsize
    first = distill.sae(facts.d_model, 0)
    stages = [_harvest(harvest, facts, None if harvest_seconds is None else harvest_seconds / mesh.size)]
    stages += _cycles(distill, first, mesh, block, device)
    saes = _transferred(transfer, facts.d_model)
    together = len(saes)
    if available is not None:
        together = fitting_together(saes, transfer.train.batch_size, mesh, available)
    groups = [saes[start : start + together] for start in range(0, len(saes), together)]
    memory = max((training_memory(some, transfer.train.batch_size, mesh, block) for some in groups), key=_device)
    passes = f", {len(groups)} passes of at most {together}" if len(groups) > 1 else ""
    what = f"{len(saes)} SAEs of width {transfer.width:,}{passes}, {transfer.train.tokens:,} tokens each"
    stages.append(_training("transfer", what, saes, transfer.train, memory, mesh, device))
    return Needs(stages, len(groups))


def _device(memory: TrainingMemory) -> int:
    return memory.device


def _harvest(config: HarvestConfig, facts: ModelFacts, seconds: float | None) -> Stage:
    disk = sum(config.wanted(split) * (row_bytes(config, split, facts.d_model) + _TOKEN) for split in Split)
    needed = model_bytes(facts, config.model, config.batch_contexts, config.tokens.context_length)
    shard = config.shard_tokens * facts.d_model * 4
    what = f"{config.train_tokens:,} activations and {config.pair_tokens:,} pairs of {config.model.name}"
    return Stage("harvest", what, needed, 2 * shard, disk, 0, None if seconds is None else seconds / 3600)


def _cycles(config: DistillConfig, first: SAEConfig, mesh: MeshConfig, block: int, device: str) -> list[Stage]:
    """Return the stages of a distillation: cycle 0, unless its SAE is given, and the others."""
    stages = []
    memory = training_memory([first], config.train.batch_size, mesh, block)
    trained = f"an SAE of width {config.width:,}, {config.train.tokens:,} tokens"
    one = _training("a cycle", trained, [first], config.train, memory, mesh, device)
    if not config.cycle0.source:
        stages.append(one._replace(name="cycle 0"))
    if n := config.n_cycles:
        hours = None if one.hours is None else one.hours * n
        name = f"cycles 1–{n}" if n > 1 else "cycle 1"
        many = one._replace(name=name, what=f"{n} × {trained}", hours=hours, disk_bytes=one.disk_bytes * n)
        stages.append(many)
    return stages


def _training(
    name: str,
    what: str,
    saes: Sequence[SAEConfig],
    train: TrainConfig,
    memory: TrainingMemory,
    mesh: MeshConfig,
    device: str,
) -> Stage:
    steps = train.schedule().steps
    total = steps * sum(seconds_by_k(saes, train.batch_size // mesh.data, device)) / mesh.latents
    wire = batch_bytes(train.batch_size, saes[0].d_model, mesh.data, MIX_SHARDS) + max(
        step_bytes(train.batch_size, sae.d_model, sae.width, len(sae.prefixes), mesh.data, mesh.latents) for sae in saes
    )
    disk = sum(map(saved_bytes, saes))
    # With many parts, what comes after the training takes more than a part of the training.
    device_bytes = max(memory.device, *(whole_bytes(sae, train.batch_size) for sae in saes))
    host_bytes = memory.stream + memory.checkpoint + memory.shared
    return Stage(name, what, device_bytes, host_bytes, disk, wire, total / 3600)


def _transferred(config: TransferConfig, d_model: int) -> list[SAEConfig]:
    """Return the SAEs of a transfer, with a core of a usual size."""
    plain = config.sae(d_model, config.k[0], None)
    n_core = max(1, round(CORE_SHARE * plain.prefixes[0]))
    saes = []
    for k in config.k:
        kept = k_noncore(k, config.width, n_core)
        one = [config.sae(d_model, k, mode.core(n_core, kept)) for mode in config.core_modes]
        saes += one * (1 + len(config.random_cores))
        for baseline in config.baselines:
            ks = unconstrained_ks(k, n_core, config.budget) if baseline == "unconstrained" else [k]
            saes += [config.sae(d_model, one, None) for one in ks]
    require(bool(saes), "transfer", saes, "train at least one SAE")
    return saes
