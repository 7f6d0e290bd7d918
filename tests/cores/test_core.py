"""Cores: what is selected, who is who across cycles, and what is on disk."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dmsae.cores.attribution import Attribution
from dmsae.cores.core import (
    CarryOver,
    Core,
    Lineage,
    Provenance,
    RandomKind,
    carry_over,
    distilled_core,
    nearest_in,
    next_core,
    random_core,
    select_core,
)
from dmsae.errors import AttributionError, CheckpointError, ConfigError
from dmsae.sae.sae import SAE, SAEConfig

WIDTH, N_PREFIX, D_MODEL = 12, 4, 5
PROVENANCE = Provenance({"name": "a model", "hook": "layers.8"}, "0123", {"seed": 0})

scores_lists = st.lists(
    st.one_of(st.sampled_from([0.0, 1.0, 0.25]), st.floats(0, 1e6, width=32)), min_size=1, max_size=30
).filter(any)


def paper_selection(scores: list[float], coverage: float) -> list[int]:
    """The last two lines of the paper's Algorithm 2."""
    order = sorted(range(len(scores)), key=lambda j: (-scores[j], j))
    total = 0.0
    for j in order:
        total += scores[j]
    chosen, reached = [], 0.0
    for j in order:
        chosen.append(j)
        reached += scores[j]
        if reached >= coverage * total:
            break
    return chosen


@settings(max_examples=300, deadline=None)
@given(scores=scores_lists, coverage=st.floats(0.01, 0.999))
def test_selection_is_the_papers(scores: list[float], coverage: float) -> None:
    selected = select_core(torch.tensor(scores, dtype=torch.float64), coverage)
    assert selected.tolist() == paper_selection(scores, coverage)


@settings(max_examples=200, deadline=None)
@given(scores=scores_lists, low=st.floats(0.01, 1), high=st.floats(0.01, 1))
def test_more_coverage_takes_more(scores: list[float], low: float, high: float) -> None:
    low, high = sorted((low, high))
    given_scores = torch.tensor(scores, dtype=torch.float64)
    few, many = select_core(given_scores, low).tolist(), select_core(given_scores, high).tolist()
    assert many[: len(few)] == few


@settings(max_examples=200, deadline=None)
@given(scores=st.lists(st.floats(0, 1e30), min_size=1, max_size=20).filter(any))
def test_full_coverage_takes_every_positive_score_however_small(scores: list[float]) -> None:
    selected = select_core(torch.tensor(scores, dtype=torch.float64), 1.0)
    assert sorted(selected.tolist()) == [j for j, score in enumerate(scores) if score > 0]


@settings(max_examples=100, deadline=None)
@given(scores=st.lists(st.floats(2**-10, 1e3, width=32), min_size=1, max_size=20, unique=True), data=st.data())
def test_permuting_latents_permutes_the_core(scores: list[float], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(scores))))
    coverage = data.draw(st.floats(0.01, 1))
    plain = select_core(torch.tensor(scores, dtype=torch.float64), coverage)
    permuted = select_core(torch.tensor([scores[i] for i in order], dtype=torch.float64), coverage)
    assert [order[i] for i in permuted.tolist()] == plain.tolist()


def test_equal_scores_go_by_index() -> None:
    assert select_core(torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0]), 0.8).tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize("scores", [[0.0, 0.0], [1.0, float("nan")], [1.0, float("inf")], [1.0, -1.0]])
def test_scores_that_select_nothing_are_an_error(scores: list[float]) -> None:
    with pytest.raises(AttributionError, match="no core can be selected"):
        select_core(torch.tensor(scores), 0.9)


@pytest.mark.parametrize("coverage", [0.0, -0.1, 1.1, float("nan")])
def test_coverage_has_bounds(coverage: float) -> None:
    with pytest.raises(ConfigError, match="coverage"):
        select_core(torch.ones(2), coverage)


def trained(core: Core | None, seed: int) -> SAE:
    """An SAE as a cycle leaves it: the core's rows untouched, all else new."""
    n_core = len(core) if core else 0
    config = SAEConfig(D_MODEL, WIDTH, 2, (n_core + N_PREFIX, WIDTH), n_core)
    sae = SAE.init(config, torch.Generator().manual_seed(seed), core.encoder_CD if core else None)
    torch.nn.init.normal_(sae.W_enc_free, generator=torch.Generator().manual_seed(seed + 100))
    return sae


def scored(scores: list[float]) -> Attribution:
    return Attribution(
        torch.arange(len(scores)),
        torch.tensor(scores, dtype=torch.float64),
        torch.ones(len(scores), dtype=torch.float64),
        10,
        {},
    )


def three_cycles() -> tuple[list[Core], list[SAE]]:
    """Cycle 0 selects latents 2 and 0; cycle 1 keeps the first of them and takes its own latent 3; cycle 2 keeps
    that one, drops the other, and takes its own latent 4, which is the feature that cycle 1 had dropped."""
    first = trained(None, 1)
    core_0 = next_core(None, first, scored([5, 0, 9, 0]), 0, 1.0, PROVENANCE)
    second = trained(core_0, 2)
    core_1 = next_core(core_0, second, scored([7, 0, 0, 8, 0, 0]), 1, 1.0, PROVENANCE)
    third = trained(core_1, 3)
    with torch.no_grad():
        third.W_enc_free[2] = core_0.encoder_CD[1]
    core_2 = next_core(core_1, third, scored([6, 0, 0, 0, 3, 0]), 2, 1.0, PROVENANCE)
    return [core_0, core_1, core_2], [first, second, third]


def test_lineage_over_three_cycles() -> None:
    (core_0, core_1, core_2), _ = three_cycles()
    assert core_0.lineage == (Lineage(0, 2, (0,)), Lineage(0, 0, (0,)))
    assert core_1.lineage == (Lineage(1, 3, (1,)), Lineage(0, 2, (0, 1)))
    assert core_2.lineage == (Lineage(1, 3, (1, 2)), Lineage(2, 4, (2,)))
    assert [core.slots_C.tolist() for core in (core_0, core_1, core_2)] == [[2, 0], [3, 0], [0, 4]]
    assert [core.scores_C.tolist() for core in (core_0, core_1, core_2)] == [[9, 5], [8, 7], [6, 3]]


def test_a_feature_dropped_and_relearned_is_new() -> None:
    (core_0, core_1, core_2), _ = three_cycles()
    assert torch.equal(core_2.encoder_CD[1], core_0.encoder_CD[1])
    assert core_2.identities[1] not in core_0.identities
    assert distilled_core(core_2, core_1).identities == [(1, 3)]
    assert carry_over(core_0, None) == CarryOver(size=2, kept=0, new=2, dropped=0)
    assert carry_over(core_1, core_0) == CarryOver(size=2, kept=1, new=1, dropped=1)
    assert carry_over(core_2, core_1) == CarryOver(size=2, kept=1, new=1, dropped=1)
    assert core_2.births() == {1: 1, 2: 1}


def test_distilled_rows_are_those_first_selected() -> None:
    (_, core_1, core_2), saes = three_cycles()
    distilled = distilled_core(core_2, core_1)
    for latent, row in zip(distilled.lineage, distilled.encoder_CD, strict=True):
        assert torch.equal(row, saes[latent.birth_cycle].W_enc[latent.birth_index])
    assert len(distilled) == 1


@settings(max_examples=50, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_the_distilled_core_is_what_stood_in_core_slots(data: st.DataObject, seed: int) -> None:
    core, before, saes = None, None, []
    for cycle in range(4):
        sae = trained(core, seed + cycle)
        saes.append(sae)
        score = st.sampled_from([0.0, 1.0, 2.0, 3.0])
        size = sae.config.prefixes[0]
        scores = data.draw(st.lists(score, min_size=size, max_size=size).filter(any))
        coverage = data.draw(st.sampled_from([0.3, 0.5]))
        before, core = core, next_core(core, sae, scored(scores), cycle, coverage, PROVENANCE)
        for latent, row in zip(core.lineage, core.encoder_CD, strict=True):
            assert torch.equal(row, saes[latent.birth_cycle].W_enc[latent.birth_index])
            assert latent.selected_in == tuple(range(latent.birth_cycle, cycle + 1))
    assert core is not None
    assert before is not None
    distilled = distilled_core(core, before)
    in_core_slots = (core.slots_C < len(before)).nonzero().flatten()
    assert torch.equal(distilled.encoder_CD, core.encoder_CD[in_core_slots])
    assert torch.equal(distilled.slots_C, core.slots_C[in_core_slots])


def test_a_partial_scoring_selects_among_what_was_scored() -> None:
    sae = trained(None, 1)
    scores = Attribution(
        torch.tensor([1, 3]), torch.tensor([1.0, 2.0], dtype=torch.float64), torch.ones(2), n_positions=4, facts={}
    )
    core = next_core(None, sae, scores, 0, 1.0, PROVENANCE)
    assert core.identities == [(0, 3), (0, 1)]
    assert torch.equal(core.encoder_CD, sae.W_enc[[3, 1]])


def test_what_does_not_belong_together_is_refused() -> None:
    (core_0, core_1, core_2), (_, second, _) = three_cycles()
    with pytest.raises(CheckpointError, match="was not trained with the core"):
        next_core(core_1, second, scored([1] * 6), 2, 0.9, PROVENANCE)
    with pytest.raises(ConfigError, match="cycle is 3"):
        next_core(core_0, second, scored([1] * 6), 3, 0.9, PROVENANCE)
    with pytest.raises(AttributionError, match="another SAE"):
        next_core(core_0, second, scored([1] * 7), 1, 0.9, PROVENANCE)
    with pytest.raises(ConfigError, match="successive"):
        distilled_core(core_2, core_0)


def assert_same(one: Core, other: Core) -> None:
    for name in ("encoder_CD", "scores_C", "slots_C"):
        first, second = getattr(one, name), getattr(other, name)
        assert first.dtype == second.dtype
        assert torch.equal(first, second)
    assert (one.lineage, one.cycle, one.provenance) == (other.lineage, other.cycle, other.provenance)


@pytest.mark.parametrize("n_latents", [2, 0])
def test_a_core_survives_the_disk(tmp_path: Path, n_latents: int) -> None:
    core = three_cycles()[0][2].take(list(range(n_latents)))
    core.save(tmp_path)
    assert_same(Core.load(tmp_path), core)
    facts = json.loads((tmp_path / "core.json").read_text())
    assert facts["n_latents"] == n_latents
    assert facts["provenance"]["model"]["hook"] == "layers.8"


@pytest.mark.parametrize("name", ["core.json", "core.safetensors"])
def test_a_changed_byte_is_noticed(tmp_path: Path, name: str) -> None:
    three_cycles()[0][1].save(tmp_path)
    path = tmp_path / name
    data = path.read_bytes()
    for at in (len(data) // 3, len(data) - 9):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(CheckpointError, match=name):
            Core.load(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        Core.load(tmp_path)


def test_the_nearest_latent_is_found_whatever_its_length() -> None:
    first = three_cycles()[0][1]
    other = replace(first, encoder_CD=torch.stack([-first.encoder_CD[0], 7 * first.encoder_CD[1]]))
    cosine, index = nearest_in(first, other)
    assert index[1] == 1
    assert cosine[1] == pytest.approx(1)
    assert cosine[0] < 1 - 1e-3
    with pytest.raises(ConfigError, match=rf"widths \({D_MODEL} and 3\)"):
        nearest_in(first, replace(first, encoder_CD=first.encoder_CD[:, :3]))


@pytest.mark.parametrize("kind", RandomKind)
def test_a_random_core_shares_size_and_norms_only(kind: RandomKind) -> None:
    like = three_cycles()[0][1]
    control = random_core(like, kind, seed=3)

    def norms(rows: Tensor) -> Tensor:
        return rows.norm(dim=1)

    wanted = norms(like.encoder_CD) if kind is RandomKind.NORM_MATCHED else torch.ones(2)
    torch.testing.assert_close(norms(control.encoder_CD), wanted)
    assert torch.equal(control.encoder_CD, random_core(like, kind, seed=3).encoder_CD)
    assert not torch.allclose(control.encoder_CD, random_core(like, kind, seed=4).encoder_CD)
    assert all(latent.selected_in == () for latent in control.lineage)
    assert control.provenance.config["random_core"]["like"] == like.digest()
