"""What an eval needs and this machine may not have, said before anything is loaded. Runs in SAEBench's environment."""

import os
from pathlib import Path

import transformers
from huggingface_hub import snapshot_download

from dmsae.errors import CorpusError, first_line
from dmsae.evaluation.saebench.job import Job
from dmsae.text.hub import dataset_commit, file_sizes

FORGET = "bio-forget-corpus.jsonl"
"""What the unlearning eval forgets; its authors give it out on request."""
KEY = "OPENAI_API_KEY"
"""The variable that holds the key of the judge of the autointerp eval."""
UNLEARNING_MODEL = "gemma-2-2b-it"
"""The model that the unlearning eval asks questions, also when SAEs are of gemma-2-2b: it has a prompt for no other."""

_RAVEL_MODELS = ("gemma-2-2b", "pythia-160m-deduped")
_UNLEARNING_SAES = ("gemma-2-2b", UNLEARNING_MODEL)
_BLOCK_OUTPUTS_CHANGED = 5


def missing(job: Job, model_name: str) -> str:
    """Return a sentence that names what an eval lacks here; empty when it can run."""
    match job.eval:
        case "core":
            return _missing_data(job, [job.settings["dataset"]], "core.dataset")
        case "sparse_probing":
            return _missing_data(job, job.settings.get("dataset_names") or _probing_data(), "dataset_names")
        case "scr" | "tpp":
            return _missing_data(job, job.settings.get("dataset_names") or _scr_data(), "dataset_names")
        case "ravel":
            return _missing_for_ravel(job, model_name)
        case "unlearning":
            return _missing_for_unlearning(job, model_name)
        case "autointerp":
            return _missing_for_autointerp(job)
    return ""


def _probing_data() -> list[str]:
    from sae_bench.evals.sparse_probing.eval_config import SparseProbingEvalConfig

    return list(SparseProbingEvalConfig().dataset_names)


def _scr_data() -> list[str]:
    from sae_bench.evals.scr_and_tpp.eval_config import ScrAndTppEvalConfig

    return list(ScrAndTppEvalConfig().dataset_names)


def _missing_data(job: Job, names: list[str], setting: str = "") -> str:
    """Return which data sets are neither here nor on a Hub that answers; `setting` is the one that names others."""
    wanted = list(dict.fromkeys(name.split("_class_set")[0].removesuffix("_sentiment") for name in names))
    lacking = {name: why for name in wanted if (why := _why_not(job, name))}
    if not lacking:
        return ""
    what = f"data set {next(iter(lacking))}" if len(lacking) == 1 else f"data sets {', '.join(lacking)}"
    return (
        f"It needs the {what}: not on this machine, and the Hub cannot be asked ({next(iter(lacking.values()))}). Run "
        "it where the Hub can be reached, or put a copy into <owner>/<name> below --data"
        + (f", or change {setting}." if setting else ".")
    )


def _why_not(job: Job, name: str) -> str:
    """Return why a data set cannot be had; empty when it can."""
    if Path(name).is_dir() or (job.how.data is not None and (job.how.data / name).is_dir()):
        return ""
    try:
        snapshot_download(name, repo_type="dataset", local_files_only=True)
        return ""
    except Exception:  # not downloaded earlier, or no name of a data set at all
        pass
    try:
        dataset_commit(name)
    except CorpusError as error:
        return first_line(error.__cause__ or error)
    return ""


def _missing_for_ravel(job: Job, model_name: str) -> str:
    if model_name not in _RAVEL_MODELS:
        known = " and ".join(_RAVEL_MODELS)
        return f"It knows only the models {known}; these SAEs are of {job.model.name}."
    if int(transformers.__version__.split(".")[0]) >= _BLOCK_OUTPUTS_CHANGED:
        return (
            f"It takes the output of a block to be a tuple; transformers {transformers.__version__} gives a tensor. It "
            "needs an environment with transformers below 5."
        )
    return _missing_data(job, ["adamkarvonen/ravel_prompts"])


def _missing_for_unlearning(job: Job, model_name: str) -> str:
    if model_name not in _UNLEARNING_SAES:
        return (
            f"It has a prompt only for {UNLEARNING_MODEL}, into which SAEs of gemma-2-2b can be put as well; these are "
            f"of {job.model.name}."
        )
    if job.how.data is None or not (job.how.data / FORGET).is_file():
        return f"It needs {FORGET}, which its authors give out on request (cais/wmdp-corpora). Put it below --data."
    if model_name != UNLEARNING_MODEL and not _has_model(f"google/{UNLEARNING_MODEL}"):
        return (
            f"It evaluates SAEs of {model_name} in google/{UNLEARNING_MODEL}: not on this machine, and the Hub cannot "
            "be asked. Run it where the Hub can be reached, or where that model has been downloaded."
        )
    return _missing_data(job, ["cais/wmdp", "cais/mmlu", "wikitext"])


def _has_model(name: str) -> bool:
    """Return whether a model of the Hub is in its cache here, or the Hub says that it has it."""
    try:
        snapshot_download(name, local_files_only=True)
    except Exception:  # not downloaded earlier
        return file_sizes(name) is not None
    return True


def _missing_for_autointerp(job: Job) -> str:
    if not os.environ.get(KEY):
        return (
            f"It needs a judge: the package calls gpt-4o-mini with the key in ${KEY}, which is not set. (Another "
            "endpoint that answers to that name can be given with $OPENAI_BASE_URL.)"
        )
    return _missing_data(job, [job.settings.get("dataset_name", "monology/pile-uncopyrighted")], "dataset_name")
