"""Jobs on Slurm, without one: what sbatch is given, and a stand-in for it that runs scripts on this machine."""

import os
import stat
import subprocess
from functools import partial
from pathlib import Path

import pytest

import sweep_work as work
from conftest import Recorder
from dmsae.errors import ConfigError, SweepError
from dmsae.sweeps.cluster import ClusterConfig, EngineKind, read_cluster
from dmsae.sweeps.engines import LocalProcesses, Slurm, gpu_names
from dmsae.sweeps.job import Job, JobState, read_board
from dmsae.sweeps.sweep import run_jobs

TESTS = Path(__file__).parents[1]
SBATCH = """#!/bin/bash
grep -q -- --partition=none "$1" && { echo "invalid partition specified: none" >&2; exit 1; }
id=$(( $(cat ids 2>/dev/null || echo 100) + 1 )); echo $id > ids
cp "$1" submitted-$id.sh
if [ ! -e hold ]; then SLURM_JOB_ID=$id setsid bash submitted-$id.sh > printed-$id 2>&1 & fi
echo "Submitted batch job $id"
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do case $1 in --output|--error) shift 2;; *) shift;; esac; done
exec "$@"
"""
SACCT = """#!/bin/bash
echo "JobID|State|NodeList"
[ -e hold ] && echo "$(cat ids)|PENDING|None"
exit 0
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which sbatch, srun and sacct are stand-ins; a file `hold` keeps jobs in the queue."""
    here = tmp_path / "slurm"
    here.mkdir()
    for name, script in (("sbatch", SBATCH), ("srun", SRUN), ("sacct", SACCT)):
        (here / name).write_text(script)
        (here / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(here), prepend=":")
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.chdir(here)
    monkeypatch.setattr(Slurm, "poll_seconds", 0.1)
    return here


def test_the_script_asks_for_what_the_recipe_says_and_the_job_runs(slurm: Path) -> None:
    Path("mine.toml").write_text(
        '[cluster]\npartition = "gpu"\nhours = 1.5\ncpus = 3\ngpus = 1\nmemory_gb = 24\n'
        'setup = ["module load cuda"]\n[cluster.directives]\naccount = "us"\nexclusive = ""\n'
    )
    cluster = read_cluster("mine.toml")
    assert cluster.engine is EngineKind.SLURM
    job = Job("paper-seed-0", partial(work.leave, Path("threads")), {})
    run_jobs([job], Path("run"), Slurm(cluster), 1)
    lines = Path("submitted-101.sh").read_text().splitlines()
    asked = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")}
    assert asked >= {
        "job-name=dmsae-paper-seed-0",
        "partition=gpu",
        "time=90",
        "cpus-per-task=3",
        "gpus-per-node=1",
        "mem=24576M",
        "account=us",
        "exclusive",
        "signal=USR2@90",
    }
    assert "module load cuda" in lines
    assert Path("threads").read_text() == "3\n", "as many threads as it has cores"
    assert {str(one.state) for one in read_board(Path("run")).values()} == {"done"}


def test_a_job_in_the_queue_outlives_the_command_and_is_not_submitted_twice(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    class Starting(Recorder):
        def note(self, message: str) -> None:
            super().note(message)
            if "since an earlier command" in message:
                Path("hold").unlink()
                subprocess.run(["bash", "submitted-101.sh"], env=os.environ | {"SLURM_JOB_ID": "101"}, check=True)

    job, told, cluster = (
        Job("slow", partial(work.leave, Path("file"), "x"), {}),
        Starting(),
        ClusterConfig(EngineKind.SLURM),
    )
    Path("hold").touch()
    with monkeypatch.context() as patch:
        patch.setattr("dmsae.sweeps.sweep.time.sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_jobs([job], Path("run"), Slurm(cluster), 1, told)
    assert told.notes[-1] == "1 jobs stay on the cluster. The same command waits for them."
    assert not Path("file").exists()
    run_jobs([job], Path("run"), Slurm(cluster), 1, told)
    assert Path("file").read_text() == "x\n"
    assert Path("ids").read_text() == "101\n", "it was submitted once"


def test_what_sbatch_refuses_has_failed_and_stops_no_other(slurm: Path) -> None:
    jobs = [Job(name, work.break_down, {}) for name in ("a", "b")]
    with pytest.raises(SweepError, match="2 of 2 jobs failed"):
        run_jobs(jobs, Path("run"), Slurm(ClusterConfig(EngineKind.SLURM, partition="none")), 1)
    refused = "sbatch did not take the job {}: invalid partition specified: none"
    board = read_board(Path("run"))
    for name in ("a", "b"):
        assert board[name].state is JobState.FAILED
        assert refused.format(name) in board[name].cause


def test_without_slurm_the_error_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SweepError, match="There is no sbatch here"):
        Slurm(ClusterConfig(EngineKind.SLURM))


def test_settings_of_a_cluster_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.partition is for jobs on a cluster.*--cluster\.engine slurm"):
        ClusterConfig(partition="gpu")
    with pytest.raises(ConfigError, match=r"cluster\.hours = -1; it must be positive"):
        ClusterConfig(EngineKind.SLURM, hours=-1)
    (tmp_path / "bad.toml").write_text("[cluster]\npartitions = 'gpu'\n")
    with pytest.raises(ConfigError, match=r"bad\.toml: Unknown setting cluster\.partitions. Did you mean 'partition'"):
        read_cluster(str(tmp_path / "bad.toml"))
    (tmp_path / "worse.toml").write_text("cluster = 3\n")
    with pytest.raises(ConfigError, match="cluster = 3 is not a table"):
        read_cluster(str(tmp_path / "worse.toml"))
    assert read_cluster("") == ClusterConfig()


def test_local_jobs_take_turns_on_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_names(None, 2) == ["0", "1"]
    assert gpu_names("3,5", 2) == ["3", "5"]
    assert gpu_names("", 0) == []
    given = []

    class Executor:
        def __init__(self, _folder: Path) -> None: ...
        def update_parameters(self, **_: object) -> None: ...
        def submit(self, work: object) -> "Executor":
            given.append(getattr(work, "gpus"))  # noqa: B009
            return self

        def done(self) -> bool:
            return False

    monkeypatch.setattr("submitit.LocalExecutor", Executor)
    engine = LocalProcesses(3, 6, ["3", "5"])
    for name in "abc":
        engine.start(Job(name, work.break_down, {}), tmp_path)
    assert given == ["3", "5", "3"]
