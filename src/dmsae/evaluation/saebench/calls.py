"""How each eval of the package is called: its config, and an explicit place for everything it keeps.

Runs in SAEBench's environment. Left alone, the package keeps probes inside its own installation or in the current
directory, under the names of model and layer only. Here every place is keyed by what made it.
"""

import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from dmsae.config import Json
from dmsae.disk.files import canonical_hash
from dmsae.errors import BenchmarkError
from dmsae.evaluation.saebench import needs
from dmsae.evaluation.saebench.adapter import Adapter
from dmsae.evaluation.saebench.evals import WORDS
from dmsae.evaluation.saebench.job import Job
from dmsae.evaluation.saebench.true_variance import watching_variance
from dmsae.evaluation.saebench.words import one_token_words, sample_words


class Call(NamedTuple):
    """One SAE to be put through the eval of a job."""

    job: Job
    name: str
    """The SAE's."""
    adapter: Adapter
    model_name: str
    """The model's, as TransformerLens knows it."""
    scratch: Path
    """Where the package puts the result."""
    own: Path
    """What this call keeps; it is there again when the call is repeated."""

    @property
    def saes(self) -> list[tuple[str, Adapter]]:
        """The SAE as the package wants to be given it."""
        return [(self.name, self.adapter)]

    @property
    def device(self) -> str:
        """Where the model and the SAE run."""
        return str(self.adapter.device)

    def shared(self, *names: str) -> Path:
        """Return a place for what does not depend on the SAE, keyed by settings of the eval on which it does."""
        settings = [self.job.settings.get(name) for name in names]
        key = canonical_hash([settings, self.job.how.seed, self.job.how.dtype, self.job.versions])[:12]
        return self.job.cache / self.job.eval / key

    def config(self, make: Callable[..., Any], **fixed: Any) -> Any:
        """Return the eval's config: the settings of the job that are the package's, and what follows from the job."""
        theirs = {name: value for name, value in self.job.settings.items() if name != WORDS}
        return make(model_name=self.model_name, random_seed=self.job.how.seed, **theirs, **fixed)


def seed_everything(seed: int) -> None:
    """Seed every generator that the package draws from; several of its evals seed none."""
    random.seed(seed)
    np.random.seed(seed)  # the package draws from the global one
    torch.manual_seed(seed)


def run_core(call: Call) -> Json:
    """Run `core`, and return the true fraction of variance explained on the same tokens beside its inflated one."""
    from sae_bench.evals.core import main

    settings = {"verbose": True, "dtype": call.job.how.dtype, "device": call.device, **call.job.settings}
    with watching_variance(main, call.adapter) as explained, _logged_errors(main.logger) as errors:
        main.multiple_evals(call.saes, output_folder=str(call.scratch), force_rerun=True, **settings)
    if errors:
        raise BenchmarkError(errors[-1])
    return {"FVE": explained.fractions()[0]}


def run_absorption(call: Call) -> Json:
    """Run `absorption` on words that are one token, with probes that are trained once for all SAEs."""
    from sae_bench.evals.absorption import common, feature_absorption, main
    from sae_bench.evals.absorption.eval_config import AbsorptionEvalConfig
    from sae_bench.evals.absorption.vocab import get_alpha_tokens

    config = call.config(AbsorptionEvalConfig, llm_dtype=call.job.how.dtype)
    n_words = call.job.settings.get(WORDS)

    def vocabulary(tokenizer: Any, *_: Any, **__: Any) -> list[str]:
        return sample_words(one_token_words(get_alpha_tokens(tokenizer), tokenizer), n_words, call.job.how.seed)

    def seeded(function: Callable[..., Any], **places: Path) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            seed_everything(call.job.how.seed)  # whatever was found finished before
            return function(*args, **kwargs, **places)

        return run

    probes = call.shared(WORDS, "prompt_template", "prompt_token_pos") / "probes"
    sparse, absorbed = call.own / "k_sparse_probing", call.own / "feature_absorption"
    k_sparse = seeded(main.run_k_sparse_probing_experiment, experiment_dir=sparse, probes_dir=probes)
    absorbing = seeded(
        main.run_feature_absortion_experiment,
        experiment_dir=absorbed,
        sparse_probing_experiment_dir=sparse,
        probes_dir=probes,
    )
    with (
        patch.object(common, "get_alpha_tokens", vocabulary),
        patch.object(feature_absorption, "get_alpha_tokens", vocabulary),
        patch.object(main, "run_k_sparse_probing_experiment", k_sparse),
        patch.object(main, "run_feature_absortion_experiment", absorbing),
    ):
        _train_probes(call, config, probes)
        main.run_eval(config, call.saes, call.device, str(call.scratch))
    if not any(call.scratch.iterdir()):
        raise BenchmarkError(
            f"Fewer than {config.min_feats_for_eval} letters have a probe with F1 above {config.min_GT_probe_f1} in "
            "this model: absorption cannot be measured. Raise absorption.words, or lower absorption.min_feats_for_eval."
        )
    return {}


def _train_probes(call: Call, config: Any, probes: Path) -> None:
    """Train the first-letter probes unless they are there: all of them, or none."""
    from sae_bench.evals.absorption import common
    from transformer_lens import HookedTransformer

    if probes.is_dir():
        return
    unfinished = probes.with_name("unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    seed_everything(call.job.how.seed)
    dtype = getattr(torch, call.job.how.dtype)
    model = HookedTransformer.from_pretrained_no_processing(call.model_name, device=call.device, dtype=dtype)
    common.train_and_save_probes(
        model,
        layers=[call.job.model.layer],
        base_template=config.prompt_template,
        pos_idx=config.prompt_token_pos,
        probes_dir=unfinished,
        device=call.device,
    )
    unfinished.rename(probes)


def run_sae_probes(call: Call) -> Json:
    """Run `sparse_probing_sae_probes`; activations and probes of the model are shared by all SAEs."""
    from sae_bench.evals.sparse_probing_sae_probes import main
    from sae_bench.evals.sparse_probing_sae_probes.eval_config import SparseProbingSaeProbesEvalConfig

    activations, baselines = call.shared() / "activations", call.shared() / "baselines"
    _remove_broken(activations)
    baselines.mkdir(parents=True, exist_ok=True)
    call.own.mkdir(parents=True, exist_ok=True)
    link = call.own / f"baseline_results_{call.model_name}"
    if not link.is_symlink():
        link.symlink_to(baselines, target_is_directory=True)
    config = call.config(
        SparseProbingSaeProbesEvalConfig, results_path=str(call.own), model_cache_path=str(activations)
    )
    main.run_eval(config, call.saes, call.device, str(call.scratch))
    return {}


def run_sparse_probing(call: Call) -> Json:
    """Run `sparse_probing` on data sets of the Hub."""
    from sae_bench.evals.sparse_probing import main
    from sae_bench.evals.sparse_probing.eval_config import SparseProbingEvalConfig

    config = call.config(SparseProbingEvalConfig, llm_dtype=call.job.how.dtype)
    main.run_eval(config, call.saes, call.device, str(call.scratch), True, **_activations(call))
    return {}


def run_scr_or_tpp(call: Call) -> Json:
    """Run `scr` or `tpp`, whichever the job asks for."""
    from sae_bench.evals.scr_and_tpp import main
    from sae_bench.evals.scr_and_tpp.eval_config import ScrAndTppEvalConfig

    scr = call.job.eval == "scr"
    config = call.config(ScrAndTppEvalConfig, llm_dtype=call.job.how.dtype, perform_scr=scr)
    main.run_eval(config, call.saes, call.device, str(call.scratch), True, **_activations(call))
    return {}


def run_ravel(call: Call) -> Json:
    """Run `ravel`."""
    from sae_bench.evals.ravel import main
    from sae_bench.evals.ravel.eval_config import RAVELEvalConfig

    place = call.shared(*call.job.settings)
    config = call.config(RAVELEvalConfig, llm_dtype=call.job.how.dtype, artifact_dir=str(place))
    main.run_eval(config, call.saes, call.device, str(call.scratch), True, artifacts_path=str(place))
    return {}


def run_unlearning(call: Call) -> Json:
    """Run `unlearning` in the instruct model; its corpus is looked for below the current directory."""
    from sae_bench.evals.unlearning import main
    from sae_bench.evals.unlearning.eval_config import UnlearningEvalConfig

    corpus = Path.cwd() / "sae_bench" / "evals" / "unlearning" / "data" / needs.FORGET
    corpus.parent.mkdir(parents=True, exist_ok=True)
    if not corpus.exists() and call.job.how.data is not None:
        corpus.symlink_to(call.job.how.data / needs.FORGET)
    instructed = call._replace(model_name=needs.UNLEARNING_MODEL)
    config = instructed.config(UnlearningEvalConfig, llm_dtype=call.job.how.dtype)
    main.run_eval(config, call.saes, call.device, str(call.scratch), artifacts_path=str(call.own))
    return {}


def run_autointerp(call: Call) -> Json:
    """Run `autointerp` with the judge that the package calls."""
    from sae_bench.evals.autointerp import main
    from sae_bench.evals.autointerp.eval_config import AutoInterpEvalConfig

    config = call.config(AutoInterpEvalConfig, llm_dtype=call.job.how.dtype)
    place, key = call.shared("dataset_name"), os.environ[needs.KEY]
    place.mkdir(parents=True, exist_ok=True)
    main.run_eval(config, call.saes, call.device, key, str(call.scratch), True, artifacts_path=str(place))
    return {}


def run_meta_structure(call: Call) -> Json:
    """Run `meta_structure`, which needs nothing but the decoder."""
    from sae_bench.evals.meta_structure import main
    from sae_bench.evals.meta_structure.eval_config import MetaStructureEvalConfig

    config = MetaStructureEvalConfig(**{"random_seed": call.job.how.seed, **call.job.settings})
    main.run_eval(config, call.saes, call.device, str(call.scratch))
    return {}


CALLS: dict[str, Callable[[Call], Json]] = {
    "core": run_core,
    "absorption": run_absorption,
    "sparse_probing": run_sparse_probing,
    "sparse_probing_sae_probes": run_sae_probes,
    "scr": run_scr_or_tpp,
    "tpp": run_scr_or_tpp,
    "ravel": run_ravel,
    "unlearning": run_unlearning,
    "autointerp": run_autointerp,
    "meta_structure": run_meta_structure,
}
"""Each returns figures of our own to stand beside those of the package."""
BELOW_HOOK = ("absorption", "sparse_probing_sae_probes")
"""Evals that read nothing of the model above the hook, and would run it to the end all the same."""


def _activations(call: Call) -> Json:
    """Return where activations of the Hub's data sets go; they are large, and saved only if they are used again."""
    return {"artifacts_path": str(call.job.activations()), "save_activations": len(call.job.saes) > 1}


def _remove_broken(directory: Path) -> None:
    """Remove files that a killed run left half written: the package only looks whether they are there."""
    for file in directory.rglob("*.pt"):
        try:
            torch.load(file, weights_only=True, mmap=True)
        except Exception:  # whatever a torn file makes torch raise
            file.unlink()


@contextmanager
def _logged_errors(logger: logging.Logger) -> Iterator[list[str]]:
    """Collect what a logger reports as an error: this eval catches all errors, and goes on."""
    errors: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            errors.append(record.getMessage())

    handler = Collector(logging.ERROR)
    logger.addHandler(handler)
    try:
        yield errors
    finally:
        logger.removeHandler(handler)
