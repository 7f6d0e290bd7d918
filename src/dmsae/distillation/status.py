"""What a run directory has done and what comes next, read from its files alone."""

from pathlib import Path
from typing import Any, NamedTuple

from dmsae.disk.checkpoint import read_state
from dmsae.disk.run import read_settings
from dmsae.errors import CheckpointError
from dmsae.training.trainer import CHECKPOINT, STATUS, read_outcome


class Stage(NamedTuple):
    """One piece of a run."""

    name: str
    state: str
    """`done`, `in progress`, `waiting`, or how it failed."""
    note: str


def stages(directory: Path) -> list[Stage]:
    """Return the stages of a run in their order."""
    settings = read_settings(directory)
    match settings.get("kind"):
        case "train":
            return _training(directory, settings)
        case "distill":
            return _distillation(directory, settings)
    raise CheckpointError(f"{directory} is not a run of this version of dmsae: its kind is {settings.get('kind')!r}.")


def _training(directory: Path, settings: dict[str, Any]) -> list[Stage]:
    steps = settings["schedule"]["steps"]
    step = 0
    if (directory / CHECKPOINT).is_file():
        step = read_state(directory / CHECKPOINT)["step"]
    found = []
    for name in settings["saes"]:
        if (directory / name / STATUS).is_file():
            outcome = read_outcome(directory / name)
            done = outcome.state == "finished"
            note = f"train FVE {outcome.metrics['fve']:.3f}" if done and outcome.metrics else outcome.cause
            found.append(Stage(name, "done" if done else outcome.state, note))
        elif step:
            found.append(Stage(name, "in progress", f"checkpoint at step {step:,} of {steps:,}"))
        else:
            found.append(Stage(name, "waiting", f"{steps:,} steps"))
    return found


def _distillation(directory: Path, settings: dict[str, Any]) -> list[Stage]:
    found = []
    for cycle in range(settings["distill"]["cycles"] + 1):
        here = directory / f"cycle-{cycle}"
        trained = here / "sae" / STATUS
        imported = here / "sae" / "sae.json"
        if not here.is_dir():
            found.append(Stage(f"cycle {cycle}: train", "waiting", ""))
        elif (here / "config.json").is_file():
            (stage,) = _training(here, read_settings(here))
            found.append(Stage(f"cycle {cycle}: train", stage.state, stage.note))
        else:
            found.append(Stage(f"cycle {cycle}: import", "done" if imported.is_file() else "waiting", ""))
        ready = trained.is_file() or imported.is_file()
        for name, file in (("score", "attribution.json"), ("select", "core.json")):
            state = "done" if (here / file).is_file() else "waiting"
            found.append(Stage(f"cycle {cycle}: {name}", state if ready else "waiting", ""))
    whole = (directory / "summary.json").is_file()
    found.append(Stage("distilled core", "done" if whole else "waiting", ""))
    return found
