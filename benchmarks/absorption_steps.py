"""From the native absorption scores to SAEBench's: which setting makes the difference.

The package's own eval runs first, with few words, as `dmsae evaluate saebench --small` runs it. What it keeps of the
run (activations of its words, letter probes, the latents of each letter) then replaces what the native measure has, one
thing at a time.

Runs in SAEBench's environment, on SAEs of one model:

    .venv-saebench/bin/python benchmarks/absorption_steps.py SAE... [--words 1000]    # six minutes on one core
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

os.environ.setdefault("JAXTYPING_DISABLE", "1")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sae_bench.evals.absorption.common import load_experiment_df
from sae_bench.evals.absorption.k_sparse_probing import add_feature_splits_to_metrics_df
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from torch.nn.functional import normalize

from dmsae.activations.base_model import BaseModel, ModelConfig, locate
from dmsae.distillation.inspection import find_sae
from dmsae.evaluation import absorption
from dmsae.evaluation.absorption import AbsorptionConfig, AbsorptionResult
from dmsae.evaluation.evaluate import digest_of
from dmsae.evaluation.logistic import Logistic, fit, fit_each
from dmsae.evaluation.saebench.evals import settings_of
from dmsae.evaluation.saebench.job import Event, How, Job, JobModel, JobSAE, layer_of
from dmsae.evaluation.saebench.results import read_figures
from dmsae.evaluation.saebench.worker import Worker
from dmsae.evaluation.spelling import LETTERS, SpellingConfig, Words, spelled_words
from dmsae.sae.sae import SAE

CONFIG = AbsorptionConfig()
DECAY = 1e-4
"""The weight decay of the package's letter probes."""


class Row(NamedTuple):
    """The scores of one SAE after one more setting has been taken from the package."""

    sae: str
    step: str
    full: float
    fraction: float
    letters: int | None = None
    """Letters that the model represents, by these probes."""
    probe_f1: float | None = None
    """Mean over these letters."""
    bias: float | None = None
    """Of the probe, in units of the length of its direction; median of all letters."""
    whole: float | None = None
    """Median x·p of their test words, with p the probe's unit direction: absorption is measured in shares of it."""
    n_latents: float | None = None
    """Latents that a letter is split into."""


class Listener:
    """Takes what the worker says; a failure ends the script."""

    def say(self, event: Event) -> None:
        """Raise if the package could not evaluate an SAE."""
        if event.kind in ("failed", "not run", "refused"):
            raise SystemExit(event.text)


def run_package(job: Job) -> None:
    """Run the package's eval in this process. It works in a directory of its own."""
    before = Path.cwd()
    try:
        with redirect_stdout(None):
            Worker(job, Listener()).run()  # type: ignore[arg-type]  # all that it asks for is `say`
    finally:
        os.chdir(before)


def package_words(job: Job) -> Words:
    """Return the package's words as it saw them when it trained its probes, and these probes."""
    (place,) = (file.parent for file in job.cache.rglob("probe.pth"))
    data = {name: torch.from_numpy(array) for name, array in np.load(place / "data.npz").items()}
    probe = torch.load(place / "probe.pth", weights_only=False)
    probes = Logistic(probe.weights.detach().double(), probe.biases.detach().double())
    return Words(data["X_train"], data["y_train"], data["X_test"], data["y_test"], [], probes)


def package_latents(job: Job, sae: JobSAE) -> dict[str, list[int]]:
    """Return the latents that the package found for each letter."""
    (file,) = (job.cache / job.eval / "saes" / job.key(sae)[:16]).rglob("*_metrics.parquet")
    metrics = load_experiment_df("k_sparse_probing", file)
    add_feature_splits_to_metrics_df(metrics, max_k_value=CONFIG.max_k, f1_jump_threshold=CONFIG.f1_jump)
    return dict(zip(metrics["letter"], metrics["split_feats"], strict=True))


def scored(sae: SAE, words: Words, latents: dict[str, list[int]] | None = None) -> AbsorptionResult:
    """Return the native scores, with the latents that stand for each letter if they are known."""
    if latents is None:
        return absorption.score_words(sae, words, CONFIG)

    def known(
        _train_f: Tensor,
        _train_letters: Tensor,
        _test_f: Tensor,
        _test_letters: Tensor,
        letters: list[int],
        _config: AbsorptionConfig,
    ) -> list[list[int]]:
        return [latents[LETTERS[letter]] for letter in letters]

    with patch.object(absorption, "letter_latents", known):
        return absorption.score_words(sae, words, CONFIG)


def whole(words: Words, letters: list[int]) -> float:
    """Return the median x·p of the letters' test words, of the letter in the middle."""
    p_VD = normalize(words.probes.w, dim=1)
    of_letter = [words.test_x[words.test_letters == letter].double() @ p_VD[letter] for letter in letters]
    return float(torch.stack([x_B.median() for x_B in of_letter]).median())


def optimum(theirs: Words, free_bias: bool) -> Words:
    """Return the package's words with probes at the optimum of the loss by which it trains its own.

    Its weight decay includes the bias. A free one is not penalised, as usual.
    """
    w_VD, b_V = torch.zeros_like(theirs.probes.w), torch.zeros_like(theirs.probes.b)
    x_BD = theirs.train_x.double()
    ones_B1 = x_BD.new_ones(len(x_BD), 1)
    for letter in range(len(LETTERS)):
        is_letter_B = theirs.train_letters == letter
        # Its loss is a mean over words, in which those of the letter weigh as much as all others.
        c = 2 * float((~is_letter_B).double().mean()) / (DECAY * len(x_BD))
        if free_bias:
            w_VD[letter], b_V[letter] = fit(x_BD, is_letter_B, c, balanced=True)
        else:
            with_bias = LogisticRegression(C=c, class_weight="balanced", fit_intercept=False, tol=1e-5, max_iter=3000)
            both = torch.from_numpy(with_bias.fit(torch.cat([x_BD, ones_B1], 1), is_letter_B).coef_[0])
            w_VD[letter], b_V[letter] = both[:-1], both[-1]
    return theirs._replace(probes=Logistic(w_VD, b_V))


def word_steps(model: BaseModel, theirs: Words, cache: Path) -> Iterator[tuple[str, Words]]:
    """Yield words and probes: those of the native measure, then more and more of the package's."""
    ten = SpellingConfig(n_examples=10)
    yield "native", spelled_words(model, CONFIG.spelling, cache)
    yield "ten examples", spelled_words(model, ten, cache)
    yield "a BOS token", spelled_words(model.reading(prepend_bos=True), ten, cache)
    is_letter_VB = torch.arange(len(LETTERS))[:, None] == theirs.train_letters
    yield "its words", theirs._replace(probes=fit_each(theirs.train_x, is_letter_VB, CONFIG.spelling.probe_c))
    yield "the optimum of its loss, but for a free bias", optimum(theirs, free_bias=True)
    yield "the optimum of its loss", optimum(theirs, free_bias=False)
    yield "its probes", theirs


def steps(saes: dict[str, SAE], job: Job, model: BaseModel) -> list[Row]:
    """Return the rows of all SAEs, step by step."""
    rows = []

    def add(name: str, step: str, words: Words, latents: dict[str, list[int]] | None = None) -> None:
        found = scored(saes[name], words, latents)
        letters = [LETTERS.index(letter.letter) for letter in found.letters]
        f1 = sum(letter.probe_f1 for letter in found.letters) / max(found.n_letters, 1)
        scores = found.full or 0.0, found.fraction or 0.0
        bias = float((words.probes.b / words.probes.w.norm(dim=1)).median())
        rows.append(Row(name, step, *scores, found.n_letters, f1, bias, whole(words, letters), found.n_latents))

    theirs = package_words(job)
    for step, words in word_steps(model, theirs, job.cache):
        for name in saes:
            add(name, step, words)
    for entry in job.saes:
        add(entry.name, "its latents", theirs, package_latents(job, entry))
        figures = read_figures(job, entry)
        rows.append(Row(entry.name, "new prompts: the package", figures["full"], figures["fraction"]))
    return sorted(rows, key=lambda row: list(saes).index(row.sae))


def place_of(words: Words) -> dict[str, float]:
    """Return how far activations lie from 0, and from their mean."""
    x_BD, mean_D = words.train_x, words.train_x.mean(0)
    return {"mean_norm": float(mean_D.norm()), "deviation": float((x_BD - mean_D).square().sum(1).mean().sqrt())}


def show(rows: list[Row], activations: dict[str, float]) -> None:
    """Print the rows as a table, and all as one line of JSON."""
    table = Table("SAE", "from the package", "full", "fraction", "letters", "F1", "bias", "x·p", "latents of a letter")
    for row in rows:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value or "") for value in row))
    Console(width=140).print(table)
    print(json.dumps({"activations": activations, "rows": [row._asdict() for row in rows]}))


def main() -> None:
    """Print the table, and one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("saes", type=Path, nargs="+", help="directories of SAEs")
    parser.add_argument("--words", type=int, default=1000, help="how many words the package uses")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {place.name: find_sae(place) for place in arguments.saes}
    facts = next(iter(found.values())).made_from["model"]
    where = ModelConfig(facts["name"], facts["revision"], facts["hook"], device="cpu")
    model = JobModel(facts["name"], locate(where)[0].absolute(), facts["weights_sha256"], layer_of(facts["hook"]))
    entries = tuple(JobSAE(name, one.directory.absolute(), digest_of(one.sae)) for name, one in found.items())
    settings = settings_of(["absorption"], small=True, changes={"absorption": {"words": arguments.words}})["absorption"]
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        job = Job("absorption", entries, model, settings, place, place / "cache", How(device="cpu"))
        run_package(job)
        rows = steps({name: one.sae for name, one in found.items()}, job, BaseModel.load(where))
        show(rows, place_of(package_words(job)))


if __name__ == "__main__":
    main()
