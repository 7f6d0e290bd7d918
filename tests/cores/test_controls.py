"""Controls: cores of equal size that nothing was distilled into, or that another rule chose."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dmsae.activations.splits import Split
from dmsae.activations.store import Store, StoreWriter
from dmsae.cores.attribution import Attribution, attribute
from dmsae.cores.controls import RandomKind, Rule, core_by_rule, random_core, random_detectors
from dmsae.cores.core import Core, Lineage, Provenance
from dmsae.cores.null import covariance_matched_rows
from dmsae.cores.selection import detectors_of
from dmsae.cores.statistics import sample_activations
from dmsae.disk.layout import shard_file
from dmsae.errors import AttributionError, ConfigError, StoreError
from dmsae.sae.config import CoreConfig, DenseCore, DetectorCore, SAEConfig, SparseCore
from dmsae.sae.detectors import Detectors, detect
from dmsae.sae.sae import SAE
from planted import REQUEST, Planted, planted_store
from three_cycles import three_cycles

N_SAMPLE = 16_384


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """More training rows than a sample takes: the others are fresh."""
    return planted_store(tmp_path_factory.mktemp("planted") / "store", n_rows=40_000)


def store_of(path: Path, x: Tensor, split: Split = Split.TRAIN) -> Store:
    writer = StoreWriter(path, REQUEST)
    writer.add(shard_file(split, 0), {"x": x}, {})
    return writer.finish(x.shape[1])


def core_of(store: Store, rows: Tensor, detectors: Detectors | None = None) -> Core:
    return Core(
        encoder_CD=rows,
        scores_C=torch.arange(len(rows), 0, -1).double(),
        slots_C=torch.arange(len(rows)),
        lineage=tuple(Lineage(0, i, (0, 1)) for i in range(len(rows))),
        cycle=1,
        provenance=Provenance.of(store, {"seed": 0}),
        detectors=detectors,
    )


def detector_core(planted: Planted) -> Core:
    """Detectors of sums of planted directions, of many norms, rates and thresholds."""
    n = len(planted.directions)
    mixed = torch.rand(n, n, generator=torch.Generator().manual_seed(0)) @ planted.directions
    norms = torch.linspace(0.4, 2.5, n)
    detectors = Detectors(torch.linspace(-2.0, 0.0, n) * norms, torch.linspace(0.0, 0.3, n))
    return core_of(planted.store, norms[:, None] * torch.nn.functional.normalize(mixed), detectors)


def fresh(store: Store) -> Tensor:
    """The training rows that no sample holds."""
    return torch.cat([batch["x"] for batch in store.batches(Split.TRAIN, 4096)])[N_SAMPLE:]


class Activity(NamedTuple):
    rates: Tensor
    means: Tensor
    """Of the active values."""
    spreads: Tensor
    """Standard deviation of the active values."""


def activity(core: Core, x: Tensor) -> Activity:
    assert core.detectors is not None
    f = detect(x, core.encoder_CD, core.detectors).double()
    on = f != 0
    means = f.sum(0) / on.sum(0)
    return Activity(on.double().mean(0), means, (((f - means) * on).square().sum(0) / on.sum(0)).sqrt())


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


# Random directions


@pytest.mark.parametrize("kind", [RandomKind.UNIT, RandomKind.NORM_MATCHED])
def test_a_random_core_shares_size_and_norms_only(kind: RandomKind) -> None:
    like = three_cycles().cores[1]
    control = random_core(like, kind, seed=3)

    expected = like.encoder_CD.norm(dim=1) if kind is RandomKind.NORM_MATCHED else torch.ones(2)
    torch.testing.assert_close(control.encoder_CD.norm(dim=1), expected)
    assert torch.equal(control.encoder_CD, random_core(like, kind, seed=3).encoder_CD)
    assert not torch.allclose(control.encoder_CD, random_core(like, kind, seed=4).encoder_CD)
    assert all(latent.selected_in == () for latent in control.lineage)
    assert control.provenance.config["random_core"]["like"] == like.digest()


def test_a_random_core_has_no_detectors() -> None:
    like = three_cycles().cores[1]
    assert like.detectors is not None
    assert random_core(like, RandomKind.UNIT, seed=0).detectors is None


def test_covariance_matched_rows_have_the_covariance_of_the_activations(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(12, 12, generator=generator) * torch.logspace(0, -1.5, 12)
    x = torch.randn(2000, 12, generator=generator) @ mixing.T + 5.0
    store = store_of(tmp_path / "store", x)
    like = core_of(store, torch.linspace(0.5, 3, 2000)[:, None].expand(2000, 12).contiguous())

    control = random_core(like, RandomKind.COVARIANCE_MATCHED, 0, store)

    torch.testing.assert_close(control.encoder_CD.norm(dim=1), like.encoder_CD.norm(dim=1))
    directions = torch.nn.functional.normalize(control.encoder_CD)
    drawn = torch.distributions.MultivariateNormal(torch.zeros(12), x.T.cov()).sample((100_000,))
    expected = torch.nn.functional.normalize(drawn).T.cov()
    assert correlation(directions.T.cov(), expected) > 0.995
    # The mean of the activations, far larger than their spread, is no direction of the rows.
    assert directions.mean(0).norm() < 5 / len(like) ** 0.5
    assert torch.equal(control.encoder_CD, random_core(like, RandomKind.COVARIANCE_MATCHED, 0, store).encoder_CD)
    other = random_core(like, RandomKind.COVARIANCE_MATCHED, 1, store).encoder_CD
    for unrelated in (other, covariance_matched_rows(store, len(like), seed=0)):
        assert abs(correlation(control.encoder_CD, unrelated)) < 0.1
    origin = {"kind": "covariance_matched", "seed": 0, "like": like.digest(), "store": store.key}
    assert control.provenance.config == {"random_core": origin}


def test_covariance_matched_rows_need_activations_of_the_same_model(planted: Planted) -> None:
    like = detector_core(planted)
    with pytest.raises(ConfigError, match=r"covariance_matched.*store"):
        random_core(like, RandomKind.COVARIANCE_MATCHED, seed=0)
    elsewhere = replace(like.provenance, model=replace(like.provenance.model, hook="layers.3"))
    with pytest.raises(ConfigError, match="models differ"):
        random_core(replace(like, provenance=elsewhere), RandomKind.COVARIANCE_MATCHED, 0, planted.store)


# Samples


def test_a_sample_is_the_first_training_rows_or_else_the_pairs(planted: Planted, tmp_path: Path) -> None:
    first = planted.store.read(planted.store.shards(Split.TRAIN)[0])["x"]
    assert torch.equal(sample_activations(planted.store, 100), first[:100])
    assert sample_activations(planted.store).shape == (N_SAMPLE, 32)
    assert len(sample_activations(planted.store, 50_000)) == 40_000
    pairs = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample_activations(store_of(tmp_path / "pairs", pairs, Split.PAIRS)), pairs)
    with pytest.raises(StoreError, match="no activations"):
        sample_activations(StoreWriter(tmp_path / "none", REQUEST).finish(3))
    for name, value in {"nan": float("nan"), "constant": 1.0}.items():
        with pytest.raises(StoreError, match=r"finite|vary"):
            sample_activations(store_of(tmp_path / name, torch.full((10, 3), value)))


# Random detectors


@pytest.mark.parametrize("seed", range(4))
def test_random_detectors_fire_as_often_and_as_strongly_as_what_they_replace(planted: Planted, seed: int) -> None:
    like = detector_core(planted)
    control = random_detectors(like, planted.store, seed)
    sample, others = sample_activations(planted.store), fresh(planted.store)

    asked, given = activity(like, sample), activity(control, sample)
    assert asked.rates.min() < 0.03
    assert asked.rates.max() > 0.6
    torch.testing.assert_close(given.rates, asked.rates, rtol=0, atol=1.1 / N_SAMPLE)
    torch.testing.assert_close(given.means, asked.means, rtol=1e-3, atol=0)

    asked, given = activity(like, others), activity(control, others)
    share = 1 / N_SAMPLE + 1 / len(others)
    off = (given.rates - asked.rates).abs() / (2 * asked.rates * (1 - asked.rates) * share).sqrt()
    assert off.max() < 4.5
    variance = (given.spreads.square() + asked.spreads.square()) * share / asked.rates
    assert ((given.means - asked.means).abs() / variance.sqrt()).max() < 4.5


def test_random_detectors_are_seeded_and_carry_their_origin(planted: Planted) -> None:
    like = detector_core(planted)
    control, again = (random_detectors(like, planted.store, 3) for _ in range(2))
    other = random_detectors(like, planted.store, 4)
    assert control.detectors is not None
    assert like.detectors is not None
    assert again.detectors is not None
    assert torch.equal(control.detectors.thresholds_C, like.detectors.thresholds_C)
    assert torch.equal(control.encoder_CD, again.encoder_CD)
    assert torch.equal(control.detectors.offsets_C, again.detectors.offsets_C)
    for rows in (other.encoder_CD, like.encoder_CD):
        assert (torch.nn.functional.cosine_similarity(control.encoder_CD, rows).abs() < 0.8).all()
    origin = {"seed": 3, "like": like.digest(), "store": planted.store.key}
    assert control.provenance.config == {"random_detectors": origin}
    assert all(latent.selected_in == () for latent in control.lineage)


def test_detectors_that_always_or_never_fire_keep_doing_so(planted: Planted) -> None:
    like = core_of(
        planted.store,
        2 * planted.directions[:3],
        Detectors(torch.tensor([100.0, -100.0, -1.0]), torch.tensor([0.5, 0.5, 0.5])),
    )
    control = random_detectors(like, planted.store, seed=0)
    assert activity(control, sample_activations(planted.store)).rates[:2].tolist() == [1.0, 0.0]
    asked, given = (activity(core, fresh(planted.store)) for core in (like, control))
    assert given.rates[0] > 1 - 10 / N_SAMPLE
    assert given.rates[1] == 0
    torch.testing.assert_close(given.means[0], asked.means[0], rtol=1e-2, atol=0)
    torch.testing.assert_close(control.encoder_CD[1].norm(), like.encoder_CD[1].norm())


def test_random_detectors_need_detectors_and_activations_that_differ(planted: Planted, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no offsets and thresholds"):
        random_detectors(core_of(planted.store, planted.directions), planted.store, seed=0)
    halves = store_of(tmp_path / "halves", torch.eye(2).repeat(50, 1))
    uneven = store_of(tmp_path / "uneven", torch.eye(2)[torch.arange(100) // 90])
    rows, detectors = torch.eye(2)[1:].repeat(8, 1), Detectors(torch.zeros(8), torch.full((8,), 0.5))
    random_detectors(core_of(halves, rows, detectors), halves, seed=0)
    # Along a direction in which the larger group of rows comes last, no cut has the smaller group's share above it.
    with pytest.raises(StoreError, match="distinct"):
        random_detectors(core_of(uneven, rows, detectors), uneven, seed=0)


# Other rules

CORES: list[CoreConfig | None] = [None, DenseCore(5, k_noncore=8), SparseCore(5), DetectorCore(5, k_noncore=8)]
N_POOL, N_CHOSEN = 20, 5


def sae_of(planted: Planted, core: CoreConfig | None) -> SAE:
    """An SAE whose latents fire at many rates and strengths."""
    generator = torch.Generator().manual_seed(0)
    n_core = core.n if core else 0
    rows = torch.randn(n_core, 32, generator=generator)
    detectors = Detectors(-torch.rand(5, generator=generator), torch.rand(5, generator=generator))
    config = SAEConfig(32, 48, 8, (N_POOL, 48), core)
    sae = SAE.init(
        config,
        generator,
        rows if n_core else None,
        detectors if isinstance(core, DetectorCore) else None,
    )
    with torch.no_grad():
        sae.W_enc_noncore.mul_(0.5 + 2 * torch.rand(config.n_noncore, 1, generator=generator))
        sae.b_enc.normal_(std=0.5, generator=generator)
        sae.W_enc_noncore[:3] *= 40  # rare and strong
        sae.b_enc[n_core - config.n_detectors :][:3] -= 24
        sae.b_dec.normal_(std=0.1, generator=generator)
        sae.set_threshold_(0.7)
    return sae.requires_grad_(False)


def codes(sae: SAE, x: Tensor) -> Tensor:
    """f̃ [B, P] under the training-time mask, densely."""
    f = sae.pre_activations(x).relu()
    n_dense = sae.config.n_dense
    if sae.config.n_detectors:
        f[:, :n_dense] = detect(x, sae.W_enc_core, sae.detectors)
    competing = f[:, n_dense:]
    cut = competing.flatten().topk(sae.config.k_selected * len(x)).values[-1]
    competing.mul_(competing >= cut)
    return f[:, :N_POOL]


def scored(planted: Planted, sae: SAE) -> Attribution:
    return attribute(sae, planted.store)


def chosen_by(rule: Rule, planted: Planted, sae: SAE, n: int = N_CHOSEN) -> Core:
    provenance = Provenance.of(planted.store, {"width": 48})
    return core_by_rule(rule, sae, scored(planted, sae), n, planted.store, provenance, seed=0, cycle=2)


@pytest.mark.parametrize("core", CORES, ids=lambda core: core.kind if core else "none")
def test_rules_take_the_candidates_that_are_highest_by_them(planted: Planted, core: CoreConfig | None) -> None:
    sae = sae_of(planted, core)
    f = codes(sae, next(planted.store.batches(Split.PAIRS, 2048))["x"]).double()
    shuffled = torch.rand(N_POOL, generator=torch.Generator().manual_seed(1)).double()
    attribution = replace(scored(planted, sae), scores_P=shuffled)
    by = {
        Rule.FIRING_RATE: (f > 0).double().mean(0),
        Rule.MEAN_ACTIVATION: f.mean(0),
        Rule.ATTRIBUTION: shuffled,
    }
    choices = set()
    for rule, values in by.items():
        expected = set(values.sort(descending=True, stable=True).indices[:N_CHOSEN].tolist())
        provenance = Provenance.of(planted.store, {})
        control = core_by_rule(rule, sae, attribution, N_CHOSEN, planted.store, provenance, seed=0)
        assert set(control.slots_C.tolist()) == expected, rule
        choices.add(frozenset(expected))
    assert len(choices) == len(by), "the rules cannot be told apart"


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("core", CORES, ids=lambda core: core.kind if core else "none")
def test_chosen_latents_are_detectors_with_their_own_attribution(
    planted: Planted, core: CoreConfig | None, rule: Rule
) -> None:
    sae = sae_of(planted, core)
    control = chosen_by(rule, planted, sae)
    assert len(control) == N_CHOSEN
    assert control.cycle == 2
    assert control.detectors is not None
    assert control.provenance.config == {
        "core_by_rule": {"rule": rule.value, "n": N_CHOSEN, "seed": 0, "store": planted.store.key, "run": {"width": 48}}
    }
    if rule is Rule.PRINCIPAL_COMPONENTS:
        return
    assert torch.equal(control.encoder_CD, sae.W_enc[control.slots_C])
    expected = detectors_of(sae, control.slots_C)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(control.detectors, expected, strict=True))
    assert torch.equal(control.scores_C, scored(planted, sae).scores_P[control.slots_C])
    assert (control.scores_C.diff() <= 0).all()
    assert control.lineage == tuple(Lineage(2, slot, (2,)) for slot in control.slots_C.tolist())


def test_a_random_subset_is_seeded_and_even(planted: Planted) -> None:
    sae, provenance = sae_of(planted, CORES[1]), Provenance.of(planted.store, {})
    scores = scored(planted, sae)
    subsets = [
        core_by_rule(Rule.RANDOM_SUBSET, sae, scores, N_CHOSEN, planted.store, provenance, seed % 40).slots_C
        for seed in range(41)
    ]
    assert torch.equal(subsets.pop(), subsets[0])
    counts = torch.cat(subsets).bincount(minlength=N_POOL)
    assert all(len(set(subset.tolist())) == N_CHOSEN for subset in subsets)
    assert counts.min() > 0
    assert counts.max() < 28  # twelve are expected


def test_principal_components_are_those_of_the_sample(planted: Planted) -> None:
    sae = sae_of(planted, None)
    control = chosen_by(Rule.PRINCIPAL_COMPONENTS, planted, sae)
    x = sample_activations(planted.store)
    expected = torch.linalg.svd(x - x.mean(0), full_matrices=False).Vh[:N_CHOSEN]
    norms = sae.W_enc[:N_POOL].norm(dim=1)
    cosines = torch.nn.functional.cosine_similarity(control.encoder_CD, expected)
    torch.testing.assert_close(cosines.abs(), torch.ones(N_CHOSEN), rtol=0, atol=1e-3)
    torch.testing.assert_close(control.encoder_CD.norm(dim=1), norms.median().expand(N_CHOSEN))
    assert control.detectors is not None
    centred = x @ control.encoder_CD.T + control.detectors.offsets_C
    torch.testing.assert_close(centred.mean(0), torch.zeros(N_CHOSEN), rtol=0, atol=1e-4)
    assert (centred**3).mean(0).min() > 0
    assert not control.detectors.thresholds_C.any()
    assert not control.scores_C.any()
    assert all(latent.selected_in == () for latent in control.lineage)


def test_a_rule_cannot_take_more_than_there_is(planted: Planted) -> None:
    sae = sae_of(planted, None)
    for rule, n, most in ((Rule.FIRING_RATE, 21, 20), (Rule.PRINCIPAL_COMPONENTS, 33, 32), (Rule.ATTRIBUTION, 0, 20)):
        with pytest.raises(ConfigError, match=f"n = {n}; .* {most}"):
            chosen_by(rule, planted, sae, n)
    assert len(chosen_by(Rule.MEAN_ACTIVATION, planted, sae, N_POOL)) == N_POOL
    assert len(chosen_by(Rule.PRINCIPAL_COMPONENTS, planted, sae, 32)) == 32


def test_scores_of_another_sae_or_without_what_the_rule_needs_are_refused(planted: Planted) -> None:
    sae = sae_of(planted, None)
    scores = scored(planted, sae)
    foreign = replace(scores, latents_P=scores.latents_P + 1)
    with pytest.raises(AttributionError, match="another SAE"):
        core_by_rule(Rule.ATTRIBUTION, sae, foreign, 3, planted.store, Provenance.of(planted.store, {}), 0)
    without = replace(scores, mean_activations_P=None)
    with pytest.raises(AttributionError, match="without mean activations"):
        core_by_rule(Rule.MEAN_ACTIVATION, sae, without, 3, planted.store, Provenance.of(planted.store, {}), 0)


def test_controls_are_saved_like_any_core(planted: Planted, tmp_path: Path) -> None:
    like = detector_core(planted)
    sae = sae_of(planted, None)
    for i, control in enumerate([random_detectors(like, planted.store, 0), chosen_by(Rule.FIRING_RATE, planted, sae)]):
        control.save(tmp_path / str(i))
        read = Core.load(tmp_path / str(i))
        assert read.digest() == control.digest()
        assert read.provenance == control.provenance
