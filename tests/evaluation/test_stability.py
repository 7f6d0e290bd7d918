"""Copies are found to be the same, strangers as alike as chance, and what differs in one group stays in it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dictionaries import random_sae
from dmsae.activations.splits import Split
from dmsae.activations.store import Store, StoreWriter
from dmsae.disk.layout import shard_file
from dmsae.errors import ConfigError
from dmsae.evaluation.assignment import match_rows
from dmsae.evaluation.core_stability import core_stability
from dmsae.evaluation.mcc_null import IsotropicNulls, own_covariance_matching
from dmsae.evaluation.random_partners import fire_as_often_
from dmsae.evaluation.stability import Means, PairStability, StabilityConfig, mean_of_means, stability
from dmsae.sae.config import DenseCore, DetectorCore, SAEConfig
from dmsae.sae.detectors import Detectors
from dmsae.sae.sae import SAE
from planted import REQUEST
from three_cycles import PROVENANCE, three_cycles

pytestmark = pytest.mark.usefixtures("one_thread")
D_MODEL, WIDTH, N_CORE = 12, 60, 10


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    writer = StoreWriter(tmp_path_factory.mktemp("stability") / "store", REQUEST)
    x = torch.randn(2000, D_MODEL, generator=torch.Generator().manual_seed(0)) * torch.linspace(3, 0.1, D_MODEL)
    writer.add(shard_file(Split.HELDOUT, 0), {"x": x}, {})
    return writer.finish(D_MODEL)


def permuted(sae: SAE, n_core: int, seed: int = 0) -> SAE:
    """Return a copy with its core latents, and its other latents, each in another order."""
    made = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(n_core, generator=made), n_core + torch.randperm(WIDTH - n_core, generator=made)])
    copy = SAE(sae.config).requires_grad_(False)
    copy.W_enc_core.copy_(sae.W_enc[order][:n_core])
    copy.W_enc_noncore.copy_(sae.W_enc[order][n_core:])
    for name in ("b_enc", "W_dec", "threshold"):
        getattr(copy, name).copy_(getattr(sae, name)[order])
    copy.b_dec.copy_(sae.b_dec)
    return copy


def with_core(seed: int, core_rows: Tensor | None = None, threshold: float = 1.5) -> SAE:
    """Return an SAE with a dense core and random rows; those of its core may be given."""
    config = SAEConfig(D_MODEL, WIDTH, 4, (20, WIDTH), DenseCore(N_CORE, 4))
    sae = random_sae(config, seed, threshold)
    if core_rows is not None:
        sae.W_enc_core.copy_(core_rows)
    return sae


def compare(first: SAE, second: SAE, store: Store) -> PairStability:
    (pair,) = stability({"a": first, "b": second}, store, StabilityConfig())
    return pair


def test_permuted_copies_are_the_same(store: Store) -> None:
    sae = with_core(0, threshold=0.5)
    pair = compare(sae, permuted(sae, N_CORE), store)
    assert pair.core is not None
    assert not pair.same_core, "the rows are in another order: nothing says that they are the same"
    for group, size in ((pair.core, N_CORE), (pair.noncore, WIDTH - N_CORE)):
        assert tuple(group.mcc) == pytest.approx((1, 1, 1, 1))
        assert group.all[:5] == pytest.approx((size, 1, 1, 1, 1))
        assert group.all.correlation == pytest.approx(1)
        assert (group.over_bins.decoder, group.over_bins.shared) == pytest.approx((1, 1))
        assert sum(one.means.n for one in group.bins) + group.n_silent == size


def test_strangers_are_as_alike_as_random_directions(store: Store) -> None:
    config = SAEConfig(D_MODEL, 400, 4, (400,))
    pair = compare(random_sae(config, 0), random_sae(config, 1), store)
    null = pair.noncore.null_isotropic
    assert pair.core is None
    assert pair.noncore.mcc.decoder_signed == pytest.approx(null.signed, abs=0.015)
    assert pair.noncore.mcc.encoder_absolute == pytest.approx(null.absolute, abs=0.015)
    assert pair.noncore.null_decoder == pytest.approx(null.signed, abs=0.03)


def test_the_core_and_the_others_are_told_apart(store: Store) -> None:
    """The same core, other latents: the core is stable, the rest is not."""
    first = with_core(0)
    second = with_core(1, first.W_enc_core)
    second.W_dec[:N_CORE] = first.W_dec[:N_CORE]
    pair = compare(first, second, store)
    assert pair.same_core
    assert pair.core is not None
    assert tuple(pair.core.mcc) == pytest.approx((1, 1, 1, 1))
    assert (pair.core.all.shared, pair.core.all.jaccard) == pytest.approx((1, 1))
    assert pair.noncore.mcc.decoder_signed < 0.9
    assert pair.noncore.all.shared is not None
    assert pair.noncore.all.shared < 0.5


def test_a_core_that_is_the_same_is_compared_by_index(store: Store) -> None:
    """Its decoders may be exchanged: matching by decoder would pair latents that fire apart."""
    first = with_core(0)
    second = with_core(0)
    second.W_dec[:N_CORE] = first.W_dec[:N_CORE].roll(1, 0)
    core = compare(first, second, store).core
    assert core is not None
    assert (core.all.jaccard, core.all.encoder) == pytest.approx((1, 1))
    expected = torch.cosine_similarity(first.W_dec[:N_CORE], second.W_dec[:N_CORE]).mean()
    assert core.all.decoder == pytest.approx(float(expected), abs=1e-5)
    assert core.mcc.decoder_signed == pytest.approx(1)


def test_strangers_get_no_more_than_random_partners_that_fire_as_often(store: Store) -> None:
    """Rows are uneven, rates differ: the null knows both."""
    scale = torch.linspace(1.5, 0.5, D_MODEL)
    saes = [random_sae(SAEConfig(D_MODEL, 300, 4, (300,)), seed) for seed in (0, 1)]
    for sae in saes:
        for rows in (sae.W_enc_noncore, sae.W_dec):
            rows.copy_(torch.nn.functional.normalize(rows * scale))
        sae.threshold.copy_(torch.linspace(0.1, 5, 300))
    group = compare(saes[0], saes[1], store).noncore
    assert group.all.shared is not None
    assert group.all.shared > 0.2, "in so few dimensions many are shared by chance"
    assert tuple(group.null_all) == pytest.approx(tuple(group.all), abs=0.06)
    assert tuple(group.null_over_bins) == pytest.approx(tuple(group.over_bins), abs=0.06)
    frequent = [one for one in group.bins if one.means.n >= 50]
    assert len(frequent) > 1
    for one in frequent:
        assert tuple(one.null) == pytest.approx(tuple(one.means), abs=0.1)


def test_copies_have_more_in_common_than_random_partners(store: Store) -> None:
    sae = with_core(0, threshold=0.5)
    pair = compare(sae, permuted(sae, N_CORE), store)
    for group in (pair.core, pair.noncore):
        assert group is not None
        for real, null in ((group.all, group.null_all), (group.over_bins, group.null_over_bins)):
            assert real.n == null.n
            for figure in ("decoder", "encoder", "shared", "jaccard", "correlation"):
                assert getattr(null, figure) < getattr(real, figure) - 0.1


@pytest.mark.parametrize("widths", [(40, 60), (60, 40)])
def test_random_partners_are_of_the_same_latents_and_fire_as_often(store: Store, widths: tuple[int, int]) -> None:
    saes = [random_sae(SAEConfig(D_MODEL, width, 4, (width,)), width) for width in widths]
    for sae in saes:
        sae.threshold.copy_(torch.linspace(-1, 6, len(sae.threshold)))
    group = compare(saes[0], saes[1], store).noncore
    assert [one.null.n for one in group.bins] == [one.means.n for one in group.bins]
    for one in group.bins:  # it depends on the rates of both partners alone
        assert one.null.jaccard_chance == pytest.approx(one.means.jaccard_chance, rel=1e-3)
    assert any(one.null.jaccard != one.means.jaccard for one in group.bins)


def test_latents_are_made_to_fire_as_often_as_asked(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several parts and batches; some never, some on most tokens, one on all."""
    monkeypatch.setattr("dmsae.evaluation.random_partners._KEPT", 4000)
    monkeypatch.setattr("dmsae.evaluation.random_partners._MAX_BATCH", 300)
    sae = random_sae(SAEConfig(D_MODEL, 8, 2, (8,)), 0)
    sae.b_dec.fill_(0.3)
    counts = torch.tensor([0, 1, 17, 400, 1000, 1500, 1999, 2])
    fire_as_often_(sae, counts / 2000, store)
    assert (sae.encode(store.heldout()) > 0).sum(0).tolist() == counts.tolist()
    fire_as_often_(sae, torch.ones(8), store)
    assert (sae.encode(store.heldout()) > 0).double().mean() > 0.999


def test_without_a_spread_there_are_no_random_partners(store: Store) -> None:
    core = DenseCore(1, 1)
    saes = [random_sae(SAEConfig(D_MODEL, 20, 4, (10, 20), core), seed) for seed in (0, 1)]
    group = compare(saes[0], saes[1], store).core
    assert group is not None
    assert group.all.decoder is not None
    assert (group.null_decoder, *group.null_all[1:]) == (None,) * 7


def test_sharing_takes_one_partner_by_encoder_and_decoder(store: Store) -> None:
    sae = random_sae(SAEConfig(D_MODEL, 8, 2, (8,)), 0)
    eye = torch.eye(8, D_MODEL)
    sae.W_enc_noncore.copy_(eye)
    sae.W_dec.copy_(eye)
    other = random_sae(sae.config, 0)
    other.W_enc_noncore.copy_(eye)
    other.W_dec.copy_(eye[[1, 0, 2, 3, 4, 5, 6, 7]])  # decoders of two latents exchanged
    shared = compare(sae, other, store).noncore
    assert shared.mcc.decoder_signed == shared.mcc.encoder_signed == pytest.approx(1)
    assert shared.all.shared == pytest.approx(6 / 8)


def test_firing_is_that_of_the_partners(store: Store) -> None:
    sae = random_sae(SAEConfig(D_MODEL, 8, 2, (8,)), 0, threshold=1.0)
    rarer = random_sae(sae.config, 0, threshold=2.0)
    x = store.heldout()
    on, rare = sae.encode(x) > 0, rarer.encode(x) > 0
    group = compare(sae, rarer, store).noncore
    jaccard = ((on & rare).sum(0) / (on | rare).sum(0)).double()
    assert group.all.jaccard == pytest.approx(float(jaccard[~jaccard.isnan()].mean()))
    rates = (on.double().mean(0) + rare.double().mean(0)) / 2
    for one in group.bins:
        inside = (rates > one.low) & (rates <= one.high)
        assert one.means.n == int(inside.sum()) > 0
        assert one.means.jaccard == pytest.approx(float(jaccard[inside].mean()))
    means = [one.means.jaccard for one in group.bins if one.means.jaccard is not None]
    assert group.over_bins.jaccard == pytest.approx(sum(means) / len(means))
    assert group.over_bins.n == len(group.bins)


@pytest.mark.parametrize(("width", "other_width", "n_core"), [(WIDTH, WIDTH, N_CORE), (WIDTH, 40, 0)])
def test_which_sae_is_the_first_does_not_matter(store: Store, width: int, other_width: int, n_core: int) -> None:
    core = DenseCore(n_core, 4) if n_core else None
    first = random_sae(SAEConfig(D_MODEL, width, 4, (20, width), core), 0, threshold=1.0)
    second = random_sae(SAEConfig(D_MODEL, other_width, 4, (20, other_width), core), 1, threshold=2.0)
    one, other = compare(first, second, store), compare(second, first, store)
    groups = [(one.core, other.core), (one.noncore, other.noncore)]
    for mine, theirs in groups if n_core else groups[1:]:
        assert mine is not None
        assert theirs is not None
        assert tuple(mine.mcc) == pytest.approx(tuple(theirs.mcc))
        assert tuple(mine.all) == pytest.approx(tuple(theirs.all))
        assert tuple(mine.over_bins) == pytest.approx(tuple(theirs.over_bins))
        assert mine.n_silent == theirs.n_silent
        for here, there in zip(mine.bins, theirs.bins, strict=True):
            assert (here.low, here.high) == (there.low, there.high)
            assert tuple(here.means) == pytest.approx(tuple(there.means))


def test_bins_that_one_group_lacks_are_left_out_of_the_mean(store: Store) -> None:
    first, second = with_core(0), with_core(1)
    for sae in (first, second):
        sae.b_enc[:N_CORE] = 100.0  # the core always fires, which none of the others does
    pair = compare(first, second, store)
    assert pair.core is not None
    assert [one.high for one in pair.core.bins] == [1.0]
    both = {one.high for one in pair.core.bins} & {one.high for one in pair.noncore.bins}
    assert pair.core.over_bins.n == pair.noncore.over_bins.n == len(both)


def test_every_two_are_compared_and_the_width_may_differ(store: Store) -> None:
    saes = {str(width): random_sae(SAEConfig(D_MODEL, width, 4, (width,)), width) for width in (20, 30, 40)}
    pairs = stability(saes, store, StabilityConfig())
    assert [(pair.first, pair.second) for pair in pairs] == [("20", "30"), ("20", "40"), ("30", "40")]
    assert [pair.noncore.all.n for pair in pairs] == [20, 20, 30]
    with pytest.raises(ConfigError, match="at least two SAEs"):
        stability({"one": saes["20"]}, store, StabilityConfig())


def test_detectors_can_be_compared(store: Store) -> None:
    config = SAEConfig(D_MODEL, WIDTH, 4, (20, WIDTH), DetectorCore(N_CORE, 4))
    rows = torch.randn(N_CORE, D_MODEL, generator=torch.Generator().manual_seed(5))
    frozen = Detectors(torch.zeros(N_CORE), torch.full((N_CORE,), 0.5))
    first, second = (SAE.init(config, torch.Generator().manual_seed(seed), rows, frozen) for seed in (0, 1))
    core = compare(first, second, store).core
    assert core is not None
    assert (core.all.jaccard, core.all.correlation) == pytest.approx((1, 1)), "detectors fire the same in every SAE"


def test_rows_that_crowd_together_have_a_stronger_null() -> None:
    made = torch.Generator().manual_seed(0)
    even, uneven = torch.randn(2, 300, 20, generator=made), torch.randn(2, 300, 20, generator=made)
    uneven *= torch.logspace(0, -2, 20)
    isotropic = IsotropicNulls().of(300, 300, 20).signed
    nulls = []
    for first, second in (even, uneven):
        found = float(match_rows(first, second).cosines_K.mean())
        null = own_covariance_matching(first, second, seed=0)
        assert null is not None
        nulls.append(float(null.cosines_K.mean()))
        assert nulls[-1] == pytest.approx(found, abs=0.03)
    assert nulls[0] == pytest.approx(isotropic, abs=0.03)
    assert nulls[1] > isotropic + 0.1
    assert own_covariance_matching(torch.ones(3, 20), even[0], seed=0) is None


def test_the_null_is_simulated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = IsotropicNulls(0, tmp_path).of(30, 40, 8)
    assert IsotropicNulls(1, tmp_path).of(30, 40, 8) != first
    monkeypatch.setattr("dmsae.evaluation.mcc_null.match_rows", lambda *_: pytest.fail("simulated again"))
    assert IsotropicNulls(0, tmp_path).of(30, 40, 8) == first


def test_a_mean_over_nothing_has_no_value() -> None:
    some = Means(3, 0.5, 0.5, 0.0, None, None, None)
    assert mean_of_means([some, some._replace(decoder=1.0)]) == (2, 0.75, 0.5, 0.0, None, None, None)
    assert mean_of_means([]).decoder is None


def test_cores_are_compared_by_encoder_rows_and_lineage() -> None:
    cores = three_cycles().cores
    mine = {str(core.cycle): core for core in cores}
    pairs = {(pair.first, pair.second): pair for pair in core_stability(mine, StabilityConfig())}
    assert len(pairs) == 3
    kept = pairs["0", "1"]
    assert kept.carried is not None
    assert (kept.carried.kept, kept.carried.new, kept.carried.dropped) == (1, 1, 1)
    assert kept.n_identical == 1
    assert kept.shared >= 0.5
    assert kept.null_shared is not None
    assert 0 <= kept.null_shared <= 1
    again = core_stability({"a": mine["0"], "b": mine["0"]}, StabilityConfig())[0]
    assert (again.encoder_signed, again.shared, again.n_identical) == pytest.approx((1, 1, len(cores[0])))
    stranger = replace(cores[1], provenance=replace(PROVENANCE, config={"seed": 1}))
    assert core_stability({"a": cores[0], "b": stranger}, StabilityConfig())[0].carried is None
