"""The step on meshes of processes against the step of one process, in float64: the same numbers to rounding."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dmsae.sae.comms import ALONE
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import file_shapes
from dmsae.sae.shard import owned_rows, sharded_tensors
from dmsae.sae.variance import variance
from mesh_steps import Case, cut, largest_of_rows, short_listed, step, there_and_back
from meshes import SHAPES, Meshes, meshes
from strategies import configs


def assert_close(found: object, expected: object, name: str) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, msg=lambda text: f"{name}: {text}")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Meshes]:
    with meshes() as opened:
        yield opened


@st.composite
def cases(draw: st.DrawFn) -> Case:
    config = draw(configs(max_width=24, max_core=6, max_inner=3, max_d=8).filter(lambda one: one.width % 2 == 0))
    ties = draw(st.booleans())
    return Case(
        config=config,
        n_tokens=2 * draw(st.integers(1, 6)),
        seed=draw(st.integers(0, 2**16)),
        ties=ties,
        few=draw(st.booleans()),
        dead=draw(st.booleans()) and not ties,  # of equal dead latents, topk keeps whichever it likes
        warm_start=draw(st.sampled_from([None, 0.3, 1.0, 50.0])),
    )


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(case=cases())
def test_any_mesh_takes_the_step_of_one_process(mesh: Meshes, shape: tuple[int, int], case: Case) -> None:
    alone, n_latents = step(ALONE, case), shape[1]
    outcomes = mesh.run(shape, step, case)
    assert set.union(*(one.selected for one in outcomes)) == alone.selected
    assert sum(len(one.selected) for one in outcomes) == len(alone.selected)
    starts = sharded_tensors(case.config)
    for rank, one in enumerate(outcomes):
        rows = {name: owned_rows(start, rank % n_latents, n_latents) for name, start in starts.items()}
        expected = alone.result._replace(n_fired=alone.result.n_fired[rows["W_dec"]])
        for name, value in expected._asdict().items():
            assert_close(getattr(one.result, name), value, name)
        for name, grad in one.grads.items():
            assert_close(grad, alone.grads[name][rows.get(name, slice(None))], name)
    for first, *others in (outcomes[place::n_latents] for place in range(n_latents)):
        assert all(torch.equal(other.grads[name], grad) for name, grad in first.grads.items() for other in others)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_mesh_is_deterministic(mesh: Meshes, shape: tuple[int, int]) -> None:
    config = SAEConfig(d_model=16, width=64, k=4, prefixes=(8, 24, 64))
    case = Case(config, 32, seed=3, ties=False, few=False, dead=True, warm_start=None)
    first, second = mesh.run(shape, step, case), mesh.run(shape, step, case)
    for one, other in zip(first, second, strict=True):
        assert one.result.loss == other.result.loss
        assert all(torch.equal(one.grads[name], other.grads[name]) for name in one.grads)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_short_list_is_the_same_on_any_mesh_to_the_bit(mesh: Meshes, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    # As many pre-activations as make one process use a short list: each rank has fewer.
    encoder, x = torch.randn(1024, 8, generator=generator), torch.randn(1024, 8, generator=generator)
    alone = short_listed(ALONE, encoder, x, 1024 * 4)
    outcomes = mesh.run(shape, short_listed, encoder, x, 1024 * 4)
    assert sum(map(len, outcomes)) == len(alone) == 1024 * 4
    assert {place: value for one in outcomes for place, value in one.items()} == alone


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(st.lists(st.floats(0, width=32), max_size=8), min_size=4, max_size=4),
    n=st.integers(1, 33),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_cut_of_a_union(mesh: Meshes, values: list[list[float]], n: int, dtype: torch.dtype) -> None:
    parts = [torch.tensor(part, dtype=dtype) for part in values]
    everyone = sorted((value for part in values for value in part), reverse=True)
    expected = everyone[n - 1] if n <= len(everyone) else 0.0
    assert mesh.run((2, 2), cut, parts, n) == [expected] * 4


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.tuples(st.integers(0, 6), st.integers(0, 6)), n=st.integers(1, 8), seed=st.integers(0, 99))
def test_the_largest_of_each_row(mesh: Meshes, sizes: tuple[int, int], n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randint(0, 5, (7, min(size, n)), generator=generator).double() for size in sizes]
    kept = torch.cat(mesh.run((1, 2), largest_of_rows, parts, n), dim=1)
    everyone = torch.cat(parts, dim=1)
    expected = everyone.topk(min(n, everyone.shape[1]), dim=1).values
    found = kept.topk(min(n, everyone.shape[1]), dim=1).values
    assert torch.equal(found, expected)
    assert ((kept == everyone) | (kept == 0)).all()
    assert ((kept > 0).sum(1) <= n).all()


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(case=cases())
def test_parts_make_the_whole_to_the_bit(mesh: Meshes, shape: tuple[int, int], case: Case) -> None:
    for n_core, tensors, spread in (answers := mesh.run(shape, there_and_back, case)):
        sae = case.sae()
        expected = {name: getattr(sae, name) for name in file_shapes(sae.config)} | {"b_enc": sae.encoder_bias}
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
        assert spread == pytest.approx(variance(case.x()), rel=1e-10)
        assert abs(n_core - case.config.n_core / shape[1]) < 1
    assert sum(n_core for n_core, _, _ in answers) == case.config.n_core * shape[0]
