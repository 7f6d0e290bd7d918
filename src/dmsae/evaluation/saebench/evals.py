"""The evals of SAEBench 0.6.0: their names, their headline figures and their settings.

A setting has the name and the meaning that the package gives it. What is not listed has the package's own default; what
is listed under `published` are the values of its published results that are no defaults (Karvonen et al., 2025,
arXiv:2503.09532). `small` is for a machine without a GPU: less of everything, so its figures are no published ones.

Two settings are ours. `absorption.words` limits the vocabulary; `core.dataset = "heldout"` is the held-out text of the
store.
"""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dmsae.config import Json
from dmsae.errors import ConfigError, nearest
from dmsae.evaluation.beside import Better

HELDOUT = "heldout"
"""As `core.dataset`: the held-out text of the store that the SAEs were trained on."""
WORDS = "words"
"""The setting of the absorption eval that limits its vocabulary; None: all words."""
Settings = dict[str, dict[str, Any]]
"""The settings of each eval, by name."""


class Figure(NamedTuple):
    """A headline figure."""

    place: str = ""
    """Where the number stands in `eval_result_metrics`; empty for one of ours, which the record holds."""
    ceiling: float | str | None = None
    """What a perfect SAE gets: a number, or the name of the figure that says so. None: nothing is perfect."""
    better: Better = ""
    """Which way is better where there is no ceiling."""


class Eval(NamedTuple):
    """One eval of the package."""

    about: str
    figures: dict[str, Figure]
    """Headline figures by a short name."""
    published: Json
    small: Json


_DENSE = "all dimensions"
"""What a probe on the activations themselves gets: the ceiling of probes on a few latents."""
_SMALL_TABLES = [
    "5_hist_fig_ismale",
    "87_glue_cola",
    "92_glue_sst2",
    "96_spam_is",
    "105_click_bait",
    "139_news_class_Politics",
]
"""Short texts, from tables that the bundled corpus keeps out of training."""

EVALS: dict[str, Eval] = {
    "core": Eval(
        "loss recovered, sparsity and reconstruction on running text",
        {
            "L0": Figure("sparsity.l0"),
            "loss recovered": Figure("model_performance_preservation.ce_loss_score", ceiling=1.0),
            "KL score": Figure("model_behavior_preservation.kl_div_score", ceiling=1.0),
            "FVE (theirs)": Figure("reconstruction_quality.explained_variance", ceiling=1.0),
            "cosine": Figure("reconstruction_quality.cossim", ceiling=1.0),
            "FVE": Figure(ceiling=1.0),
        },
        {
            "n_eval_reconstruction_batches": 200,
            "n_eval_sparsity_variance_batches": 2000,
            "eval_batch_size_prompts": 16,
            "context_size": 128,
            "dataset": "Skylion007/openwebtext",
            "exclude_special_tokens_from_reconstruction": True,
            "compute_featurewise_density_statistics": True,
            "compute_featurewise_weight_based_metrics": True,
        },
        {"n_eval_reconstruction_batches": 10, "n_eval_sparsity_variance_batches": 20, "dataset": HELDOUT},
    ),
    "absorption": Eval(
        "first-letter features that other latents take over; meant for models of 1B parameters and more",
        {
            "fraction": Figure("mean.mean_absorption_fraction_score", ceiling=0.0),
            "full": Figure("mean.mean_full_absorption_score", ceiling=0.0),
        },
        {WORDS: None, "llm_batch_size": 32},
        {WORDS: 2500, "llm_batch_size": 32, "precalc_k_sparse_probe_sae_acts": True, "min_feats_for_eval": 10},
    ),
    "sparse_probing": Eval(
        "probes on the k best latents, on data sets of the Hub",
        {
            "top 1": Figure("sae.sae_top_1_test_accuracy", ceiling=_DENSE),
            "top 5": Figure("sae.sae_top_5_test_accuracy", ceiling=_DENSE),
            _DENSE: Figure("llm.llm_test_accuracy"),
        },
        {"llm_batch_size": 32},
        {"llm_batch_size": 16, "probe_train_set_size": 1000, "probe_test_set_size": 400, "sae_batch_size": 16},
    ),
    "sparse_probing_sae_probes": Eval(
        "probes on the k best latents, on the tables of sae-probes",
        {
            "top 1": Figure("sae.sae_top_1_test_accuracy", ceiling=_DENSE),
            "top 5": Figure("sae.sae_top_5_test_accuracy", ceiling=_DENSE),
            "AUC, top 1": Figure("sae.sae_top_1_test_auc", ceiling=f"AUC, {_DENSE}"),
            _DENSE: Figure("llm.llm_test_accuracy"),
            f"AUC, {_DENSE}": Figure("llm.llm_test_auc"),
        },
        {},
        {"dataset_names": _SMALL_TABLES},
    ),
    "scr": Eval(
        "removing a spurious correlation by ablating latents; unreliable by the benchmark's own audit",
        {"SCR, 20 latents": Figure("scr_metrics.scr_metric_threshold_20", ceiling=1.0)},
        {"llm_batch_size": 32},
        {"llm_batch_size": 16, "train_set_size": 1000, "test_set_size": 400, "sae_batch_size": 16},
    ),
    "tpp": Eval(
        "perturbing one probe and no other by ablating latents; unreliable by the benchmark's own audit",
        {"TPP, 20 latents": Figure("tpp_metrics.tpp_threshold_20_total_metric", better="higher")},
        {"llm_batch_size": 32},
        {"llm_batch_size": 16, "train_set_size": 1000, "test_set_size": 400, "sae_batch_size": 16},
    ),
    "ravel": Eval(
        "changing one attribute of an entity and no other",
        {"disentanglement": Figure("ravel.disentanglement_score", ceiling=1.0)},
        {"llm_batch_size": 8},
        {"llm_batch_size": 4},
    ),
    "unlearning": Eval(
        "forgetting biology and nothing else, by clamping latents",
        {"score": Figure("unlearning.unlearning_score", better="higher")},
        {"llm_batch_size": 4},
        {"llm_batch_size": 1},
    ),
    "autointerp": Eval(
        "how well a language model's explanation of a latent predicts where it fires",
        {"score": Figure("autointerp.autointerp_score", ceiling=1.0)},
        {"llm_batch_size": 32},
        {"llm_batch_size": 16, "n_latents": 100, "total_tokens": 100_000},
    ),
    "meta_structure": Eval(
        "how much of the decoder a smaller SAE trained on it explains: redundancy",
        {"decoder FVE": Figure("meta_structure.decoder_fraction_variance_explained", better="lower")},
        {},
        {},
    ),
}


def require_evals(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of evals in the order in which they run; an unknown one is an error."""
    names = tuple(names)
    for name in names:
        if name not in EVALS:
            raise ConfigError(f"Unknown eval {name!r}. {nearest(name, EVALS)}")
    if not names:
        raise ConfigError(f"No evals were given. Known: {', '.join(EVALS)}.")
    return tuple(name for name in EVALS if name in names)


def settings_of(evals: Iterable[str], small: bool, changes: Mapping[str, Mapping[str, Any]] | None = None) -> Settings:
    """Return the settings of evals: the published ones, or those for small machines, with some of them changed."""
    changes = changes or {}
    for name, section in changes.items():
        if name not in EVALS:
            raise ConfigError(f"Settings for an unknown eval: [{name}]. {nearest(name, EVALS)}")
        if not isinstance(section, Mapping):
            raise ConfigError(f"{name} = {section!r}; it must be a table of settings: [{name}].")
    chosen = {}
    for name in require_evals(evals):
        base = EVALS[name].published | (EVALS[name].small if small else {})
        chosen[name] = base | dict(changes.get(name, {}))
    return chosen


def read_changes(path: Path) -> Settings:
    """Return the changes in a TOML file: a table for each eval, with the package's names of settings."""
    try:
        return tomllib.loads(path.read_text(encoding="utf8"))
    except FileNotFoundError:
        raise ConfigError(f"There is no settings file {path}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error
