"""What a run directory has done and what comes next, read from its files alone."""

from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from dmsae.config import Json
from dmsae.disk import layout
from dmsae.disk.checkpoint import read_state
from dmsae.disk.run import read_settings
from dmsae.errors import CheckpointError
from dmsae.training.result import TrainState, read_result


class StageState(StrEnum):
    """How far a stage has come."""

    WAITING = "waiting"
    STARTED = "in progress"
    DONE = "done"
    FAILED = "failed"


class Stage(NamedTuple):
    """One piece of a run."""

    name: str
    state: StageState
    note: str = ""


def stages(directory: Path) -> list[Stage]:
    """Return the stages of a run in their order."""
    settings = read_settings(directory)
    match settings.get("kind"):
        case "train":
            return _training(directory, settings)
        case "distill":
            return _distillation(directory, settings)
    raise CheckpointError(f"{directory} is not a run of this version of dmsae: its kind is {settings.get('kind')!r}.")


def _training(directory: Path, settings: Json) -> list[Stage]:
    steps = settings["schedule"]["steps"]
    checkpoint = directory / layout.CHECKPOINT
    step = read_state(checkpoint)["step"] if checkpoint.is_file() else 0
    return [_trained(directory, name, step, steps) for name in settings["saes"]]


def _trained(directory: Path, name: str, step: int, steps: int) -> Stage:
    if (directory / name / layout.STATUS).is_file():
        result = read_result(directory / name)
        if result.state is not TrainState.FINISHED:
            return Stage(name, StageState.FAILED, f"{result.state} at step {result.step:,}: {result.cause}")
        return Stage(name, StageState.DONE, f"train FVE {result.metrics.fve:.3f}" if result.metrics else "")
    if step:
        return Stage(name, StageState.STARTED, f"checkpoint at step {step:,} of {steps:,}")
    return Stage(name, StageState.WAITING, f"{steps:,} steps")


def _distillation(directory: Path, settings: Json) -> list[Stage]:
    cycles = [stage for cycle in range(settings["distill"]["cycles"] + 1) for stage in _cycle(directory, cycle)]
    whole = (directory / layout.SUMMARY).is_file()
    return [*cycles, Stage("distilled core", StageState.DONE if whole else StageState.WAITING)]


def _cycle(directory: Path, cycle: int) -> list[Stage]:
    here = layout.cycle_directory(directory, cycle)
    has_sae = layout.has_artifact(here / layout.SAE, layout.SAE)
    if (here / layout.SETTINGS).is_file():
        (training,) = _training(here, read_settings(here))
        first = Stage(f"cycle {cycle}: train", training.state, training.note)
    elif has_sae:
        first = Stage(f"cycle {cycle}: import", StageState.DONE)
    else:
        first = Stage(f"cycle {cycle}: train", StageState.WAITING)
    stages = [first]
    for verb, artifact in (("score", layout.ATTRIBUTION), ("select", layout.CORE)):
        done = has_sae and layout.has_artifact(here, artifact)
        stages.append(Stage(f"cycle {cycle}: {verb}", StageState.DONE if done else StageState.WAITING))
    return stages
