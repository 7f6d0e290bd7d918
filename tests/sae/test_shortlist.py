"""A short list made in bfloat16 leaves nothing out: what is selected is exact, in float32, whatever it starts from."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsae.devices import multiplies_bfloat16
from dmsae.sae import batch_topk
from dmsae.sae.batch_topk import select_top
from dmsae.sae.shortlist import Shortlist, is_faster
from dmsae.sae.sparse import Active, inner_products


def exact(encoder_KD: torch.Tensor, x_BD: torch.Tensor, bias_K: torch.Tensor) -> torch.Tensor:
    """All pre-activations [K, B], each computed by itself."""
    width, n_tokens = len(encoder_KD), len(x_BD)
    tokens = torch.arange(n_tokens, dtype=torch.int32).repeat(width)
    bags = torch.arange(width + 1, dtype=torch.int32) * n_tokens
    return inner_products(tokens, bags, encoder_KD, x_BD).view(width, n_tokens) + bias_K[:, None]


def survivors(pre_KB: torch.Tensor, n_keep: int) -> torch.Tensor:
    order = pre_KB.flatten().sort(descending=True, stable=True).indices[:n_keep]
    return order[pre_KB.flatten()[order] > 0].sort().values


def drawn(seed: int, width: int, n_tokens: int, d_model: int, spread: float) -> tuple[torch.Tensor, ...]:
    """An encoder, activations and biases whose sizes vary by powers of two, up to 2 ** spread either way."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [torch.rand(n, 1, generator=generator).mul(2).sub(1).mul(spread).exp2() for n in (width, n_tokens)]
    encoder, x = (torch.randn(len(size), d_model, generator=generator) * size for size in sizes)
    return encoder, x, torch.randn(width, generator=generator) * sizes[0].squeeze(1)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    width=st.integers(1, 70),
    n_tokens=st.integers(1, 19),
    d_model=st.sampled_from([1, 3, 64, 100]),
    share=st.floats(0.01, 1.0),
    spread=st.sampled_from([0.0, 2.0, 12.0]),
    whole=st.booleans(),
    warm=st.sampled_from([None, 0.01, 1.0, 3.0, 1e9]),
    block=st.sampled_from([1, 40, 1 << 22]),
    piece=st.sampled_from([1, 40, 1 << 18]),
)
def test_selection_from_a_short_list_is_exact(
    seed: int,
    width: int,
    n_tokens: int,
    d_model: int,
    share: float,
    spread: float,
    whole: bool,
    warm: float | None,
    block: int,
    piece: int,
) -> None:
    encoder, x, bias = drawn(seed, width, n_tokens, d_model, spread)
    if whole:  # few distinct values: ties everywhere, also at the threshold
        encoder, x, bias = encoder.sign(), x.round().clamp(-2, 2), bias.sign()
    n_keep = max(1, int(share * width * n_tokens))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_topk, "is_faster", lambda *_: True)
        patch.setattr(batch_topk, "BLOCK_ELEMENTS", block)
        patch.setattr(batch_topk, "DENSE_ELEMENTS", piece)
        active = select_top(x, torch.split(encoder, max(1, width // 2)), bias, n_keep, warm)
    pre = exact(encoder, x, bias)
    expected = survivors(pre, n_keep)
    assert torch.equal(active.latents_S.long() * n_tokens + active.tokens_S.long(), expected)
    assert torch.equal(active.values_S, pre.flatten()[expected])


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**16), d_model=st.sampled_from([1, 8, 576, 2304]), spread=st.sampled_from([0.0, 4.0, 20.0]))
def test_bounds_lie_above_every_pre_activation(seed: int, d_model: int, spread: float) -> None:
    encoder, x, bias = drawn(seed, 33, 17, d_model, spread)
    # Rows along the activations make all errors of rounding add up, the worst case.
    encoder[:17] = x * 2.0 ** torch.randint(-3, 4, (17, 1), generator=torch.Generator().manual_seed(seed))
    bounds = Shortlist(x, 33).product(encoder, bias).double()
    pre = encoder.double() @ x.double().T + bias.double()[:, None]
    assert (bounds >= pre * (1 - 2**-8 * pre.sign())).all()  # up to the rounding of the bound itself, which is monotone
    norms = encoder.double().norm(dim=1)[:, None] * x.double().norm(dim=1)
    assert (bounds - pre <= 0.05 * (norms + bias.double().abs()[:, None])).all()


def test_a_short_list_and_the_full_product_select_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, x, bias = drawn(0, 1024, 256, 96, 1.0)
    found: list[Active] = []
    for short in (True, False):
        monkeypatch.setattr(batch_topk, "is_faster", lambda *_, short=short: short)
        found.append(select_top(x, [encoder], bias, 256 * 20))
    assert torch.equal(found[0].latents_S, found[1].latents_S)
    assert torch.equal(found[0].tokens_S, found[1].tokens_S)
    torch.testing.assert_close(found[0].values_S, found[1].values_S)


def test_what_is_not_a_number_is_not_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, x, bias = drawn(0, 64, 8, 16, 1.0)
    x[3, 5] = float("nan")
    monkeypatch.setattr(batch_topk, "is_faster", lambda *_: True)
    for warm in (None, 0.5):
        active = select_top(x, [encoder], bias, 40, warm)
        assert active.values_S.isfinite().all()
        assert not (active.tokens_S == 3).any()


def test_a_short_list_is_for_large_batches_of_which_little_is_kept() -> None:
    x, n_entries = torch.zeros(2048, 8), 2048 * 2048
    assert is_faster(x, n_entries, 2048 * 32) == multiplies_bfloat16()
    assert not is_faster(x, n_entries, 2048 * 640)
    assert not is_faster(x, 2048 * 64, 2048)
    assert not is_faster(x.double(), n_entries, 2048 * 32)
