"""Which candidates become the core, who is who across cycles, and what is distilled from two cores."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsae.cores.attribution import Attribution
from dmsae.cores.core import Core, Lineage
from dmsae.cores.selection import distilled_core, next_core, select_core
from dmsae.errors import AttributionError, CheckpointError, ConfigError
from dmsae.sae.sae import SAE
from three_cycles import PROVENANCE, run_cycles, scored, three_cycles, trained

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


def test_lineage_over_three_cycles() -> None:
    core_0, core_1, core_2 = three_cycles().cores
    assert core_0.lineage == (Lineage(0, 2, (0,)), Lineage(0, 0, (0,)))
    assert core_1.lineage == (Lineage(1, 3, (1,)), Lineage(0, 2, (0, 1)))
    assert core_2.lineage == (Lineage(1, 3, (1, 2)), Lineage(2, 4, (2,)))
    assert [core.slots_C.tolist() for core in (core_0, core_1, core_2)] == [[2, 0], [3, 0], [0, 4]]
    assert [core.scores_C.tolist() for core in (core_0, core_1, core_2)] == [[9, 5], [8, 7], [6, 3]]


def test_a_feature_dropped_and_relearned_is_new() -> None:
    core_0, core_1, core_2 = three_cycles().cores
    assert torch.equal(core_2.encoder_CD[1], core_0.encoder_CD[1])
    assert core_0.identities[1] == (0, 0)
    assert core_2.identities[1] == (2, 4)
    assert distilled_core(core_2, core_1).identities == [(1, 3)]
    assert core_2.births() == {1: 1, 2: 1}


def test_the_distilled_core_by_hand() -> None:
    """Of five latents in the last core, the three that the one before held are kept, by their last scores."""
    cores, saes = run_cycles(
        [
            [4, 0, 3, 2],  # C(0) in this order: (0, 0), (0, 2), (0, 3)
            [1, 0, 6, 0, 9, 2, 0],  # slots 4, 2, 5, 0: (1, 4), (0, 3), (1, 5), (0, 0)
            [2, 0, 3, 9, 5, 0, 0, 4],  # slots 3, 4, 7, 2, 0: (0, 0), (2, 4), (2, 7), (1, 5), (1, 4)
        ]
    )
    assert [core.identities for core in cores] == [
        [(0, 0), (0, 2), (0, 3)],
        [(1, 4), (0, 3), (1, 5), (0, 0)],
        [(0, 0), (2, 4), (2, 7), (1, 5), (1, 4)],
    ]
    distilled = distilled_core(cores[2], cores[1])
    assert distilled.lineage == (Lineage(0, 0, (0, 1, 2)), Lineage(1, 5, (1, 2)), Lineage(1, 4, (1, 2)))
    assert distilled.scores_C.tolist() == [9, 3, 2]
    assert distilled.slots_C.tolist() == [3, 2, 0]
    assert distilled.cycle == 2
    assert distilled.births() == {0: 1, 1: 2}
    # Each row is the one that the SAE of its birth cycle had learned.
    assert torch.equal(distilled.encoder_CD, torch.stack([saes[0].W_enc[0], saes[1].W_enc[5], saes[1].W_enc[4]]))


@pytest.mark.parametrize(
    ("second", "distilled"),
    [
        ([1, 1, 0, 0, 0, 0], [(0, 1), (0, 3)]),
        ([1, 2, 0, 0, 0, 3], [(0, 3), (0, 1)]),
        ([0, 1, 9, 0, 9, 0], [(0, 3)]),
        ([0, 0, 1, 1, 1, 1], []),
    ],
    ids=["all", "reordered", "one of two", "none"],
)
def test_what_is_in_both_of_the_last_two_cores_is_distilled(
    second: list[float], distilled: list[tuple[int, int]]
) -> None:
    """Cycle 0 selects its latents 1 and 3, which are latents 0 and 1 of cycle 1."""
    cores, _ = run_cycles([[0, 5, 0, 2], second])
    assert cores[0].identities == [(0, 1), (0, 3)]
    assert distilled_core(cores[1], cores[0]).identities == distilled


@settings(max_examples=50, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_a_core_holds_the_rows_that_its_latents_were_born_with(data: st.DataObject, seed: int) -> None:
    cores: list[Core] = []
    saes: list[SAE] = []
    for cycle in range(4):
        previous = cores[-1] if cores else None
        saes.append(trained(previous, seed + cycle))
        size = saes[-1].config.prefixes[0]
        score = st.sampled_from([0.0, 1.0, 2.0, 3.0])
        scores = data.draw(st.lists(score, min_size=size, max_size=size).filter(any))
        coverage = data.draw(st.sampled_from([0.3, 0.5]))
        cores.append(next_core(previous, saes[-1], scored(scores), cycle, coverage, PROVENANCE))
        for latent, row in zip(cores[-1].lineage, cores[-1].encoder_CD, strict=True):
            assert torch.equal(row, saes[latent.birth_cycle].W_enc[latent.birth_index])
            assert latent.selected_in == tuple(range(latent.birth_cycle, cycle + 1))
    # No two random rows are equal: which latents two cores share can be told from their rows alone.
    rows_before = cores[-2].encoder_CD.tolist()
    shared = [row for row in cores[-1].encoder_CD.tolist() if row in rows_before]
    assert distilled_core(cores[-1], cores[-2]).encoder_CD.tolist() == shared


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
    with pytest.raises(ConfigError, match="cycle = 3; it must be 1"):
        next_core(core_0, second, scored([1] * 6), 3, 0.9, PROVENANCE)
    with pytest.raises(AttributionError, match="another SAE"):
        next_core(core_0, second, scored([1] * 7), 1, 0.9, PROVENANCE)
    with pytest.raises(ConfigError, match="successive"):
        distilled_core(core_2, core_0)
