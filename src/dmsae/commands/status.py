"""`dmsae status`: what a run has done and what is next."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from dmsae.commands.output import out, plain_table
from dmsae.distillation.status import StageState, stages


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
    all_stages = stages(command.run)
    for stage in all_stages:
        table.add_row(*stage)
    out.print(table)
    failed = [stage.name for stage in all_stages if stage.state is StageState.FAILED]
    left = [stage.name for stage in all_stages if stage.state in (StageState.WAITING, StageState.STARTED)]
    if failed and left:
        out.print(f"Stopped: {failed[0]} failed. Start again in a new directory, with a smaller k or a lower lr.")
    elif left:
        out.print(f"Next: {left[0]}. The command that started this run resumes it.")
    else:
        out.print("Nothing is left to do.")
