"""BatchTopK selection is exact, whatever it starts from; decoding sums what was selected."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsae.sae.batch_topk import select_top
from dmsae.sae.sparse import Active, decode, latent_offsets


def expected_survivors(pre_KB: torch.Tensor, n_keep: int) -> torch.Tensor:
    """Flat indices of the n_keep largest positive entries, the first of equal ones, in order."""
    order = pre_KB.flatten().sort(descending=True, stable=True).indices[:n_keep]
    return order[pre_KB.flatten()[order] > 0].sort().values


def flat(active: Active, n_tokens: int) -> torch.Tensor:
    return active.latents_S.long() * n_tokens + active.tokens_S.long()


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=3).filter(any),
    n_tokens=st.integers(1, 19),
    share=st.floats(0.01, 1.0),
    n_levels=st.sampled_from([None, 1, 3]),
    warm=st.sampled_from([None, 0.0, 0.3, 1.0, 3.0, float("inf"), float("nan")]),
    block=st.sampled_from([1, 40, 1 << 22]),
    piece=st.sampled_from([1, 40, 1 << 18]),
)
def test_selection_is_exact(
    seed: int,
    sizes: list[int],
    n_tokens: int,
    share: float,
    n_levels: int | None,
    warm: float | None,
    block: int,
    piece: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    width = sum(sizes)
    encoder = torch.randn(width, 3, generator=generator, dtype=torch.float64)
    x = torch.randn(n_tokens, 3, generator=generator, dtype=torch.float64)
    bias = torch.randn(width, generator=generator, dtype=torch.float64)
    if n_levels is not None:  # few distinct values: ties everywhere, also at the threshold
        encoder, bias = encoder.sign(), bias.sign()
        x = torch.randint(n_levels, x.shape, generator=generator).double()
    n_keep = max(1, int(share * width * n_tokens))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dmsae.sae.batch_topk.BLOCK_ELEMENTS", block)
        patch.setattr("dmsae.sae.batch_topk.DENSE_ELEMENTS", piece)
        active = select_top(x, torch.split(encoder, sizes), bias, n_keep, warm)
    pre = encoder @ x.T + bias[:, None]
    survivors = expected_survivors(pre, n_keep)
    assert torch.equal(flat(active, n_tokens), survivors)
    torch.testing.assert_close(active.values_S, pre.flatten()[survivors])


def test_a_warm_start_scans_once(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    encoder, x = torch.randn(512, 16, generator=generator), torch.randn(64, 16, generator=generator)
    n_products = 0
    product = torch.mm

    def counted(*args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        nonlocal n_products
        n_products += 1
        return product(*args, **kwargs)

    monkeypatch.setattr("dmsae.sae.batch_topk.BLOCK_ELEMENTS", 128 * 64)
    cold = select_top(x, [encoder], torch.zeros(512), 64 * 8)
    monkeypatch.setattr(torch, "mm", counted)
    warm = select_top(x, [encoder], torch.zeros(512), 64 * 8, float(cold.values_S.min()))
    assert n_products == 4
    select_top(x, [encoder], torch.zeros(512), 64 * 8, 2 * float(cold.values_S.max()))
    assert n_products == 12
    assert all(torch.equal(a, b) for a, b in zip(cold, warm, strict=True))


def test_candidates_stay_few_from_a_cold_start(monkeypatch: pytest.MonkeyPatch) -> None:
    n_seen = []

    def recording(values: torch.Tensor, n: int, _axis: object) -> float:
        n_seen.append(len(values))
        return float(values.kthvalue(len(values) - n + 1).values)

    monkeypatch.setattr("dmsae.sae.batch_topk.DENSE_ELEMENTS", 64 * 64)
    monkeypatch.setattr("dmsae.sae.batch_topk.nth_largest", recording)
    generator = torch.Generator().manual_seed(0)
    encoder, x = torch.randn(4096, 16, generator=generator), torch.randn(64, 16, generator=generator)
    select_top(x, [encoder], torch.zeros(4096), 64 * 8)
    assert max(n_seen) < 64 * 64 + 4 * 64 * 8


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**16), width=st.integers(1, 30), n_tokens=st.integers(1, 12))
def test_decoding_equals_the_dense_product(seed: int, width: int, n_tokens: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    f = torch.rand(width, n_tokens, generator=generator, dtype=torch.float64)
    f *= torch.rand(width, n_tokens, generator=generator) < 0.3
    latents, tokens = f.nonzero().int().unbind(1)
    active = Active(latents, tokens, f[f > 0])
    W_dec = torch.randn(width, 5, generator=generator, dtype=torch.float64)
    offsets = latent_offsets(active, width)
    half = width // 2
    low, high = decode(active, offsets[[0, half, width]].tolist(), W_dec, n_tokens)
    torch.testing.assert_close(low, f[:half].T @ W_dec[:half])
    torch.testing.assert_close(high, f[half:].T @ W_dec[half:])
    assert torch.equal(offsets.diff().long(), (f > 0).sum(1))
