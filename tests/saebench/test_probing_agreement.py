"""Our k-sparse probing agrees with sae-probes on the same activations: the same latents, and the same scores.

sae-probes fits with scikit-learn, ours to the exact optimum, so the scores agree as far as its solver has converged. By
default SAEBench asks it for an ℓ₁ penalty, where we and the published baselines use ℓ₂.
"""

import pytest
import torch
from torch import Tensor

from benched import SKIP, sae_of_kind

pytest.importorskip("sae_probes", reason=SKIP)

from sae_probes.run_sae_evals import get_sorted_indices, mean_act_normalization
from sae_probes.utils_training import find_best_reg

from dmsae.evaluation.probing import probe, telling_latents

N_TRAIN, N_TEST, K = 512, 256, 8


def task(seed: int) -> tuple[Tensor, Tensor]:
    """Activations and labels that a few of their directions tell, with noise."""
    generator = torch.Generator().manual_seed(seed)
    x_BD = torch.randn(N_TRAIN + N_TEST, 16, generator=generator)
    y_B = (x_BD[:, 0] - x_BD[:, 3] + 0.5 * torch.randn(len(x_BD), generator=generator) > 0).long()
    return x_BD, y_B


def codes(kind: str, x_BD: Tensor) -> Tensor:
    sae = sae_of_kind(kind, x_BD)
    with torch.no_grad():
        sae.threshold[:] *= 0.5
    return sae.encode(x_BD)


@pytest.mark.parametrize("kind", ["msae", "dense", "detector"])
@pytest.mark.parametrize("normalised", [True, False])
def test_the_same_latents_are_chosen(kind: str, normalised: bool) -> None:
    x_BD, y_B = task(1)
    f_BK = codes(kind, x_BD)[:N_TRAIN]
    expected = get_sorted_indices(f_BK, y_B[:N_TRAIN], mean_act_normalization if normalised else None)
    assert telling_latents(f_BK, y_B[:N_TRAIN], K, normalised).tolist() == expected[:K].tolist()


@pytest.mark.parametrize("k", [1, 2, 5, 20])
@pytest.mark.parametrize("seed", range(3))
def test_probes_score_the_same(k: int, seed: int) -> None:
    x_BD, y_B = task(seed)
    f_BK = codes("msae", x_BD)
    f_Bk = f_BK[:, telling_latents(f_BK[:N_TRAIN], y_B[:N_TRAIN], k, True)]
    train, test = (f_Bk[:N_TRAIN], y_B[:N_TRAIN]), (f_Bk[N_TRAIN:], y_B[N_TRAIN:])
    ours = probe(*train, *test)
    theirs = find_best_reg(*(tensor.numpy() for tensor in (*train, *test)), penalty="l2", seed=42).metrics
    assert ours.auc == pytest.approx(theirs.test_auc, abs=1e-3)
    assert ours.accuracy == pytest.approx(theirs.test_acc, abs=1 / 128)
    lasso = find_best_reg(*(tensor.numpy() for tensor in (*train, *test)), penalty="l1", seed=42).metrics
    assert ours.auc == pytest.approx(lasso.test_auc, abs=0.02)


def test_the_dense_ceiling_is_the_same() -> None:
    x_BD, y_B = task(5)
    ours = probe(x_BD[:N_TRAIN], y_B[:N_TRAIN], x_BD[N_TRAIN:], y_B[N_TRAIN:])
    arrays = (tensor.numpy() for tensor in (x_BD[:N_TRAIN], y_B[:N_TRAIN], x_BD[N_TRAIN:], y_B[N_TRAIN:]))
    assert ours.auc == pytest.approx(find_best_reg(*arrays, penalty="l2", seed=42).metrics.test_auc, abs=1e-3)
