"""SynthSAEBench with the package's own model and scores, at a size that trains in seconds."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benched import SKIP

pytest.importorskip("sae_lens.synthetic", reason=SKIP)

from dmsae.evaluation.saebench.synth import Synth, SynthConfig, SynthJob
from dmsae.evaluation.saebench.synth_worker import Benchmark
from dmsae.sae.sae import SAE

TINY = SynthConfig(
    n_features=256,
    d_model=96,
    width=128,
    samples=120_000,
    batch_size=512,
    lr=3e-3,
    n_core=3,
    eval_samples=8192,
)


class Silent:
    def say(self, _: Any) -> None:
        pass

    def now_and_then(self, _: str) -> None:
        pass


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SynthJob:
    place = tmp_path_factory.mktemp("synth")
    return SynthJob(TINY, place / "out", place / "cache")


@pytest.fixture(scope="module")
def benchmark(job: SynthJob) -> Benchmark:
    return Benchmark(job, Silent())  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def synth(benchmark: Benchmark) -> Synth:
    return benchmark.run()


def test_samples_depend_on_their_place_and_the_seed_alone(benchmark: Benchmark) -> None:
    first, again = benchmark.source.block(3, 0, 7), benchmark.source.block(3, 0, 7)
    other = benchmark.source.block(4, 0, 7)
    assert first is not None
    assert again is not None
    assert other is not None
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert benchmark.source.block(3, 1, 7) is None


def test_a_model_that_was_kept_is_the_one_that_was_built(benchmark: Benchmark, job: SynthJob) -> None:
    kept = Benchmark(job, Silent())  # type: ignore[arg-type]
    torch.testing.assert_close(kept.model.feature_dict.feature_vectors, benchmark.model.feature_dict.feature_vectors)
    torch.testing.assert_close(kept.source.sample(64, 1), benchmark.source.sample(64, 1))
    assert kept.k == benchmark.k


def test_trained_saes_find_features_that_an_untrained_one_does_not(synth: Synth) -> None:
    by_name = {score.name: score for score in synth.scores}
    assert set(by_name) == {"msae", "batchtopk", "detector-core", "random-detectors", "dense-core", "untrained"}
    for name in ("msae", "batchtopk", "detector-core"):
        assert by_name[name].f1 > by_name["untrained"].f1 + 0.2
        assert by_name[name].mcc > by_name["untrained"].mcc + 0.2
    assert by_name["untrained"].l0 == pytest.approx(by_name["msae"].l0, rel=0.1)


def test_the_budget_is_for_all_latents(synth: Synth) -> None:
    for score in synth.scores:
        assert score.l0 == pytest.approx(synth.k, abs=1.2)


def test_detectors_are_frozen_latents_of_the_first_sae(synth: Synth, job: SynthJob, benchmark: Benchmark) -> None:
    x_BD = benchmark.source.sample(512, 5)
    msae, carrier = (
        SAE.load(job.out / stage / name) for stage, name in (("baselines", "msae"), ("cores", "detector-core"))
    )
    f_BK, f_BC = msae.encode(x_BD), carrier.encode(x_BD)[:, : TINY.n_core]
    for latent in f_BC.T:
        assert float((f_BK - latent[:, None]).abs().amax(0).min()) < 1e-3


def test_the_core_alone_is_scored(synth: Synth) -> None:
    by_name = {score.name: score for score in synth.scores}
    assert by_name["batchtopk"].f1_core is None
    before, after, random = (by_name[name].f1_core for name in ("msae", "detector-core", "random-detectors"))
    assert before is not None
    assert after is not None
    assert random is not None
    assert after > random


def test_scores_survive_their_file(synth: Synth, tmp_path: Path) -> None:
    synth.save(tmp_path / "synth.json")
    assert Synth.load(tmp_path / "synth.json") == synth
