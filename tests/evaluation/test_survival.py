"""What is left of a core's latents in another SAE, compared with the same figures from all activations at once."""

import math
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conftest import Recorder
from dmsae.activations.splits import Split
from dmsae.activations.store import Store, StoreWriter
from dmsae.cores.controls import RandomKind, random_core
from dmsae.cores.core import Core
from dmsae.cores.selection import detectors_of
from dmsae.disk.layout import shard_file
from dmsae.errors import CheckpointError, ConfigError, StoreError
from dmsae.evaluation import survival as module
from dmsae.evaluation.survival import Survival, between, survival
from dmsae.sae.config import DenseCore, DetectorCore, SAEConfig, SparseCore
from dmsae.sae.sae import SAE
from planted import MODEL, REQUEST
from strategies import configs
from three_cycles import D_MODEL, WIDTH, three_cycles

pytestmark = pytest.mark.usefixtures("one_thread")


def store_of(path: Path, *shards: Tensor) -> Store:
    """Make a store that holds these shards of held-out activations."""
    writer = StoreWriter(path, REQUEST)
    for index, x in enumerate(shards):
        writer.add(shard_file(Split.HELDOUT, index), {"x": x}, {})
    return writer.finish(shards[0].shape[1])


def random_rows(n: int, d_model: int, seed: int = 0) -> Tensor:
    return torch.randn(n, d_model, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def random_sae(config: SAEConfig, seed: int) -> SAE:
    """Return an SAE with weights of so few digits that no product of them is rounded."""
    made = torch.Generator().manual_seed(seed)
    sae = SAE(config)
    for tensor in sae.state_dict().values():
        tensor.normal_(generator=made).mul_(4).round_().div_(4)
    sae.threshold.abs_()
    return sae


def reader(rows: list[list[float]], thresholds: list[float]) -> SAE:
    """Return an SAE without biases whose latents read these directions."""
    n, d_model = len(rows), len(rows[0])
    sae = SAE(SAEConfig(d_model, n, 1, (n,)))
    with torch.no_grad():
        sae.W_enc_noncore.copy_(torch.tensor(rows))
        sae.W_dec.copy_(torch.tensor(rows))
        sae.threshold.copy_(torch.tensor(thresholds))
    return sae


def permuted(sae: SAE, order: list[int]) -> SAE:
    """Return an SAE without a core whose latent i is latent order[i] of another one."""
    other = SAE(sae.config)
    other.load_state_dict(
        {name: value if name == "b_dec" else value[order] for name, value in sae.state_dict().items() if len(value)},
        strict=False,
    )
    return other


def assert_exactly_alike(figures: Survival) -> None:
    for value in (figures.jaccard_C, figures.correlation_C, figures.decoder_cosine_C, figures.top_overlap_C):
        assert torch.equal(value, torch.ones(len(value), dtype=torch.float64))
    assert torch.equal(figures.rate_before_C, figures.rate_after_C)


def test_two_copies_are_exactly_alike_wherever_their_latents_stand(tmp_path: Path) -> None:
    sae = random_sae(SAEConfig(5, 12, 2, (4, 12)), seed=1)
    order = [7, 3, 0, 11, 1, 2, 9, 10, 4, 5, 6, 8]
    store = store_of(tmp_path / "store", random_rows(3000, 5))
    figures = between(sae, order, permuted(sae, order), range(12), store)
    assert figures.n_tokens == 3000
    assert figures.rate_before_C.min() > 0
    assert_exactly_alike(figures)


def test_rare_latents_are_alike_too_when_they_fire_less_often_than_examples_are_kept(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", torch.tensor([[0.0], [2.0], [0.0], [3.0]]))
    sae = reader([[1.0]], [0.5])
    assert_exactly_alike(between(sae, [0], sae, [0], store, n_top=20))


def test_unrelated_latents_are_at_chance(tmp_path: Path) -> None:
    """Both read a direction of their own out of two that are independent, and fire at 31 % and 16 %."""
    store = store_of(tmp_path / "store", random_rows(40_000, 2))
    figures = between(reader([[1.0, 0.0]], [0.5]), [0], reader([[0.0, 1.0]], [1.0]), [0], store)
    assert float(figures.rate_before_C) == pytest.approx(0.309, abs=0.01)
    assert float(figures.rate_after_C) == pytest.approx(0.159, abs=0.01)
    both = 0.309 * 0.159
    assert float(figures.jaccard_chance_C) == pytest.approx(both / (0.309 + 0.159 - both), abs=0.01)
    assert float(figures.jaccard_C) == pytest.approx(float(figures.jaccard_chance_C), abs=0.01)
    assert float(figures.correlation_C) == pytest.approx(0, abs=0.03)
    assert float(figures.decoder_cosine_C) == 0
    assert float(figures.top_overlap_C) <= 0.1


def test_of_permuted_latents_only_those_that_stay_are_alike(tmp_path: Path) -> None:
    eye = torch.eye(4).tolist()
    store = store_of(tmp_path / "store", random_rows(20_000, 4))
    figures = between(reader(eye, [1.0] * 4), range(4), reader(eye, [1.0] * 4), [0, 2, 1, 3], store)
    stays = torch.tensor([True, False, False, True])
    assert (figures.jaccard_C[stays] == 1).all()
    assert (figures.jaccard_C[~stays] - figures.jaccard_chance_C[~stays]).abs().max() < 0.02


def test_always_on_latents_are_together_by_chance_alone(tmp_path: Path) -> None:
    """Why Jaccard never stands alone: two unrelated latents that always fire have a Jaccard of 1."""
    x = random_rows(2000, 2).abs() + 1
    figures = between(reader([[1.0, 0.0]], [0.0]), [0], reader([[0.0, 1.0]], [0.0]), [0], store_of(tmp_path / "s", x))
    assert float(figures.jaccard_C) == float(figures.jaccard_chance_C) == 1


def dense_figures(f_before: Tensor, f_after: Tensor, n_top: int) -> list[list[float]]:
    """Return Jaccard, correlation and overlap of each pair of columns, from all activations at once."""
    figures = []
    for a, b in zip(f_before.double().T.tolist(), f_after.double().T.tolist(), strict=True):
        fires = [{i for i, value in enumerate(values) if value > 0} for values in (a, b)]
        either = fires[0] | fires[1]
        jaccard = len(fires[0] & fires[1]) / len(either) if either else math.nan
        tops = [
            set(sorted(on, key=lambda i, values=values: (-values[i], i))[:n_top])  # type: ignore[misc]
            for on, values in zip(fires, (a, b), strict=True)
        ]
        n_kept = max(map(len, tops))
        overlap = len(tops[0] & tops[1]) / n_kept if n_kept else math.nan
        varies = len(set(a)) > 1 and len(set(b)) > 1
        correlation = float(torch.corrcoef(torch.tensor([a, b], dtype=torch.float64))[0, 1]) if varies else math.nan
        figures.append([jaccard, correlation, overlap])
    return figures


@settings(max_examples=60)
@given(
    before=configs(max_width=9, max_core=4, max_inner=2, max_d=4),
    after=configs(max_width=9, max_core=4, max_inner=2, max_d=4),
    data=st.data(),
)
def test_streamed_figures_are_those_of_all_activations_at_once(
    before: SAEConfig, after: SAEConfig, data: st.DataObject
) -> None:
    after = replace(after, d_model=before.d_model)
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    n_top = data.draw(st.integers(1, 50))
    n = data.draw(st.integers(1, 6))
    latents = [data.draw(st.lists(st.integers(0, one.width - 1), min_size=n, max_size=n)) for one in (before, after)]
    saes = [random_sae(one, seed) for seed, one in enumerate((before, after))]
    # Coarse activations, so that many of them are equal.
    x = (2 * random_rows(sum(sizes), before.d_model, data.draw(st.integers(0, 9)))).round()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_ELEMENTS", data.draw(st.integers(1, 100)))
        figures = between(
            saes[0], latents[0], saes[1], latents[1], store_of(Path(folder) / "s", *x.split(sizes)), n_top
        )
    f = [sae.encode(x)[:, latents].detach() for sae, latents in zip(saes, latents, strict=True)]
    streamed = torch.stack([figures.jaccard_C, figures.correlation_C, figures.top_overlap_C], dim=1)
    expected = torch.tensor(dense_figures(f[0], f[1], n_top), dtype=torch.float64)
    assert torch.allclose(streamed[:, [0, 2]], expected[:, [0, 2]], equal_nan=True)
    assert torch.allclose(streamed[:, 1], expected[:, 1], atol=1e-9, equal_nan=True)
    rates = [(codes > 0).double().mean(0) for codes in f]
    assert torch.allclose(figures.rate_before_C, rates[0])
    assert torch.allclose(figures.rate_after_C, rates[1])


def test_memory_depends_neither_on_the_tokens_nor_on_the_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more activations are held than a batch may have, and what is remembered between batches does not grow."""
    monkeypatch.setattr(module, "_ELEMENTS", 60)
    sizes: list[int] = []
    remembered: list[int] = []
    add = module._Together.add

    def watched(self: module._Together, before_CB: Tensor, after_CB: Tensor) -> None:
        sizes.append(before_CB.numel())
        add(self, before_CB, after_CB)
        remembered.append(sum(value.numel() for value in vars(self).values() if isinstance(value, Tensor)))

    monkeypatch.setattr(module._Together, "add", watched)
    sae = random_sae(SAEConfig(5, 500, 2, (500,)), seed=1)
    between(sae, [400, 1, 2], sae, [1, 400, 3], store_of(tmp_path / "store", random_rows(1000, 5)), n_top=7)
    assert len(sizes) == 50
    assert max(sizes) == 60
    assert len(set(remembered)) == 1
    assert remembered[0] <= 3 * (3 + 5 + 2 + 2 * 7)


def test_equal_activations_count_from_the_first_position_on(tmp_path: Path) -> None:
    """Where the third of the top stands is not said by the activations, so it must not depend on batches either."""
    x = torch.tensor([[1.0, 9.0], [5.0, 1.0], [1.0, 1.0], [5.0, 1.0], [1.0, 1.0], [1.0, 8.0]])
    first, second = reader([[1.0, 0.0]], [0.0]), reader([[0.0, 1.0]], [0.0])
    store = store_of(tmp_path / "store", x[:4], x[4:])
    # The first fires most at 1, 3 and then 0; the second at 0, 5 and then 1.
    assert float(between(first, [0], second, [0], store, n_top=3).top_overlap_C) == pytest.approx(2 / 3)


def test_correlation_survives_a_large_mean(tmp_path: Path) -> None:
    """Sums of squares of the values themselves would have no digit of the correlation left."""
    x = 2.0**20 + (8 * torch.rand(4000, 1, generator=torch.Generator().manual_seed(0))).round() / 8
    opposite = reader([[-1.0]], [0.0])
    with torch.no_grad():
        opposite.b_enc.fill_(2.0**21)
    figures = between(reader([[1.0]], [0.0]), [0], opposite, [0], store_of(tmp_path / "store", x))
    assert float(figures.correlation_C) == pytest.approx(-1, abs=1e-9)


def test_constants_have_no_correlation_whatever_is_rounded(tmp_path: Path) -> None:
    constants = reader([[0.0]] * 4, [0.0] * 4)
    with torch.no_grad():
        constants.b_enc.copy_(torch.tensor([0.1, 0.3, 0.7, 1 / 3]))
    figures = between(constants, range(4), constants, range(4), store_of(tmp_path / "store", random_rows(1003, 1)))
    assert figures.correlation_C.isnan().all()


def test_what_has_no_value_is_none(tmp_path: Path) -> None:
    """The first never fires, the second is constant, the third dies, the last is alive."""
    x = torch.tensor([[1.0, -1.0], [2.0, 1.0], [1.5, 3.0], [1.25, 2.0]])
    before = reader([[0.0, 0.0], [0.0, 0.0], [0.0, 1.0], [1.0, 0.0]], [9.0, 0.0, 0.0, 0.0])
    after = reader([[0.0, 0.0], [0.0, 0.0], [0.0, 1.0], [1.0, 0.0]], [9.0, 0.0, 9.0, 1.3])
    with torch.no_grad():
        for sae in (before, after):
            sae.b_enc[1] = 0.1
    figures = between(before, range(4), after, range(4), store_of(tmp_path / "store", x))
    rows = figures.rows()
    assert [row["jaccard"] for row in rows] == [None, 1, 0, 0.5]
    assert [row["correlation"] is None for row in rows] == [True, True, True, False]
    assert [row["top_overlap"] for row in rows] == [None, 1, 0, 0.5]
    assert [row["decoder_cosine"] for row in rows] == [None, None, 1, 1]
    assert [row["jaccard_chance"] for row in rows] == [None, 1, 0, 0.5]
    summary = figures.summary()
    assert summary.n_latents == 4
    assert (summary.n_silent_before, summary.n_silent_after) == (1, 2)
    assert summary.jaccard == 0.5
    assert summary.rate_before == pytest.approx((0.75 + 1) / 2)
    only_dead = between(before, [0], after, [0], store_of(tmp_path / "other", x)).summary()
    assert only_dead.jaccard is only_dead.correlation is only_dead.top_overlap is only_dead.decoder_cosine is None
    assert only_dead.rate_before == 0


def cycle(path: Path) -> tuple[Core, SAE, SAE, Store]:
    """Return a core, the SAE it was selected from, the next cycle's SAE, and activations."""
    cycles = three_cycles()
    core = cycles.cores[0]
    core = replace(core, provenance=replace(core.provenance, model=MODEL))
    return core, cycles.saes[0], cycles.saes[1], store_of(path, random_rows(500, D_MODEL))


def test_survival_follows_the_core_from_its_slots_to_the_front(tmp_path: Path) -> None:
    core, before, after, store = cycle(tmp_path / "store")
    progress = Recorder()
    figures = survival(core, before, after, store, n_top=10, progress=progress)
    same = between(before, core.slots_C, after, range(len(core)), store, n_top=10)
    assert figures.rows() == same.rows()
    assert figures.n_top == 10
    assert progress.bars == [("survival", 500)]
    # Directions are the same and there are no biases: only the decoders differ.
    assert_exactly_alike(replace(figures, decoder_cosine_C=torch.ones(len(core), dtype=torch.float64)))
    assert figures.decoder_cosine_C.abs().max() < 0.99


@torch.no_grad()
def test_detectors_survive_into_an_sae_of_another_width(tmp_path: Path) -> None:
    core, before, _, store = cycle(tmp_path / "store")
    before.b_dec.normal_(generator=torch.Generator().manual_seed(3))
    before.b_enc.uniform_(-1, 0, generator=torch.Generator().manual_seed(3))
    before.set_threshold_(0.3)
    detectors = detectors_of(before, core.slots_C)
    carriers = [
        SAE.init(
            SAEConfig(D_MODEL, width, 3, (8, width), DetectorCore(len(core), 2)),
            torch.Generator().manual_seed(width),
            core.encoder_CD,
            detectors,
        )
        for width in (30, 70)
    ]
    figures = survival(core, before, carriers[1], store)
    assert figures.jaccard_C.min() > 0.99
    assert figures.correlation_C.min() > 0.999
    across = between(carriers[0], range(2), carriers[1], range(2), store)
    assert (across.jaccard_C == 1).all()
    assert (across.correlation_C == 1).all()
    # Core and non-core latents can be asked for together, in any order.
    mixed = between(carriers[0], [20, 1, 0], carriers[0], [20, 0, 1], store)
    assert mixed.jaccard_C[0] == 1
    assert (mixed.jaccard_C[1:] < 1).all()


def test_rows_of_another_norm_are_still_the_core_s(tmp_path: Path) -> None:
    """Row norms are a setting of training; directions are what a core keeps."""
    core, before, _, store = cycle(tmp_path / "store")
    unit = replace(core, encoder_CD=torch.nn.functional.normalize(core.encoder_CD, dim=1))
    config = SAEConfig(D_MODEL, WIDTH, 2, (6, WIDTH), SparseCore(len(core)))
    after = SAE.init(config, torch.Generator().manual_seed(5), unit.encoder_CD)
    assert survival(unit, before, after, store).jaccard_C.min() > 0.99


def test_an_sae_without_the_core_is_refused(tmp_path: Path) -> None:
    core, before, after, store = cycle(tmp_path / "store")
    with pytest.raises(CheckpointError, match=r"does not carry the core.*2 rows of 5.*'after' has no core"):
        survival(core, before, before, store)
    with torch.no_grad():
        after.W_enc_core[1, 0] += 1e-3
    with pytest.raises(CheckpointError, match=r"does not carry the core.*row 1 differs"):
        survival(core, before, after, store)


def test_an_sae_that_the_core_is_not_from_is_refused(tmp_path: Path) -> None:
    core, before, after, store = cycle(tmp_path / "store")
    with pytest.raises(CheckpointError, match=r"was not selected from 'before'.*between"):
        survival(core, after, after, store)
    with pytest.raises(CheckpointError, match=r"was not selected from 'before'.*latent 99.*12 latents"):
        survival(replace(core, slots_C=torch.tensor([0, 99])), before, after, store)
    control = random_core(core, RandomKind.NORM_MATCHED, seed=0)
    carrier = SAE.init(after.config, torch.Generator(), control.encoder_CD)
    with pytest.raises(CheckpointError, match="was not selected from 'before'"):
        survival(control, before, carrier, store)


def test_activations_of_another_model_or_width_are_refused(tmp_path: Path) -> None:
    core, before, after, store = cycle(tmp_path / "store")
    elsewhere = replace(core, provenance=replace(core.provenance, model=replace(MODEL, hook="layers.9")))
    with pytest.raises(ConfigError, match=r"layers\.9"):
        survival(elsewhere, before, after, store)
    with pytest.raises(ConfigError, match="width 7; the SAE takes 5"):
        between(before, [0], after, [0], store_of(tmp_path / "wide", random_rows(5, 7)))
    wide = random_sae(SAEConfig(7, 9, 2, (9,), DenseCore(2, 1)), seed=0)
    with pytest.raises(ConfigError, match="width 5; the SAE takes 7"):
        survival(core, before, wide, store)


def test_impossible_questions_are_refused(tmp_path: Path) -> None:
    _, sae, _, store = cycle(tmp_path / "store")
    with pytest.raises(ConfigError, match=r"3 latents .* and 2"):
        between(sae, [0, 1, 2], sae, [0, 1], store)
    with pytest.raises(ConfigError, match="No latents"):
        between(sae, [], sae, [], store)
    with pytest.raises(ConfigError, match=r"latent 12.*0 … 11"):
        between(sae, [0], sae, [12], store)
    with pytest.raises(ConfigError, match="latent -1"):
        between(sae, [-1], sae, [1], store)
    with pytest.raises(ConfigError, match="n_top = 0"):
        between(sae, [0], sae, [1], store, n_top=0)
    with pytest.raises(StoreError, match="heldout_tokens"):
        between(sae, [0], sae, [1], StoreWriter(tmp_path / "empty", REQUEST).finish(D_MODEL))


def test_a_diverged_sae_is_refused(tmp_path: Path) -> None:
    core, before, after, store = cycle(tmp_path / "store")
    with torch.no_grad():
        after.b_dec[0] = math.nan
    with pytest.raises(CheckpointError, match=r"not finite.*diverged"):
        survival(core, before, after, store)
