"""The name of every file and folder that dmsae writes, and where they are by default.

    <cache>/assets/<name>-<version>/     a bundled model or corpus          (text/assets.py)
    <cache>/stores/<key>/                harvested activations              (activations/store.py)
    <cache>/evaluation/                  what evaluations share            (evaluation/evaluate.py)
    <cache>/saebench/                    what SAEBench keeps between SAEs   (evaluation/saebench/)
    <run>/                               a training, distillation or transfer

docs/on-disk.md shows the same with what is inside each file.
"""

import os
from pathlib import Path

FORMAT = 2
"""Version of the format of saved SAEs, their samples, and cores (docs/format.md). Those of version 1 do not say it."""

LOCK = ".lock"
"""Held by the process that writes a store or a run."""

ASSET_MANIFEST = "asset.json"

# A store
STORE_REQUEST = "request.json"
STORE_JOURNAL = "shards.jsonl"
STORE_COMPLETE = "store.json"
TOKENS = "tokens"

# A run
SETTINGS = "config.json"
CHECKPOINT = "checkpoint.safetensors"
MESH_CHECKPOINT = "checkpoint.mesh"
"""Written in place of the one above by several processes: a folder for each step, with a file from each process."""
MESH_STATE = "state.json"
METRICS = "metrics.jsonl"
TIMING = "timing.jsonl"
STATUS = "status.json"
TENSORBOARD = "tensorboard"
FIDELITY = "fidelity.json"
LOSS = "loss.json"
SUMMARY = "summary.json"
PRICES = "prices.json"
AGREEMENT = "agreement.json"

# A sweep: a folder for each job
JOBS = "jobs"
LOG = "log.txt"

# An evaluation
EVALUATION = "evaluation.json"
STABILITY = "stability.json"
PLANTED = "planted.json"
RESULTS = "results"

# SAEBench: results lie in folders that its plotting expects, each with the name of an eval; beside them:
RECORDS = "records"
LOGS = "logs"
UNFINISHED = "unfinished"
FOREIGN_SAES = "saes"
NULL_SAES = "nulls"
SYNTH = "synth.json"

# Artifacts: `<name>.safetensors` and `<name>.json`; the SAE of a training or cycle is in a folder of the same name
SAE = "sae"
SAMPLE = "sample"
ATTRIBUTION = "attribution"
ABLATION = "ablation"
CORE = "core"
DISTILLED = "distilled"


def cache_directory() -> Path:
    """Return where assets and stores live: `$DMSAE_CACHE`, else `dmsae` in the user's cache directory."""
    if given := os.environ.get("DMSAE_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dmsae"


def assets_directory() -> Path:
    """Return where fetched assets live."""
    return cache_directory() / "assets"


def fidelity(half: str | None = None) -> str:
    """Return the name of the file with an SAE's held-out figures, or those on a half of the held-out activations."""
    return f"fidelity-{half}.json" if half else FIDELITY


def stores_directory() -> Path:
    """Return where stores live unless a root is given."""
    return cache_directory() / "stores"


def evaluation_cache() -> Path:
    """Return where evaluations keep what they compute once for all SAEs."""
    return cache_directory() / "evaluation"


def saebench_cache() -> Path:
    """Return where SAEBench keeps what does not depend on an SAE, or what it had finished of one."""
    return cache_directory() / "saebench"


def token_file(split: str) -> str:
    """Return the name, inside a store, of the file that holds a split's tokens."""
    return f"{TOKENS}/{split}.safetensors"


def shard_file(split: str, index: int) -> str:
    """Return the name, inside a store, of a shard."""
    return f"{split}/{index:05d}.safetensors"


def member(index: int) -> str:
    """Return the name of the folder of an SAE that is trained beside the one of a cycle."""
    return f"member-{index}"


def cycle_directory(run: Path, cycle: int | str) -> Path:
    """Return the folder of one cycle of a distillation."""
    return run / f"cycle-{cycle}"


def seed_directory(run: Path, seed: int) -> Path:
    """Return the folder of one seed of a sweep."""
    return run / f"seed-{seed}"


def earlier_results(run: Path, cycles: int) -> tuple[Path, Path]:
    """Return where the distilled core and the summary go that a run gave when it had fewer cycles."""
    return run / f"{DISTILLED}-{cycles}", run / f"{Path(SUMMARY).stem}-{cycles}.json"


def has_artifact(directory: Path, name: str) -> bool:
    """Return whether an artifact has been written: its facts are written last."""
    return (directory / f"{name}.json").is_file()
