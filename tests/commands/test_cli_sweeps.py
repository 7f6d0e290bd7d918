"""Sweeps as a user asks for them: several seeds, and the status of their jobs."""

import os
from pathlib import Path

import pytest

from dmsae.cli import main
from dmsae.cores.core import Core
from dmsae.disk.files import append_text
from dmsae.sweeps.job import Job, begun, ended, job_directory, waiting, write_status

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = ["--train.tokens", "1280", "--cycles", "1", "--attribution.n-bootstrap", "0"]


def test_distillations_and_transfers_over_seeds(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["distill", "--recipe", recipe, "--out", "cores", *QUICK]
    main([*asked, "--seeds", "0", "1"])
    cores = [Core.load(Path(f"cores/seed-{seed}")) for seed in (0, 1)]
    assert cores[0].digest() != cores[1].digest()
    before = Path("cores/jobs/seed-0/status.json").read_bytes()
    capsys.readouterr()
    main([*asked, "--seeds", "0", "1"])
    assert "0 of 2 jobs to run" in capsys.readouterr().err
    assert Path("cores/jobs/seed-0/status.json").read_bytes() == before

    shape = ["--k", "6", "--core-modes", "dense", "--train.tokens", "1280"]
    transfer = ["transfer", "--recipe", recipe, "--core", "cores", "--out", "saes", *shape]
    main([*transfer, "--seeds", "0", "1"])
    printed = capsys.readouterr().out
    for core in cores:
        assert f"from a core of {len(core)} latents" in printed, "each seed has its own"
    with pytest.raises(SystemExit) as end:  # a seed whose distillation is not there takes `cores` itself, and fails
        main([*transfer, "--seeds", "0", "7"])
    assert end.value.code == 2
    assert "1 of 2 jobs failed, or need one that did: seed-7. Look at why: dmsae status saes" in capsys.readouterr().err
    main(["status", "saes"])
    printed = capsys.readouterr().out
    assert "2 of 3 jobs done, 1 failed." in printed
    assert "seed-7 failed. The end of saes/jobs/seed-7/log.txt:" in printed
    with pytest.raises(SystemExit):
        main(["distill", "--recipe", recipe, "--out", "cores/seed-0", *QUICK, "--seeds", "0"])
    assert "cores/seed-0 holds a run. Several seeds need a directory of their own" in capsys.readouterr().err


def test_status_tells_what_is_done_running_stopped_and_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    jobs = {name: Job(name, os.getpid, {}) for name in ("done-seed-2", "done-seed-10", "failed", "killed")}
    jobs["left"] = Job("left", os.getpid, {}, needs=("failed", "done-seed-2"))
    for name, job in jobs.items():
        directory = job_directory(Path("run"), name)
        status = waiting(job) if name == "left" else begun(job)
        if name not in ("left", "killed"):
            status = ended(status, "It collapsed at step 3.\nTry again." if name == "failed" else "")
        write_status(directory, status)
    append_text(job_directory(Path("run"), "failed") / "log.txt", "".join(f"line {i}\n" for i in range(20)))
    main(["status", "run"])
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert [line[0] for line in lines[1:6]] == ["done-seed-2", "done-seed-10", "failed", "killed", "left"]
    assert lines[3] == ["failed", "failed", "0", "s", *["It", "collapsed", "at", "step", "3."]]
    assert lines[4] == ["killed", "stopped"], "it began, and its lock is free"
    assert lines[5] == ["left", "waiting", "needs", "failed"]
    assert "line 19" in printed
    assert "line 11" not in printed
    assert "2 of 5 jobs done, 1 waiting, 1 stopped, 1 failed." in printed
    assert "No command is at work on them." in printed
