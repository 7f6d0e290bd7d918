"""The sparse step against the same step written densely and differentiated by autograd, in float64."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dmsae.errors import ConfigError
from dmsae.sae.config import DenseCore, SAEConfig, SparseCore
from dmsae.sae.detectors import Detectors
from dmsae.sae.objective import Objective, PrefixReduction, backward_
from dmsae.sae.optimiser import Adam, step_
from dmsae.sae.sae import SAE
from strategies import configs

PARAMETERS = ("W_enc_noncore", "b_enc", "W_dec", "b_dec")


class Reference(NamedTuple):
    loss: Tensor
    errors: list[Tensor]
    aux: Tensor
    f: Tensor
    grads: dict[str, Tensor]


def dense_mask(sae: SAE, f: Tensor) -> Tensor:
    """Return which activations survive: a dense core's positives, and the k·B largest of the rest."""
    core = sae.config.core
    first, k = (0, sae.config.k) if core is None or isinstance(core, SparseCore) else (core.n, core.k_noncore)
    competing = f[:, first:].T.flatten()  # latent-major: of equal activations the lower latent survives
    order = competing.sort(descending=True, stable=True).indices[: k * len(f)]
    mask = torch.zeros_like(competing).index_fill(0, order, 1).view(-1, len(f)).T
    return torch.cat([torch.ones_like(f[:, :first]), mask], dim=1) * (f > 0)


def dense_reference(sae: SAE, x: Tensor, objective: Objective, dead: Tensor | None) -> Reference:
    config = sae.config
    leaves = {name: getattr(sae, name).detach().clone().requires_grad_() for name in PARAMETERS}
    W_enc = torch.cat([sae.W_enc_core, leaves["W_enc_noncore"]])
    inputs = x - leaves["b_dec"] if config.center_input else x
    n_detectors = config.n_detectors
    all_f = (inputs @ W_enc[n_detectors:].T + leaves["b_enc"]).relu()
    if n_detectors:
        detected = x @ sae.W_enc_core.T + sae.offset  # of x itself, whatever b_dec is
        all_f = torch.cat([detected * (detected > sae.threshold[:n_detectors]), all_f], dim=1)
    f = all_f * dense_mask(sae, all_f.detach())
    errors = []
    for size in config.prefixes:
        reconstruction = f[:, :size] @ leaves["W_dec"][:size] + leaves["b_dec"]
        errors.append((x - reconstruction).square().sum(1).mean())
    n = len(errors)
    weight = {"sum": 1, "mean": 1 / n, "saebench": 1 / n**2}[objective.prefix_reduction]
    aux = torch.zeros((), dtype=x.dtype)
    if dead is not None:
        dead = dead & (f.detach() == 0).all(0)
        dead[: config.n_core] = False
    if dead is not None and dead.any():
        residual = (x - reconstruction).detach()
        top = all_f[:, dead].topk(min(config.d_model // 2, int(dead.sum())), dim=1)
        kept = torch.zeros_like(all_f[:, dead]).scatter(1, top.indices, top.values)
        error = (residual - kept @ leaves["W_dec"][dead]).square().sum(1).mean()
        variance = (residual - residual.mean(0)).square().sum(1).mean()
        aux = (error / variance).nan_to_num(0.0)
    loss = weight * sum(errors) + objective.aux_alpha * aux
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    rows = sae.W_dec.detach()
    grads["W_dec"] -= (grads["W_dec"] * rows).sum(1, keepdim=True) * rows
    return Reference(loss, errors, aux, f.detach(), grads)


def make_sae(config: SAEConfig, seed: int) -> SAE:
    generator = torch.Generator().manual_seed(seed)
    core = torch.randn(config.n_core, config.d_model, generator=generator)
    drawn = torch.randn(2, config.n_detectors, generator=generator)
    detectors = Detectors(0.2 * drawn[0], 0.3 * drawn[1].abs()) if config.n_detectors else None
    sae = SAE.init(config, generator, core, detectors).double()
    with torch.no_grad():
        sae.renormalise_()
        sae.W_enc_noncore.add_(0.3 * torch.randn(sae.W_enc_noncore.shape, generator=generator))
        sae.b_enc.add_(0.2 * torch.randn(len(sae.b_enc), generator=generator))
        sae.b_dec.add_(0.2 * torch.randn(config.d_model, generator=generator))
    return sae


def assert_close(actual: Tensor | float, expected: Tensor | float, name: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12, msg=lambda message: f"{name}: {message}")


def grad_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def assert_same(sae: SAE, x: Tensor, objective: Objective, dead: Tensor | None, warm: float | None) -> None:
    expected = dense_reference(sae, x, objective, dead)
    result = backward_(sae, x, objective, dead, warm)
    assert_close(result.loss, expected.loss.item(), "loss")
    assert_close(result.prefix_errors, torch.stack(expected.errors), "prefix_errors")
    assert_close(result.aux_loss, expected.aux.item(), "aux_loss")
    for name, grad in expected.grads.items():
        assert_close(getattr(sae, name).grad, grad, name)
    total = torch.stack([grad.norm() for grad in expected.grads.values()]).norm()
    assert_close(result.grad_norm, total.item(), "grad_norm")
    n_core, fired = sae.config.n_core, (expected.f > 0)
    assert torch.equal(result.n_fired.long(), fired.sum(0))
    assert result.l0_core == pytest.approx(fired[:, :n_core].sum().item() / len(x))
    assert result.l0_noncore == pytest.approx(fired[:, n_core:].sum().item() / len(x))
    noncore = expected.f[:, n_core:][fired[:, n_core:]]
    assert result.threshold == pytest.approx(noncore.min().item() if len(noncore) else 0.0)


@settings(max_examples=150, deadline=None)
@given(
    config=configs(40, 6, 4, 12),
    seed=st.integers(0, 2**16),
    n_tokens=st.integers(2, 24),
    reduction=st.sampled_from(PrefixReduction),
    dead_share=st.sampled_from([None, 0.0, 0.3, 1.0]),
    warm=st.sampled_from([None, 0.05, 0.5, 1.5, 50.0]),
)
def test_losses_and_gradients_equal_dense_autograd(
    config: SAEConfig,
    seed: int,
    n_tokens: int,
    reduction: PrefixReduction,
    dead_share: float | None,
    warm: float | None,
) -> None:
    sae = make_sae(config, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(n_tokens, config.d_model, generator=generator, dtype=torch.float64)
    dead = None if dead_share is None else torch.rand(config.width, generator=generator) < dead_share
    assert_same(sae, x, Objective(reduction), dead, warm)


@pytest.mark.parametrize(("k", "core"), [(7, DenseCore(2, k_noncore=3)), (3, SparseCore(2))], ids=["dense", "sparse"])
def test_ties_keep_exactly_k_per_token(k: int, core: DenseCore | SparseCore) -> None:
    config = SAEConfig(4, 12, k, (5, 12), core)
    sae = make_sae(config, 0)
    with torch.no_grad():
        sae.W_enc_noncore.copy_(sae.W_enc_noncore[:1].expand(10, 4))
        sae.b_enc.fill_(5.0)
        for tensor in (sae.W_enc_core, sae.W_enc_noncore, sae.b_dec):
            tensor.mul_(8).round_().div_(8)  # so that no product is rounded, and equal entries are equal to the bit
    x = torch.tensor([[1.0, -0.5, 0.25, 2.0]], dtype=torch.float64).expand(6, 4).contiguous()
    result = backward_(sae, x, Objective())
    competing = result.n_fired[config.n_dense :].sum()
    assert competing == 3 * 6
    assert_same(sae, x, Objective(), None, None)


def test_fewer_positives_than_k_keeps_the_positives() -> None:
    config = SAEConfig(6, 20, 15, (4, 20))
    sae = make_sae(config, 3)
    with torch.no_grad():
        sae.b_enc.sub_(1.5)
    x = torch.randn(16, 6, dtype=torch.float64)
    assert backward_(sae, x, Objective()).l0_noncore < 15
    assert_same(sae, x, Objective(), torch.ones(20, dtype=torch.bool), None)


def test_nothing_fires() -> None:
    config = SAEConfig(6, 20, 4, (4, 20))
    sae = make_sae(config, 3)
    with torch.no_grad():
        sae.b_enc.sub_(100)
    assert_same(sae, torch.randn(8, 6, dtype=torch.float64), Objective(), None, 1.0)


def test_many_blocks_give_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmsae.sae.batch_topk.BLOCK_ELEMENTS", 64)
    monkeypatch.setattr("dmsae.sae.sparse.GRADIENT_ELEMENTS", 7 * 8)
    config = SAEConfig(8, 60, 4, (10, 30, 60), SparseCore(5))
    dead = torch.rand(60) < 0.5
    for warm in (None, 0.5):
        assert_same(make_sae(config, 1), torch.randn(20, 8, dtype=torch.float64), Objective(), dead, warm)


def test_many_dead_latents_are_rebuilt_sparsely(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SAEConfig(4, 60, 9, (10, 60), DenseCore(5, k_noncore=2))
    sae, x = make_sae(config, 1), torch.randn(20, 4, dtype=torch.float64)
    with torch.no_grad():
        sae.b_enc[20:].sub_(1.0)
    dead = torch.arange(60) >= 20
    assert_same(sae, x, Objective(), dead, None)
    sparse_grad = grad_of(sae.W_enc_noncore).clone()
    monkeypatch.setattr("dmsae.sae.objective._SPARSE_FROM", 1000)
    assert backward_(sae, x, Objective(), dead).aux_loss > 0
    torch.testing.assert_close(grad_of(sae.W_enc_noncore), sparse_grad)


def test_only_gradients_change() -> None:
    sae = make_sae(SAEConfig(6, 20, 9, (8, 20), DenseCore(3, k_noncore=4)), 0)
    before = {name: tensor.clone() for name, tensor in sae.state_dict().items()}
    x = torch.randn(8, 6, dtype=torch.float64)
    given_x = x.clone()
    first = backward_(sae, x, Objective())
    grad = grad_of(sae.W_dec).clone()
    second = backward_(sae, x, Objective(), warm_start=first.warm_start)
    assert torch.equal(x, given_x)
    assert all(torch.equal(before[name], tensor) for name, tensor in sae.state_dict().items())
    assert first.loss == second.loss
    assert torch.equal(grad, grad_of(sae.W_dec))


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_step_equals_clip_adam_renormalise(scale: float) -> None:
    config = SAEConfig(6, 24, 9, (8, 24), DenseCore(3, k_noncore=4))
    ours, plain = make_sae(config, 0), make_sae(config, 0)
    optimiser = Adam(ours, lr=1e-2)
    reference = torch.optim.Adam(plain.parameters(), lr=1e-2)
    core = ours.W_enc_core.clone()
    for seed in range(5):
        x = scale * torch.randn(16, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        step_(ours, optimiser, backward_(ours, x, Objective()).grad_norm, 1.0)
        for name, grad in dense_reference(plain, x, Objective(), None).grads.items():
            getattr(plain, name).grad = grad
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        reference.step()
        plain.W_dec.data /= plain.W_dec.data.norm(dim=1, keepdim=True)
    for name in PARAMETERS:
        torch.testing.assert_close(getattr(ours, name), getattr(plain, name), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(ours.W_dec.norm(dim=1), torch.ones(24, dtype=torch.float64))
    assert torch.equal(ours.W_enc_core, core)


def test_errors_name_the_field() -> None:
    with pytest.raises(ConfigError, match=r"prefix_reduction = 'max'; it must be one of sum, mean, saebench"):
        Objective("max")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"aux_alpha = -1; it must be"):
        Objective(aux_alpha=-1)
    sae = make_sae(SAEConfig(6, 24, 4, (24,)), 0)
    with pytest.raises(ConfigError, match=r"x has shape \[3, 5\]; it must have shape \[B, 6\]"):
        backward_(sae, torch.zeros(3, 5), Objective())
