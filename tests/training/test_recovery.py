"""The whole engine on a problem with a known answer."""

from collections.abc import Iterator

import pytest
import torch

from dmsae.sae.sae import SAE
from dmsae.training.learner import SAESpec
from zipf import Zipf, small_sae, trainer


@pytest.fixture(scope="module")
def source() -> Zipf:
    return Zipf(d_model=64, n_directions=48, n_rows=20_000)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Run torch on one thread: several would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trained(source: Zipf, tmp_path_factory: pytest.TempPathFactory) -> SAE:
    """64 latents in groups of 8, 16 and 40, four of them active per token, trained for 600 steps.

    Planted are 48 random directions in 64 dimensions. The most frequent one is active on half of the tokens, the
    rarest on one in 44; on average, 3.2 of them are active on a token.
    """
    spec = SAESpec("sae", small_sae(d_model=64, width=64, k=4, prefixes=(8, 24, 64)))
    directory = tmp_path_factory.mktemp("planted") / "run"
    run = trainer(directory, spec, source=source, tokens=600 * 256, batch_size=256, lr=1e-2)
    (result,) = run.run()
    return SAE.load(result.directory)


def test_planted_directions_are_recovered(source: Zipf, trained: SAE) -> None:
    cosines = source.directions @ trained.W_dec.T
    assert cosines.max(1).values.mean() >= 0.9


def test_the_first_prefix_holds_the_frequent_directions(source: Zipf, trained: SAE) -> None:
    matched = (source.directions @ trained.W_dec.T).argmax(0)
    frequency = source.frequency[matched]
    assert frequency[:8].mean() > 2 * frequency[8:].mean()


def test_thresholds_keep_k_latents_on_unseen_activations(source: Zipf, trained: SAE) -> None:
    x = source.rows(5000, seed=99)
    l0 = (trained.encode(x) > 0).sum(1).float().mean()
    assert l0.item() == pytest.approx(4, rel=0.05)
    error = (x - trained(x)).square().sum(1).mean()
    variance = (x - x.mean(0)).square().sum(1).mean()
    assert 1 - error / variance > 0.9
