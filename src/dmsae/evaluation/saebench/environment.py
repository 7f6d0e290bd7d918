"""The environment that SAEBench runs in, and the process that is started there."""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from dmsae.errors import BenchmarkError

VARIABLE = "DMSAE_SAEBENCH"
"""Names the environment's directory when it is not given."""
DEFAULT = Path(".venv-saebench")
"""Where `make saebench-env` builds it, as seen from the project's directory."""

MEASURING = ("sae-bench", "sae-probes", "sae-lens", "transformer-lens", "transformers")
"""Packages that decide what an eval measures, and how the model is read."""

_SETTINGS = {
    "JAXTYPING_DISABLE": "1",  # sparse probing has a shape annotation that does not hold
    "HF_DATASETS_TRUST_REMOTE_CODE": "1",  # one of its data sets is a script
    "TOKENIZERS_PARALLELISM": "false",
    "MPLBACKEND": "Agg",
    "WANDB_MODE": "disabled",
    "PYTHONUNBUFFERED": "1",
}


def find_python(environment: Path | None = None) -> Path:
    """Return the Python of SAEBench's environment: the one given, that of $DMSAE_SAEBENCH, or .venv-saebench here."""
    directory = environment or Path(os.environ.get(VARIABLE) or DEFAULT)
    python = directory.expanduser() / "bin" / "python"
    if not python.exists():
        raise BenchmarkError(
            f"SAEBench has no environment in {directory}: {python} is missing. It needs one of its own, because it "
            "conflicts with this one: run 'make saebench-env' in the project's directory (2 GB, some minutes), or say "
            f"where it is with --env or ${VARIABLE}."
        )
    return python.absolute()  # not resolved: the link itself is what makes it an environment


def measuring_versions(python: Path) -> dict[str, str]:
    """Return the versions of the packages that measure, read from the files of the environment without starting it."""
    places = [str(place) for place in python.parent.parent.glob("lib/python*/site-packages")]
    found = ((name, metadata.distributions(name=name, path=places)) for name in MEASURING)
    return {name: one.version for name, distributions in found for one in distributions}


@contextmanager
def started(python: Path, module: str, argument: Path, errors: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a module of ours in another environment while the block runs; its standard error goes to a file.

    Whatever ends the block ends the process.
    """
    errors.parent.mkdir(parents=True, exist_ok=True)
    # -P: what lies in the current directory must not shadow the environment's packages.
    command = [str(python), "-P", "-m", module, str(argument)]
    with errors.open("w", encoding="utf8") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, encoding="utf8", env=_variables(os.environ)
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            if process.stdout is not None:
                process.stdout.close()
            process.wait()


def _variables(ours: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the process: ours, without what points Python to this environment."""
    kept = {name: value for name, value in ours.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    return {**_SETTINGS, **kept}
