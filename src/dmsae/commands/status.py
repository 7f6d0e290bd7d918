"""`dmsae status`: what a run has done and what is next, or how the jobs of a sweep do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from dmsae.commands.output import out, plain_table
from dmsae.disk import layout
from dmsae.disk.run import running_process
from dmsae.distillation.status import Stage, StageState, stages
from dmsae.progress import human_seconds
from dmsae.sweeps.job import JobState, JobStatus, job_directory, last_lines, read_board

_LINES = 8
"""How much of the log of a job that failed is shown."""


@dataclass(frozen=True)
class StatusCommand:
    """Say what a run has done and what is next; of several jobs, which are done, running or failed, and why."""

    run: Annotated[Path, tyro.conf.Positional]
    """Directory of a training, distillation or transfer, or of an experiment or several seeds."""


def command(recipe: str) -> StatusCommand:
    """Return the command; a recipe has nothing to say about it."""
    return StatusCommand(run=tyro.MISSING)


def run(command: StatusCommand) -> None:
    """Print the stages of a run, or the jobs of a sweep."""
    if (command.run / layout.JOBS).is_dir():
        _print_jobs(command.run)
        return
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


def _print_jobs(run: Path) -> None:
    """Print how far each job of a sweep has come, and the end of the log of those that failed."""
    board = read_board(run)
    table = plain_table("job", "state", "time", "")
    for name, status in board.items():
        seconds = status.seconds
        table.add_row(name, _state(status), "" if seconds is None else human_seconds(seconds), _note(run, name, board))
    out.print(table)
    for name, status in board.items():
        lines = last_lines(job_directory(run, name), _LINES)
        if status.state in (JobState.FAILED, JobState.STOPPED) and lines:
            out.print(f"\n{name} {status.state}. The end of {job_directory(run, name) / layout.LOG}:", style="bold")
            for line in lines:
                out.print(f"  {line}")
    counts = {state: sum(status.state is state for status in board.values()) for state in JobState}
    shown = ", ".join(f"{count} {state}" for state, count in counts.items() if count and state is not JobState.DONE)
    out.print(f"\n{counts[JobState.DONE]} of {len(board)} jobs done{', ' if shown else ''}{shown}.")
    if counts[JobState.DONE] < len(board) and running_process(run / layout.JOBS) is None:
        out.print("No command is at work on them. The one that started them runs what is left.")


def _state(status: JobStatus) -> str:
    where = f" (pid {status.process} on {status.host})" if status.state is JobState.RUNNING else ""
    return f"{status.state}{where}"


def _note(run: Path, name: str, board: dict[str, JobStatus]) -> str:
    """Return what a job does or waits for, or why it failed, in a line."""
    status = board[name]
    if status.state is JobState.WAITING:
        left = [other for other in status.needs if other in board and board[other].state is not JobState.DONE]
        return f"needs {', '.join(left)}" if left else ""
    if status.state is JobState.RUNNING:
        return "".join(last_lines(job_directory(run, name), 1))
    return status.cause.partition("\n")[0]
