"""One SAE in training: thresholds, dead latents, collapse, and the SAE as it is used."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dmsae.errors import ConfigError
from dmsae.sae.config import DenseCore, SparseCore
from dmsae.sae.objective import BatchResult, Objective, backward_
from dmsae.sae.sae import SAE
from dmsae.training import learner as learner_module
from dmsae.training.config import TrainConfig
from dmsae.training.learner import Learner, SAESpec
from dmsae.training.result import TrainState
from zipf import DENSE, SHORT, SPARSE, Zipf, small_sae

pytestmark = pytest.mark.usefixtures("one_thread")

CORE = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))

both_cores = pytest.mark.parametrize("core", [DENSE, SPARSE], ids=["dense", "sparse"])


def make(sae: dict[str, Any] | None = None, core: DenseCore | SparseCore | None = None, **changes: Any) -> Learner:
    config = TrainConfig(**SHORT | changes)
    spec = SAESpec("a", small_sae(core, **sae or {}), CORE if core else None)
    return Learner(spec, config, config.schedule(), torch.zeros(32))


def batches(n: int) -> list[Tensor]:
    source = Zipf()
    return [source.rows(64, seed).div(12.0) for seed in range(n)]


def variance(x: Tensor) -> float:
    return float((x - x.mean(0)).square().sum(1).mean())


def train(learner: Learner, n: int) -> list[BatchResult]:
    return [learner.advance(step, x, variance(x)) for step, x in enumerate(batches(n))]


@both_cores
def test_a_restart_keeps_the_encoder_rows_of_the_core_and_nothing_else(core: DenseCore | SparseCore) -> None:
    """Beside the frozen rows, a new SAE starts as it would without a core: its core decoders are as random as all."""
    learner, without = make(core=core).sae, make().sae
    assert torch.equal(learner.W_enc_core, CORE)
    assert torch.equal(learner.W_dec, without.W_dec)
    assert torch.equal(learner.W_enc_noncore, without.W_dec[5:])
    assert not learner.b_enc.any()
    cosines = torch.nn.functional.cosine_similarity(learner.W_dec[:5, None], CORE[None], dim=2)
    assert cosines.abs().max() < 0.6  # 0.18 = 1/√32 is typical
    assert not torch.equal(learner.W_dec, make(core=core, seed=1).sae.W_dec)


def test_the_threshold_is_an_average_of_the_smallest_kept_noncore_activation() -> None:
    learner = make(core=DENSE, threshold_start=4, threshold_beta=0.75)
    expected = None
    for step, x in enumerate(batches(12)):
        f = learner.sae.pre_activations(x)[:, 5:].detach().relu()  # the core does not count
        smallest = f.flatten().topk(4 * 64).values[-1].item()
        result = learner.advance(step, x, variance(x))
        assert result.threshold == pytest.approx(smallest, rel=1e-5)
        if step >= 4:
            expected = result.threshold if expected is None else 0.75 * expected + 0.25 * result.threshold
        assert learner.threshold == expected


def test_the_learning_rate_follows_the_schedule() -> None:
    learner = make(warmup_steps=5)
    for step, x in enumerate(batches(8)):
        learner.advance(step, x, variance(x))
        assert learner.optimiser.lr == 1e-3 * min(1, (step + 1) / 5)


def test_latents_are_dead_after_enough_tokens_without_firing() -> None:
    learner = make(core=DENSE, dead_after_tokens=3 * 64)
    with torch.no_grad():
        learner.sae.b_enc[[2, 20, 40, 47]] = -100.0  # one of the core, one of the second group, two of the last
    n_fired = torch.zeros(48, dtype=torch.int64)
    for step, x in enumerate(batches(3)):
        assert learner.dead_groups() == [0, 0, 0, 0]
        n_fired += learner.advance(step, x, variance(x)).n_fired
    assert not n_fired[[2, 20, 40, 47]].any()
    assert torch.equal(learner.dead_K, n_fired == 0)
    groups = n_fired.split([5, 8, 16, 19])
    assert learner.dead_groups() == [int((group == 0).sum()) for group in groups]
    before = sum(learner.dead_groups())
    with torch.no_grad():
        learner.sae.b_enc[40] = 10.0
    n_fired = learner.advance(3, batches(4)[3], 1.0).n_fired
    assert n_fired[40] > 0
    assert not learner.dead_K[n_fired > 0].any()
    assert sum(learner.dead_groups()) < before


@both_cores
def test_the_folded_sae_gives_the_same_codes_on_raw_activations(core: DenseCore | SparseCore) -> None:
    learner = make(core=core)
    train(learner, 20)
    assert learner.threshold
    scale, x = 12.0, Zipf().rows(500, seed=9)
    folded = learner.folded(scale)
    n_dense = 5 if isinstance(core, DenseCore) else 0
    theta = torch.full((48,), learner.threshold)
    theta[:n_dense] = 0
    pre = learner.sae.pre_activations(x / scale).relu()
    expected = pre * (pre > theta)
    near = ((pre - theta).abs() < 1e-4) & (pre > 0)  # rounding may put these on either side of their threshold
    assert near.float().mean() < 0.01
    torch.testing.assert_close(folded.encode(x)[~near], scale * expected[~near], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(folded.decode(scale * expected), scale * learner.sae.decode(expected))
    assert torch.equal(folded.W_enc_core, CORE)
    assert torch.equal(folded.W_dec, learner.sae.W_dec)


@both_cores
def test_inference_metrics_are_those_of_the_folded_sae(core: DenseCore | SparseCore) -> None:
    learner = make(core=core)
    train(learner, 20)
    x = batches(1)[0]
    folded = learner.folded(1.0)
    f = folded.encode(x)
    metrics = learner.inference_metrics(x)
    assert metrics.l0_core == pytest.approx((f[:, :5] > 0).sum().item() / 64)
    assert metrics.l0_noncore == pytest.approx((f[:, 5:] > 0).sum().item() / 64)
    error = (x - folded(x)).square().sum(1).mean().item()
    assert metrics.fve == pytest.approx(1 - error / variance(x), rel=1e-4)


def test_observing_changes_nothing() -> None:
    plain, watched = make(), make()
    train(plain, 10)
    for step, x in enumerate(batches(10)):
        watched.advance(step, x, variance(x))
        watched.inference_metrics(x)
        watched.dead_groups()
        watched.folded(3.0)
        watched.tensors()
    for name, tensor in plain.tensors().items():
        assert torch.equal(tensor, watched.tensors()[name]), name
    assert plain.facts() == watched.facts()


def test_a_restored_learner_continues_to_the_bit() -> None:
    whole, half = make(), make()
    train(whole, 20)
    train(half, 10)
    restored = make(seed=5)
    restored.restore({name: tensor.clone() for name, tensor in half.tensors().items()}, half.facts())
    for step, x in list(enumerate(batches(20)))[10:]:
        restored.advance(step, x, variance(x))
    assert whole.tensors().keys() == restored.tensors().keys()
    for name, tensor in whole.tensors().items():
        assert torch.equal(tensor, restored.tensors()[name]), name
    assert whole.facts() == restored.facts()


def test_a_restored_learner_does_not_write_into_what_it_was_restored_from() -> None:
    first, second = make(), make()
    train(first, 3)
    saved = {name: tensor.clone() for name, tensor in first.tensors().items()}
    given = {name: tensor.clone() for name, tensor in saved.items()}
    second.restore(given, first.facts())
    train(second, 3)
    assert all(torch.equal(given[name], tensor) for name, tensor in saved.items())


def test_divergence_leaves_the_weights_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make()
    train(learner, 5)
    before = {name: tensor.clone() for name, tensor in learner.tensors().items()}

    def bad(sae: SAE, *args: Any) -> BatchResult:
        return backward_(sae, *args)._replace(grad_norm=math.nan)

    monkeypatch.setattr(learner_module, "backward_", bad)
    x = batches(1)[0]
    learner.advance(5, x, variance(x))
    assert learner.state is TrainState.DIVERGED
    assert learner.ended_at == 5
    assert "gradient norm nan" in learner.cause
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.tensors().items())
    learner.finish()
    assert learner.state is TrainState.DIVERGED


def silence(learner: Learner) -> None:
    """Keep every latent from firing, so that nothing but the mean is explained."""
    with torch.no_grad():
        learner.sae.b_enc.fill_(-100.0)


def test_collapse_is_noticed_after_the_patience() -> None:
    learner = make()
    data = batches(60)
    for step in range(20):
        learner.advance(step, data[step], variance(data[step]))
    assert learner.has_learned
    silence(learner)
    for step in range(20, 40):
        learner.advance(step, data[step], variance(data[step]))
        assert learner.state is TrainState.TRAINING
    learner.advance(40, data[40], variance(data[40]))
    assert learner.state is TrainState.COLLAPSED
    assert learner.ended_at == 41
    assert learner.cause == "explained variance below 0.02 for 21 steps"


def test_a_dip_that_recovers_is_no_collapse() -> None:
    learner = make()
    data = batches(60)
    for step in range(20):
        learner.advance(step, data[step], variance(data[step]))
    biases = learner.sae.b_enc.detach().clone()
    silence(learner)
    for step in range(20, 40):
        learner.advance(step, data[step], variance(data[step]))
    with torch.no_grad():
        learner.sae.b_enc.copy_(biases)
    for step in range(40, 60):
        learner.advance(step, data[step], variance(data[step]))
    learner.finish()
    assert (learner.state, learner.ended_at, learner.cause) == (TrainState.FINISHED, 60, "")


def test_an_sae_that_overshoots_at_first_is_given_time() -> None:
    """With many random latents active the first reconstructions are worse than none; training repairs that."""
    learner = make({"width": 512, "k": 128, "prefixes": (512,)}, tokens=200 * 64)
    data = batches(200)
    fve = []
    for step, x in enumerate(data):
        result = learner.advance(step, x, variance(x))
        fve.append(1 - float(result.prefix_errors[-1]) / variance(x))
    assert all(value < 0 for value in fve[:25])
    assert fve[-1] > 0.5
    learner.finish()
    assert learner.state is TrainState.FINISHED


def ending(learner: Learner) -> tuple[TrainState, int]:
    return learner.state, learner.ended_at


def test_an_sae_that_never_learned_anything_is_reported_at_the_end() -> None:
    learner = make({"width": 512, "k": 128, "prefixes": (512,)}, lr=1e-12)
    train(learner, 60)
    assert ending(learner) == (TrainState.TRAINING, 0)
    learner.finish()
    assert ending(learner) == (TrainState.COLLAPSED, 60)
    assert "for 60 steps" in learner.cause


def test_finishing_frees_what_only_training_needs() -> None:
    learner = make()
    train(learner, 3)
    before = {name: tensor.clone() for name, tensor in learner.sae.state_dict().items()}
    learner.finish()
    assert not learner.optimiser.state
    assert all(parameter.grad is None for parameter in learner.sae.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.sae.state_dict().items())


def test_the_objective_reaches_the_step() -> None:
    plain, other = make(), make(objective=Objective(aux_alpha=0.0))
    for learner in (plain, other):
        learner.idle_tokens_K += 10_000
        train(learner, 1)
    assert not torch.equal(plain.sae.W_enc_noncore, other.sae.W_enc_noncore)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, r"a: core_rows has shape \(0, 32\); it must have shape \(5, 32\)"),
        (CORE[:3], r"a: core_rows has shape \(3, 32\); it must have shape \(5, 32\)"),
        (CORE[:, :31], r"a: core_rows has shape \(5, 31\)"),
        (CORE.index_fill(0, torch.tensor(2), math.nan), "a: core_rows is not finite in row 2"),
    ],
)
def test_a_core_that_does_not_fit_is_named(rows: Tensor | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SAESpec("a", small_sae(DENSE), rows)


def test_a_core_is_identified_by_its_rows() -> None:
    config = small_sae(DENSE)
    given = SAESpec("a", config, CORE).core_sha256()
    assert SAESpec("b", config, CORE.double().requires_grad_()).core_sha256() == given
    assert SAESpec("a", config, CORE.T.contiguous().T).core_sha256() == given
    assert SAESpec("a", config, CORE.flip(0)).core_sha256() != given
    assert SAESpec("a", small_sae()).core_sha256() is None
