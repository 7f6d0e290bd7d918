"""Jobs run beside each other; one that fails stops no other; Ctrl-C keeps what they had; the same command goes on."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import sweep_work as work
from conftest import Recorder
from dmsae.disk import layout
from dmsae.errors import BusyError, CheckpointError, SweepError
from dmsae.sweeps.engines import LocalProcesses, ThisProcess
from dmsae.sweeps.job import Job, JobState, JobStatus, job_directory, last_lines, read_board, was_done, write_status
from dmsae.sweeps.sweep import make_engine, run_jobs
from dmsae.sweeps.work import Work

TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes of jobs import what these tests give them to do."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))


def states(run: Path) -> dict[str, str]:
    return {name: str(status.state) for name, status in read_board(run).items()}


def test_processes_share_the_cores_and_one_that_fails_stops_no_other(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    jobs = [
        Job("bad", partial(work.fail, "it collapsed.\nMore."), {}),
        Job("killed", work.kill_oneself, {}),
        Job("needy", partial(work.leave, second), {}, needs=("bad", "elsewhere")),
        Job("good", partial(work.leave, first), {"k": 1}),
        Job("next", partial(work.leave, first, "after"), {}, needs=("good",)),
    ]
    told = Recorder()
    with pytest.raises(SweepError, match=r"3 of 5 jobs failed, or need one that did: bad, killed, needy"):
        run_jobs(jobs, tmp_path / "run", LocalProcesses(3, n_threads=6), 3, told)
    assert first.read_text() == "2\nafter\n", "six threads for three jobs, and the one that needs it comes later"
    assert not second.exists()
    assert states(tmp_path / "run") == {
        "bad": "failed",
        "good": "done",
        "killed": "stopped",
        "needy": "waiting",
        "next": "done",
    }
    board = read_board(tmp_path / "run")
    assert board["bad"].cause == "it collapsed.\nMore."
    assert last_lines(job_directory(tmp_path / "run", "bad"), 3) == ["about to fail", "error: it collapsed.", "More."]
    assert any(warning.startswith("bad: failed after 0 s: it collapsed") for warning in told.warnings)
    assert any(warning.startswith("killed: ended without a word") for warning in told.warnings)
    assert was_done(tmp_path / "run", "good", {"k": 1})
    assert not was_done(tmp_path / "run", "good", {"k": 2})


def test_a_job_of_other_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes while a sweep runs would have its later jobs read settings that earlier code wrote."""
    (tmp_path / "job").mkdir()
    made = Work(Job("late", partial(work.leave, tmp_path / "left"), {}), tmp_path / "job", tmp_path)
    monkeypatch.setattr("dmsae.sweeps.work.code_digest", lambda: "other code")
    with pytest.raises(SweepError, match="dmsae has changed since the sweep was started"):
        made()
    assert not (tmp_path / "left").exists()
    assert last_lines(tmp_path / "job", 1) == [
        "error: dmsae has changed since the sweep was started. Run the same command again."
    ]


def test_in_this_process_jobs_run_in_order_and_are_not_run_again(tmp_path: Path) -> None:
    file = tmp_path / "file"
    jobs = [
        Job("later", partial(work.leave, file, "later"), {}, needs=("a",)),
        Job("bad", work.break_down, {}),
        Job("a", partial(work.leave, file, "a"), {}),
    ]
    with pytest.raises(SweepError, match="1 of 3 jobs failed"):
        run_jobs(jobs, tmp_path, ThisProcess(), 1)
    assert file.read_text() == "a\nlater\n"
    assert read_board(tmp_path)["bad"].cause == "ZeroDivisionError: a bug"
    assert "break_down" in "\n".join(last_lines(job_directory(tmp_path, "bad"), 9)), "a traceback"
    again = [job._replace(is_done=was_done(tmp_path, job.name, job.settings)) for job in jobs]
    mended = [job._replace(call=partial(work.leave, file, "mended")) for job in again]
    run_jobs(mended, tmp_path, ThisProcess(), 1)
    assert file.read_text() == "a\nlater\nmended\n"
    assert set(states(tmp_path).values()) == {"done"}


SWEEP = """
import signal
import sys
from functools import partial
from pathlib import Path
# Whoever runs the tests may ignore SIGINT, as a shell does for what it starts in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
from dmsae.cli import main
from dmsae.commands import status
from dmsae.commands.terminal import TERMINAL
from dmsae.sweeps.engines import LocalProcesses
from dmsae.sweeps.job import Job
from dmsae.sweeps.sweep import run_jobs
import sweep_work as work

def run(_):
    here = Path(sys.argv[1])
    call = partial(work.save_when_stopped, here / "begun", here / "saved")
    run_jobs([Job("slow", call, {})], here, LocalProcesses(2, 2), 2, TERMINAL)

status.run = run
main(["status", sys.argv[1]])
"""


def start_sweep(run: Path) -> "subprocess.Popen[bytes]":
    """Start a sweep of one job in a process, as a command; return when the job is at work."""
    with (run / "printed").open("w") as printed:  # not a pipe: jobs that outlive the command would hold it open
        process = subprocess.Popen(
            [sys.executable, "-c", SWEEP, str(run)], stdout=printed, stderr=printed, start_new_session=True
        )
    while not (run / "begun").exists():
        assert process.poll() is None, (run / "printed").read_text()
        time.sleep(0.02)
    return process


def test_ctrl_c_lets_jobs_save_and_the_same_command_goes_on(tmp_path: Path) -> None:
    process = start_sweep(tmp_path)
    with pytest.raises(BusyError, match=f"The sweep in .* is in use by process {process.pid}"):
        run_jobs([], tmp_path, ThisProcess(), 1)
    assert states(tmp_path) == {"slow": "running"}
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes of the command
    assert process.wait(timeout=60) == 130
    assert "1 jobs save what they have" in (tmp_path / "printed").read_text()
    assert (tmp_path / "saved").exists(), "the signal reached the job once, and nobody killed it while it saved"
    assert states(tmp_path) == {"slow": "stopped"}
    assert last_lines(job_directory(tmp_path, "slow"), 1) == ["Interrupted. What was finished is kept."]
    call = partial(work.save_when_stopped, tmp_path / "begun", tmp_path / "saved")
    run_jobs([Job("slow", call, {})], tmp_path, LocalProcesses(2, 2), 2)
    assert states(tmp_path) == {"slow": "done"}


def test_what_a_killed_command_left_at_work_is_waited_for(tmp_path: Path) -> None:
    process = start_sweep(tmp_path)
    process.kill()
    process.wait()
    (left,) = read_board(tmp_path).values()
    assert left.state is JobState.RUNNING, "jobs do not end with the process that started them"

    class Ending(Recorder):
        def note(self, message: str) -> None:
            super().note(message)
            if "since an earlier command" in message:
                os.kill(left.process, signal.SIGTERM)

    told = Ending()
    call = partial(work.save_when_stopped, tmp_path / "begun", tmp_path / "saved")
    run_jobs([Job("slow", call, {})], tmp_path, ThisProcess(), 1, told)
    assert told.notes[0] == "slow: at work since an earlier command; waiting for it."
    assert states(tmp_path) == {"slow": "done"}


class _Crowd:
    """An engine on which jobs of an earlier command are at work, and that counts how many run at once."""

    poll_seconds, outlives_us = 0.0, False

    def __init__(self, at_work: set[str]) -> None:
        self._at_work, self.running, self.most = at_work, 0, 0

    def find(self, directory: Path) -> "_Member | None":
        return self._member(directory, 3) if directory.name in self._at_work else None

    def start(self, job: Job, directory: Path) -> "_Member":
        return self._member(directory, 1)

    def _member(self, directory: Path, steps: int) -> "_Member":
        self.running += 1
        self.most = max(self.most, self.running)
        directory.mkdir(parents=True, exist_ok=True)
        return _Member(self, directory, steps)


class _Member:
    """A job that ends after some looks at it."""

    def __init__(self, crowd: _Crowd, directory: Path, steps: int) -> None:
        self._crowd, self._directory, self._steps = crowd, directory, steps

    def is_over(self) -> bool:
        self._steps -= 1
        if self._steps == 0:
            self._crowd.running -= 1
            write_status(self._directory, JobStatus(JobState.DONE))
        return self._steps <= 0

    def stop(self) -> None:
        pass


def test_no_job_starts_while_an_earlier_command_left_more_at_work_than_may_run(tmp_path: Path) -> None:
    jobs = [Job(f"job-{i}", work.break_down, {}) for i in range(8)]
    crowd = _Crowd({f"job-{i}" for i in range(4)})
    run_jobs(jobs, tmp_path, crowd, 2)
    assert crowd.most == 4
    assert set(states(tmp_path).values()) == {"done"}


def test_without_submitit_one_job_at_a_time_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dmsae.sweeps.cluster import ClusterConfig, EngineKind

    for package in ("submitit", "ray"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SweepError, match=r"--jobs 2 needs the package submitit: pip install 'dmsae\[sweep\]'"):
        make_engine(ClusterConfig(), 2)
    with pytest.raises(SweepError, match=r"pip install 'dmsae\[sweep\]'"):
        make_engine(ClusterConfig(EngineKind.SLURM), 2)
    with pytest.raises(SweepError, match=r"pip install 'dmsae\[ray\]'"):
        make_engine(ClusterConfig(EngineKind.RAY), 2)
    run_jobs([Job("a", partial(work.leave, tmp_path / "a", "x"), {})], tmp_path, make_engine(ClusterConfig(), 1), 1)
    assert (tmp_path / "a").read_text() == "x\n"


def test_a_damaged_status_is_named(tmp_path: Path) -> None:
    directory = job_directory(tmp_path, "a")
    directory.mkdir(parents=True)
    (directory / layout.STATUS).write_text('{"state": "asleep"}')
    with pytest.raises(CheckpointError, match=r"does not tell how far a job has come.*Remove"):
        read_board(tmp_path)
