"""Our absorption agrees with the package's, word by word, when both are given the same probe and the same latents."""

from typing import Any

import pytest
import torch
from torch import Tensor

from benched import SKIP, sae_of_kind

pytest.importorskip("sae_bench", reason=SKIP)

from sae_bench.evals.absorption.feature_absorption_calculator import FeatureAbsorptionCalculator
from sae_bench.evals.absorption.probing import train_multi_probe

from dmsae.evaluation import logistic
from dmsae.evaluation.absorption import score_letter
from dmsae.evaluation.saebench.adapter import Adapter

HOOK = "blocks.0.hook_resid_post"
N_WORDS = 400


class Model:
    """Stands in for the model: gives each prompt's word its activation, whatever the prompt says."""

    def __init__(self, x_BD: Tensor, words: list[str]) -> None:
        self._x = dict(zip(words, x_BD, strict=True))

    def run_with_cache(self, prompts: list[str], names_filter: list[str]) -> tuple[None, dict[str, Tensor]]:
        words = [prompt.rpartition("\n")[2].split()[0] for prompt in prompts]
        x_BD = torch.stack([self._x[word] for word in words])
        return None, {name: x_BD[:, None].expand(-1, 8, -1) for name in names_filter}

    def to_tokens(self, _: str) -> list[list[int]]:
        return [[0] * 8]


def theirs(adapter: Adapter, x_BD: Tensor, direction_D: Tensor, latents: list[int]) -> tuple[Tensor, Tensor]:
    """Full absorption and absorption fraction of each word, as the package computes them."""
    words = [f"word{i}" for i in range(len(x_BD))]
    model: Any = Model(x_BD, words)
    calculator = FeatureAbsorptionCalculator(
        model, words, max_icl_examples=2, base_template="{word} has", batch_size=50
    )
    results = calculator.calculate_absorption(adapter, words, direction_D, latents, layer=0, show_progress=False)
    full = torch.tensor([word.is_full_absorption for word in results.word_results])
    return full, torch.tensor([float(word.absorption_fraction) for word in results.word_results])


@pytest.mark.parametrize("kind", ["msae", "dense", "detector"])
@pytest.mark.parametrize("latents", [[3], [3, 11], [40, 1, 2]], ids=str)
def test_every_word_gets_the_same_scores(kind: str, latents: list[int]) -> None:
    generator = torch.Generator().manual_seed(len(kind) + latents[0])
    x_BD = torch.randn(N_WORDS, 16, generator=generator) * 2 + 1
    sae = sae_of_kind(kind, x_BD)
    with torch.no_grad():
        sae.threshold[:] *= 0.3
    # A probe along a mixture of some decoder rows, so that all cases occur.
    direction_D = sae.W_dec[[latents[0], 5, 17, 30]].sum(0) + 0.2 * torch.randn(16, generator=generator)
    f_BK, unit_D = sae.encode(x_BD), direction_D / direction_D.norm()
    ours = score_letter(f_BK.double(), x_BD.double() @ unit_D.double(), sae.W_dec.double() @ unit_D.double(), latents)
    full, fraction = theirs(Adapter(sae, "none", 0, torch.device("cpu")), x_BD, direction_D, latents)
    assert 0 < full.float().mean() < 0.5
    assert 0 < (fraction > 0).float().mean() < 1
    assert torch.equal(ours.full, full)
    torch.testing.assert_close(ours.fraction, fraction.double(), rtol=1e-4, atol=1e-5)


def test_its_probes_are_the_native_ones_where_activations_lie_around_0_and_not_far_from_it() -> None:
    """Its weight decay holds the bias, and Adam moves it slowly: the direction stands in, which leaves little x·p."""
    generator = torch.Generator().manual_seed(0)
    centred_BD = torch.randn(N_WORDS, 16, generator=generator)
    y_B = (centred_BD[:, 0] + 1.5 * torch.randn(N_WORDS, generator=generator) > 1).long()
    best_D = logistic.fit(centred_BD, y_B, 1e6, balanced=True).w

    def trained(x_BD: Tensor) -> Tensor:
        torch.manual_seed(0)
        settings: Any = {"lr": 1e-2, "weight_decay": 1e-4, "batch_size": 64, "device": torch.device("cpu")}
        probe = train_multi_probe(x_BD, y_B[:, None], num_epochs=200, show_progress=False, **settings)
        weights: Tensor = probe.weights.detach().double()
        return weights[0]

    def whole(x_BD: Tensor, w_D: Tensor) -> float:
        return float((x_BD[y_B == 1].double() @ (w_D / w_D.norm())).mean())

    assert torch.cosine_similarity(trained(centred_BD), best_D, dim=0) > 0.99
    far_BD = centred_BD + 8
    far = logistic.fit(far_BD, y_B, 1e6, balanced=True).w
    torch.testing.assert_close(far, best_D, rtol=1e-3, atol=1e-3)
    assert whole(far_BD, trained(far_BD)) < 0.5 * whole(far_BD, best_D)
