"""The package's own words: which settings an eval has, and what a result must look like. Runs in its environment."""

import dataclasses
import inspect
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dmsae.errors import BenchmarkError, ConfigError, nearest
from dmsae.evaluation.saebench.evals import WORDS
from dmsae.evaluation.saebench.job import Job

_HOMES = {
    "core": ("core", "Core"),
    "absorption": ("absorption", "Absorption"),
    "sparse_probing": ("sparse_probing", "SparseProbing"),
    "sparse_probing_sae_probes": ("sparse_probing_sae_probes", "SparseProbingSaeProbes"),
    "scr": ("scr_and_tpp", "ScrAndTpp"),
    "tpp": ("scr_and_tpp", "ScrAndTpp"),
    "ravel": ("ravel", "RAVEL"),
    "unlearning": ("unlearning", "Unlearning"),
    "autointerp": ("autointerp", "AutoInterp"),
    "meta_structure": ("meta_structure", "MetaStructure"),
}
"""The folder of each eval, and what the names of its classes begin with."""
_OUTPUTS = {"scr": "ScrEvalOutput", "tpp": "TppEvalOutput"}
_OURS = {"absorption": {WORDS}}
"""Settings that the package does not have."""
_FIXED = {"model_name", "random_seed", "llm_dtype", "selected_saes", "output_folder", "verbose", "dtype", "device"}
_FIXED |= {"force_rerun", "perform_scr", "artifact_dir", "results_path", "model_cache_path"}
"""Settings that follow from the job, and are not for the user to choose."""


def require_settings(job: Job) -> None:
    """Raise unless all settings are ones that the eval has."""
    known = sorted(known_settings(job.eval))
    for name in job.settings:
        if name not in known:
            raise ConfigError(f"Unknown setting {job.eval}.{name}. {nearest(name, known)}")


def known_settings(name: str) -> set[str]:
    """Return the names of the settings of an eval."""
    folder, prefix = _HOMES[name]
    if name == "core":
        given = set(inspect.signature(import_module("sae_bench.evals.core.main").multiple_evals).parameters)
    else:
        config = getattr(import_module(f"sae_bench.evals.{folder}.eval_config"), f"{prefix}EvalConfig")
        given = {field.name for field in dataclasses.fields(config)}
    return (given | _OURS.get(name, set())) - _FIXED


def require_valid(name: str, path: Path) -> None:
    """Raise unless a result is as the package's schema says that it must be."""
    folder, prefix = _HOMES[name]
    output: Any = getattr(
        import_module(f"sae_bench.evals.{folder}.eval_output"), _OUTPUTS.get(name, f"{prefix}EvalOutput")
    )
    try:
        TypeAdapter(output).validate_json(path.read_bytes())
    except (ValidationError, OSError) as error:
        raise BenchmarkError(f"{path} is not a result as {output.__name__} defines it: {error}") from error


def versions() -> dict[str, str]:
    """Return the versions of what a result depends on."""
    names = ("dmsae", "sae-bench", "sae-lens", "sae-probes", "transformer-lens", "transformers", "torch", "numpy")
    return {name: version(name) for name in names}
