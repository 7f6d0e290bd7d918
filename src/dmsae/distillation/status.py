"""What a run directory has done, what it is doing and what comes next, read from its files alone."""

import json
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from dmsae.config import Json
from dmsae.disk import layout
from dmsae.disk.artifact import read_sealed
from dmsae.disk.checkpoint import saved_step
from dmsae.disk.run import read_settings, running_process
from dmsae.errors import CheckpointError
from dmsae.training.result import TrainState, read_result

_TAIL_BYTES = 16_384
"""Enough for the last line of any metrics."""
_MOST_CYCLES = 1000
"""More than any run has: a number above it is damage, and listing as many stages would take for ever."""


class StageState(StrEnum):
    """How far a stage has come."""

    WAITING = "waiting"
    STARTED = "in progress"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class Stage(NamedTuple):
    """One piece of a run."""

    name: str
    state: StageState
    note: str = ""

    @property
    def is_open(self) -> bool:
        """Whether something of it is left to do."""
        return self.state in (StageState.WAITING, StageState.STARTED)


def stages(directory: Path) -> list[Stage]:
    """Return the stages of a run in their order."""
    settings = read_settings(directory)
    is_running = running_process(directory) is not None
    try:
        match settings.get("kind"):
            case "train":
                return _training(directory, settings, is_running)
            case "distill":
                return _distillation(directory, settings, is_running)
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise CheckpointError(
            f"{directory} is not a run that this version of dmsae can read: {error!r}. Restore its files, or use a new "
            "directory."
        ) from error
    raise CheckpointError(f"{directory} is not a run of this version of dmsae: its kind is {settings.get('kind')!r}.")


def n_cycles(directory: Path, settings: Json) -> int:
    """Return how many cycles after cycle 0 a distillation is to have, given its settings."""
    if "cycles" not in settings:
        raise CheckpointError(f"{directory} is a distillation of an earlier version of dmsae; this one cannot read it.")
    cycles: int = settings["cycles"]
    if type(cycles) is not int or not 0 <= cycles <= _MOST_CYCLES:
        raise CheckpointError(
            f"{directory / layout.SETTINGS} asks for {str(cycles)[:20]!r} cycles; expected 0 to {_MOST_CYCLES}. "
            "Restore it, or use a new directory."
        )
    return cycles


def read_summary(directory: Path) -> Json:
    """Return the summary of a distillation; nothing when it has not ended."""
    path = directory / layout.SUMMARY
    if not path.is_file():
        return {}
    remedy = "Remove it, and run the same command again."
    summary = read_sealed(path, remedy, must_be_sealed=False)
    if not isinstance(summary.get("cycles"), list):
        raise CheckpointError(f"{path} is not the summary of a distillation: it lists no cycles. {remedy}")
    return summary


def _training(directory: Path, settings: Json, is_running: bool) -> list[Stage]:
    steps = settings["schedule"]["steps"]
    saved = saved_step(directory)
    listed = [_trained(directory, name, saved, steps) for name in settings["saes"]]
    if not is_running:
        return listed
    notes = {name: f"step {max(saved, _logged(directory / name)):,} of {steps:,}" for name in settings["saes"]}
    return [Stage(one.name, StageState.RUNNING, notes[one.name]) if one.is_open else one for one in listed]


def _trained(directory: Path, name: str, step: int, steps: int) -> Stage:
    if (directory / name / layout.STATUS).is_file():
        result = read_result(directory / name)
        if result.state is not TrainState.FINISHED:
            return Stage(name, StageState.FAILED, f"{result.state} at step {result.step:,}: {result.cause}")
        return Stage(name, StageState.DONE, f"train FVE {result.metrics.fve:.3f}" if result.metrics else "")
    if step:
        return Stage(name, StageState.STARTED, f"checkpoint at step {step:,} of {steps:,}")
    return Stage(name, StageState.WAITING, f"{steps:,} steps")


def _logged(sae: Path) -> int:
    """Return the last step in an SAE's metrics. They may be written to meanwhile: the last line may not be whole."""
    try:
        with (sae / layout.METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except (OSError, ValueError, KeyError):
        return 0


def _distillation(directory: Path, settings: Json, is_running: bool) -> list[Stage]:
    cycles, summary = n_cycles(directory, settings), read_summary(directory)
    failure = summary.get("failure")
    last = failure["cycle"] if failure else cycles
    listed = [stage for cycle in range(last + 1) for stage in _cycle(directory, cycle, is_running)]
    if failure:
        failed = next(i for i, one in enumerate(listed) if one.state is not StageState.DONE)
        listed = [*listed[:failed], Stage(listed[failed].name, StageState.FAILED, failure["cause"])]
        kept = summary["n_distilled"]
        note = "needs two cores" if kept is None else f"{kept} latents, of the cycles before the one that failed"
        return [*listed, Stage("distilled core", StageState.FAILED if kept is None else StageState.DONE, note)]
    is_whole = len(summary.get("cycles", ())) == cycles + 1
    listed.append(Stage("distilled core", StageState.DONE if is_whole else StageState.WAITING))
    now = next((i for i, one in enumerate(listed) if one.is_open or one.state is StageState.RUNNING), None)
    if is_running and now is not None:
        listed[now] = listed[now]._replace(state=StageState.RUNNING)
    return listed


def _cycle(directory: Path, cycle: int, is_running: bool) -> list[Stage]:
    here = layout.cycle_directory(directory, cycle)
    has_sae = layout.has_artifact(here / layout.SAE, layout.SAE)
    if (here / layout.SETTINGS).is_file():
        trainings = _training(here, read_settings(here), is_running)
        names = [""] if len(trainings) == 1 else [f" {one.name}" for one in trainings]
        stages = [
            Stage(f"cycle {cycle}: train{name}", one.state, one.note)
            for name, one in zip(names, trainings, strict=True)
        ]
    elif has_sae:
        stages = [Stage(f"cycle {cycle}: import", StageState.DONE)]
    else:
        stages = [Stage(f"cycle {cycle}: train", StageState.WAITING)]
    for verb, artifact in (("score", layout.ATTRIBUTION), ("select", layout.CORE)):
        done = has_sae and layout.has_artifact(here, artifact)
        stages.append(Stage(f"cycle {cycle}: {verb}", StageState.DONE if done else StageState.WAITING))
    return stages
