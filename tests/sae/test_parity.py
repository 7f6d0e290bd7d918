"""Our learner against `dictionary-learning` 0.1.0 from PyPI: same start, same batches, same losses, same weights.

Parity covers what the published Matryoshka baselines were trained with: the encoder, BatchTopK, the 1/G² weighting of
prefixes, the dead window and the auxiliary loss, the projection of decoder gradients, clipping, Adam and its decay,
renormalisation, the averaged threshold. It ends at about one part in a million, for three reasons: the package divides
by ‖w‖ + 1e-6 when it projects (we take rows to have unit norm), adds a machine epsilon to the norm when it
renormalises, and computes the auxiliary loss in float32 whatever the weights are in. It has no core, so cores are
compared with the dense reference in `test_objective.py` only.
"""

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dmsae.sae.config import SAEConfig, matryoshka_nesting
from dmsae.sae.objective import Objective, PrefixReduction
from dmsae.training.config import TrainConfig
from dmsae.training.learner import Learner, SAESpec

pytestmark = pytest.mark.usefixtures("one_thread")

D, K, N_TOKENS, N_STEPS = 16, 64, 64, 80
DEAD_AFTER_TOKENS = 5 * N_TOKENS


@pytest.fixture
def peer() -> Iterator[Any]:
    """The peer's trainer module, loaded without the package's `__init__`, which would import all of nnsight."""
    spec = importlib.util.find_spec("dictionary_learning")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = spec.submodule_search_locations[0]
    packages = {"dictionary_learning": root, "dictionary_learning.trainers": f"{root}/trainers"}
    for name, path in packages.items():
        module = types.ModuleType(name)
        module.__path__ = [path]
        sys.modules[name] = module
    yield importlib.import_module("dictionary_learning.trainers.matryoshka_batch_top_k")
    for name in [name for name in sys.modules if name.split(".")[0] == "dictionary_learning"]:
        del sys.modules[name]


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(48, D, generator=generator, dtype=torch.float64)
    rates = 0.5 / torch.arange(1, 49) ** 0.7
    made = []
    for _ in range(N_STEPS):
        on = torch.rand(N_TOKENS, 48, generator=generator) < rates
        made.append((on * torch.rand(N_TOKENS, 48, generator=generator, dtype=torch.float64)) @ features + 0.5)
    return made


@pytest.mark.parametrize("k", [3, 6])
def test_eighty_steps_equal_the_published_trainer(peer: Any, k: int) -> None:
    trainer = peer.MatryoshkaBatchTopKTrainer(
        steps=N_STEPS,
        activation_dim=D,
        dict_size=K,
        k=k,
        layer=0,
        lm_name="none",
        group_fractions=[1 / 32, 1 / 16, 1 / 8, 1 / 4, 17 / 32],
        lr=3e-3,
        warmup_steps=0,  # its warm-up starts from a rate of zero, ours from one step later
        decay_start=60,
        threshold_beta=0.9,
        threshold_start_step=29,  # averaging starts after that step
        seed=0,
        device="cpu",
    )
    trainer.dead_feature_threshold = DEAD_AFTER_TOKENS
    theirs = trainer.ae.double()
    theirs.b_enc.data[::5] = -1.3  # these latents lose every competition, die, and are what the auxiliary loss sees
    data = batches()

    config = TrainConfig(
        tokens=N_STEPS * N_TOKENS,
        batch_size=N_TOKENS,
        lr=3e-3,
        warmup_steps=0,
        decay_fraction=20 / N_STEPS,
        objective=Objective(PrefixReduction.SAEBENCH),
        threshold_start=30,
        threshold_beta=0.9,
        dead_after_tokens=DEAD_AFTER_TOKENS,
    )
    spec = SAESpec("ours", SAEConfig(D, K, k, matryoshka_nesting(K)))
    learner = Learner(spec, config, config.schedule(), trainer.geometric_median(data[0]))
    sae = learner.sae.double()
    with torch.no_grad():
        sae.W_dec.copy_(theirs.W_dec)
        sae.W_enc_noncore.copy_(theirs.W_enc.T)
        sae.b_enc.copy_(theirs.b_enc)
        sae.b_dec.copy_(trainer.geometric_median(data[0]))  # again: it was rounded to single precision
    n_aux_steps = 0
    for step, x in enumerate(data):
        result = learner.advance(step, x, batch_variance=float(x.var(0).sum()))
        n_aux_steps += result.aux_loss > 0
        assert result.loss == pytest.approx(trainer.update(step, x), rel=2e-6), f"step {step}"
        assert torch.equal(learner.idle_tokens_K, trainer.num_tokens_since_fired)

    assert n_aux_steps > 20
    assert learner.threshold == pytest.approx(float(theirs.threshold), rel=1e-5)
    for ours, their in [(sae.W_enc, theirs.W_enc.T), (sae.W_dec, theirs.W_dec)]:
        torch.testing.assert_close(ours, their, rtol=0, atol=2e-5)
    for name in ("b_enc", "b_dec"):
        torch.testing.assert_close(getattr(sae, name), getattr(theirs, name), rtol=0, atol=2e-5)
