"""An environment in which a fake worker plays SAEBench: it follows a plan, and writes results like the package's."""

import json
import sys
from pathlib import Path
from typing import Any

WORKER = """
import json, os, sys, time
from pathlib import Path
from dmsae.evaluation.saebench.job import Event, Job
job = Job.read(Path(sys.argv[-1]))
assert sys.argv[1:4] == ["-P", "-m", "dmsae.evaluation.saebench.worker"], sys.argv
plan = json.loads((job.out / "plan.json").read_text())
with (job.out / "calls.txt").open("a") as calls:
    calls.write(job.eval + "\\n")
say = lambda *event: print(Event(*event).line(), end="", flush=True)
say("ready", "", "SAEBench 0")
print("something that the package prints", flush=True)
for sae in job.saes:
    what = plan.get(sae.name, "done")
    if what == "die":
        print("the last words", file=sys.stderr)
        os._exit(9)
    if what == "refuse":
        say("refused", "", "Unknown setting core.foo.")
        sys.exit(2)
    if what in ("failed", "not run"):
        say(what, sae.name, "It needs a judge.")
        continue
    result = {key: "" for key in plan["keys"]}
    metrics = plan.get("metrics of", {}).get(sae.name, plan["metrics"])
    result |= {"eval_result_metrics": metrics, "sae_lens_release_id": sae.name}
    for path, content in ((job.result(sae), result), (job.record(sae), {"key": job.key(sae), "figures": {"FVE": 0.5}})):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    say("done", sae.name, "", 2.5)
"""
KEYS = [
    "eval_type_id",
    "eval_config",
    "eval_id",
    "datetime_epoch_millis",
    "eval_result_metrics",
    "eval_result_details",
    "sae_bench_commit_hash",
    "sae_lens_id",
    "sae_lens_release_id",
    "sae_lens_version",
    "sae_cfg_dict",
]
METRICS = {"sparsity": {"l0": 31.5}, "model_performance_preservation": {"ce_loss_score": 0.9}}


def fake_environment(directory: Path) -> Path:
    """Make the environment, and return where it is."""
    worker, python = directory / "worker.py", directory / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    worker.write_text(WORKER)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{worker}" "$@"\n')
    python.chmod(0o755)
    return directory / "env"


def write_plan(out: Path, plan: dict[str, Any] | None = None) -> None:
    """Say what the worker is to do with SAEs, by name; by default all is well."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "plan.json").write_text(json.dumps({"keys": KEYS, "metrics": METRICS} | (plan or {})))
