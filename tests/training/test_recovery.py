"""The whole engine on a problem with a known answer."""

from collections.abc import Iterator

import pytest

from dmsae.sae.sae import SAE, load_sae
from dmsae.training.learner import Member
from zipf import Zipf, one_thread, small_sae, trainer


@pytest.fixture(scope="module")
def source() -> Zipf:
    return Zipf(d_model=64, n_directions=48, n_rows=20_000)


@pytest.fixture(scope="module")
def trained(source: Zipf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SAE]:
    """64 latents in groups of 8, 16 and 40, four of them active per token, trained for 600 steps.

    Planted are 48 random directions in 64 dimensions; the most frequent one is active on half of the tokens, the
    rarest on one in 44, and 3.2 of them on the average token.
    """
    config = small_sae(d_model=64, width=64, k=4, prefixes=(8, 24, 64))
    with one_thread():
        directory = tmp_path_factory.mktemp("planted") / "run"
        run = trainer(directory, Member("sae", config), source=source, tokens=600 * 256, batch_size=256, lr=1e-2)
        (outcome,) = run.run()
        yield load_sae(outcome.directory)


def test_planted_directions_are_recovered(source: Zipf, trained: SAE) -> None:
    cosines = source.directions @ trained.W_dec.detach().T
    assert cosines.max(1).values.mean() >= 0.9


def test_the_first_prefix_holds_the_frequent_directions(source: Zipf, trained: SAE) -> None:
    matched = (source.directions @ trained.W_dec.detach().T).argmax(0)
    frequency = source.frequency[matched]
    assert frequency[:8].mean() > 2 * frequency[8:].mean()


def test_thresholds_keep_k_latents_on_unseen_activations(source: Zipf, trained: SAE) -> None:
    x = source.rows(5000, seed=99)
    l0 = (trained.encode(x) > 0).sum(1).float().mean()
    assert l0.item() == pytest.approx(4, rel=0.05)
    error = (x - trained(x)).square().sum(1).mean()
    variance = (x - x.mean(0)).square().sum(1).mean()
    assert 1 - error / variance > 0.9
