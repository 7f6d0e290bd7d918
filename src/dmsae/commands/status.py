"""`dmsae status`: what a run has done and what is next."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from dmsae.commands.output import out, plain_table
from dmsae.disk.run import running_process
from dmsae.distillation.status import Stage, StageState, stages


@dataclass(frozen=True)
class StatusCommand:
    """Say what a run has done and what is next."""

    run: Annotated[Path, tyro.conf.Positional]
    """Directory of a training, distillation or transfer."""


def command(recipe: str) -> StatusCommand:
    """Return the command; a recipe has nothing to say about it."""
    return StatusCommand(run=tyro.MISSING)


def run(command: StatusCommand) -> None:
    """Print the stages of a run."""
    table = plain_table("stage", "state", "")
    process = running_process(command.run)
    all_stages = stages(command.run)
    for stage in all_stages:
        is_running = stage.state is StageState.RUNNING
        table.add_row(stage.name, f"{stage.state} (pid {process})" if is_running else stage.state, stage.note)
    out.print(table)
    out.print(_outlook(all_stages, process))


def _outlook(all_stages: list[Stage], process: int | None) -> str:
    """Return what comes next, in a sentence."""
    failed = [stage.name for stage in all_stages if stage.state is StageState.FAILED]
    left = [stage.name for stage in all_stages if stage.is_open]
    if process is not None:
        return f"Process {process} is at work."
    if left:
        return f"Next: {left[0]}. The command that started this run resumes it."
    if len(failed) == len(all_stages) or any(name.startswith("cycle") for name in failed):
        return f"Stopped: {failed[0]} failed. Start again in a new directory, with what the cause suggests changed."
    return "Nothing is left to do."
