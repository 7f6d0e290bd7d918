"""The parts of experiments, whole but small: what each gives, what is kept, and that it is not run again."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from dmsae.activations.store import Store
from dmsae.config import Json
from dmsae.cores.attribution import Attribution, AttributionConfig, QuantileOver
from dmsae.distillation import distill as distilling
from dmsae.distillation.config import DistillConfig
from dmsae.distillation.outcome import CycleFailed
from dmsae.distillation.transfer import above, below
from dmsae.errors import ConfigError
from dmsae.experiments.catalog import EXPERIMENTS, PARTS, settings_of
from dmsae.experiments.grid import GRIDS, Preset
from dmsae.experiments.lab import Lab
from dmsae.experiments.parts import sparsity
from dmsae.experiments.parts.consistency import compare, latents
from dmsae.experiments.parts.cycles import by_cycle
from dmsae.experiments.results import (
    kept_or_run,
    over_seeds,
    part_results,
    read_results,
)
from dmsae.experiments.tables import tables, with_like_nulls
from dmsae.sae.comms import Comms
from dmsae.sae.sae import SAE
from dmsae.training.config import TrainConfig
from planted import Planted, planted_store

pytestmark = pytest.mark.usefixtures("one_thread")
TRAIN = TrainConfig(tokens=60 * 64, batch_size=64, lr=3e-3, log_every=30, device="cpu")
BASE = DistillConfig(
    width=64, k=6, nesting=(16, 64), cycles=1, attribution=AttributionConfig(n_bootstrap=0), train=TRAIN
)
GRID = GRIDS[Preset.SMOKE]
ON_PLANTED = [name for name in PARTS if name != "selection"]
"""Parts that need no language model."""


class WatchedGrid:
    """A grid that remembers what was read of it."""

    def __init__(self) -> None:
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> object:
        self.read.add(name)
        return getattr(GRID, name)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return planted_store(tmp_path_factory.mktemp("planted") / "store")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experiments")


@pytest.fixture(scope="module")
def lab(planted: Planted, directory: Path) -> Lab:
    return Lab(planted.store, BASE, directory)


@pytest.fixture(scope="module")
def results(lab: Lab, directory: Path) -> Path:
    for seed, parts in ((0, ON_PLANTED), (1, ["paper"])):
        for part in parts:
            watched = WatchedGrid()
            work = partial(PARTS[part].run, lab, watched, seed)  # type: ignore[arg-type]
            kept_or_run(directory / "results", part, seed, settings_of(part, lab, GRID), work)
            assert watched.read == set(PARTS[part].varies), f"what {part} depends on is not what it says"
    return directory / "results"


def figures(results: Path, part: str, seed: int = 0) -> Json:
    read: Json = next(one["figures"] for one in part_results(results, part) if one["seed"] == seed)
    return read


def test_experiments_are_made_of_parts_that_there_are() -> None:
    assert {part for experiment in EXPERIMENTS.values() for part in experiment.parts} == set(PARTS)


def test_each_part_has_its_saes_and_controls(results: Path) -> None:
    names = {part: [row["sae"] for row in figures(results, part)["rows"]] for part in ON_PLANTED}
    assert {"dense-k6", "random-norm_matched-dense-k6", "detector-k6", "random-detector-k6"} <= set(names["paper"])
    assert {"detector-k6", "random-detector-k6"} <= set(names["capped"])
    assert {"firing_rate-detector-k6"} <= {*names["capped"], *figures(results, "capped")["left_out"]}
    for part in ("paper", "capped", "consensus"):
        assert any(name.startswith("unconstrained-1") for name in names[part]), part
    for row in figures(results, "paper")["rows"]:
        assert 0 < row["fve"] < 1
        assert (row["kept_all"] is None) == (row["n_core"] == 0)
        assert row["n_core"] == 0 or 0 <= row["kept_active"] <= row["n_core"]


@pytest.mark.parametrize(
    ("part", "beginning", "modes"),
    [
        ("uncapped", "", ("dense", "sparse")),
        ("every-cycle", "after-1-", ("dense", "sparse", "detector")),
        ("prices", "after-2-", ("dense", "sparse", "detector")),
    ],
)
def test_cores_have_prices_in_every_mode_by_other_rules_before_and_after_the_cycles(
    results: Path, part: str, beginning: str, modes: tuple[str, ...]
) -> None:
    found = figures(results, part)
    assert not found.get("failures")
    rows = [row for row in found["rows"] if row["sae"].startswith(beginning)]
    names = {row["sae"].removeprefix(beginning).rpartition("-k")[0] for row in rows}
    assert len(names) == len(rows), "every SAE has a name of its own"
    random = {"random-detector" if mode == "detector" else f"random-norm_matched-{mode}" for mode in modes}
    by_rule = {f"firing_rate-{mode}" for mode in modes}
    left_out = {name.removeprefix(beginning) for name in found["left_out"]}
    free = {f"unconstrained-{mode}-{i}" for mode in modes for i in (1, 2)}
    assert names == {*modes, *random, *(by_rule - left_out), *free}
    priced = [row for row in rows if row["sae"].startswith(f"{beginning}dense")]
    assert all(row["price"] is not None for row in priced), "SAEs that keep nothing lie on both sides of its L0"
    held = [row["attribution_share"] for row in rows if row["n_core"] and "random" not in row["sae"]]
    assert all(share is not None and 0 < share <= 1 for share in held)


def test_figures_of_an_earlier_version_of_a_part_are_refused(lab: Lab, tmp_path: Path) -> None:
    now = settings_of("prices", lab, GRID)
    before = {name: value for name, value in now.items() if name != "version"}
    kept_or_run(tmp_path, "prices", 0, before, lambda: {"rows": []})
    with pytest.raises(ConfigError, match="version"):
        kept_or_run(tmp_path, "prices", 0, now, lambda: {"rows": []})


def test_random_detectors_fire_as_often(results: Path) -> None:
    rows = {row["sae"]: row for row in figures(results, "capped")["rows"]}
    one, other = rows["detector-k6"], rows["random-detector-k6"]
    assert one["n_core"] == other["n_core"]
    assert other["l0_core"] == pytest.approx(one["l0_core"], abs=0.6), "held-out sample of 64 tokens"


def test_persistence_stands_beside_a_random_start(results: Path) -> None:
    cycles = figures(results, "cycles")["cycles"]
    runs = {cycle["run"] for cycle in cycles} | set(figures(results, "cycles")["failures"])
    assert runs == {"dense-selected", "dense-random", "detector-selected", "detector-random"}
    assert all(cycle["of_first"] == cycle["size"] for cycle in cycles if cycle["cycle"] == 0)
    assert all(sum(cycle["births"].values()) == cycle["size"] for cycle in cycles)


def test_a_larger_coverage_takes_more_latents(results: Path) -> None:
    found = figures(results, "tau")
    assert [row["coverage"] for row in found["rows"]] == list(GRID.coverages)
    sizes = [row["n_core"] for row in found["rows"]]
    assert sizes == sorted(sizes)
    assert set(found["curves"]) == {"0.5", "0.9"}
    assert len(found["curves"]["0.9"]["step"]) == len(found["curves"]["0.9"]["fve"]) > 1


def test_every_sparsity_has_its_cycles_or_a_cause(results: Path) -> None:
    found = figures(results, "sparsity")
    assert {cycle["k"] for cycle in found["cycles"]} | {int(k) for k in found["failures"]} == {6, 12}


def test_norms_are_varied_for_core_and_random_alike(results: Path) -> None:
    rows = {row["sae"]: row for row in figures(results, "random-core")["rows"]}
    for norm in ("found", "2.0"):
        for source in ("dense", "random-norm_matched-dense", "random-covariance_matched-dense"):
            assert f"{source}-k6-norm-{norm}" in rows
    assert set(figures(results, "random-core")["curves"]) == set(rows)


def test_worth_has_every_core_its_neighbour_in_l0_and_batchtopk(results: Path) -> None:
    found = figures(results, "worth")
    kept, free = ({row["sae"] for row in found["rows"] if bool(row["n_core"]) is core} for core in (True, False))
    assert kept == {row["sae"] for row in figures(results, "paper")["rows"] if row["n_core"]}
    assert len([name for name in free if name.startswith("batchtopk")]) == 1
    assert 1 <= len([name for name in free if name.startswith("unconstrained")]) <= len(kept)
    assert {row["sae"] for row in found["scores"]} == kept | free
    assert all(row["null"] is not None for row in found["scores"] if row["figure"] == "fve")


def test_a_table_of_scores_has_score_null_and_part_of_the_way(results: Path) -> None:
    table = next(one for one in tables(read_results(results)) if one.title.startswith("worth") and "fid" in one.title)
    assert table.header[:4] == ["SAE", "fve", "null", "of the way"]
    assert {len(row) for row in table.rows} == {len(table.header)}


def test_a_null_is_shown_where_it_is_of_the_same_kind_as_the_others(results: Path) -> None:
    """In the benchmark only some Matryoshka SAEs have null dictionaries; what others have of their own is no match."""
    scores = figures(results, "benchmark")["scores"]
    own = {"sae": "a-k1", "measure": "m", "figure": "f", "score": 1.0, "null": 0.1, "part": 0.5, "nulls": {"own": 0.1}}
    compared = own | {"sae": "b-k1", "null": 0.4, "nulls": {"own": 0.1, "random_encoder": 0.4}}
    assert [one["null"] for one in with_like_nulls([own, compared])] == [None, 0.4]
    assert [one["part"] for one in with_like_nulls([own, compared])] == [None, 0.5]
    assert with_like_nulls([own]) == [own], "with no null dictionaries at all, each has its own"
    shown = {one["sae"] for one in with_like_nulls(scores) if one["figure"] == "fve" and one["null"] is not None}
    assert shown == {one["sae"] for one in scores if set(one["nulls"]) == {"random_encoder"}}


def test_the_benchmark_scores_every_sae_and_the_nulls_of_msae(results: Path) -> None:
    found = figures(results, "benchmark")
    names = {row["sae"] for row in found["rows"]}
    assert {"dense-k6", "sparse-k6", "random-norm_matched-dense-k6", "msae-k6", "batchtopk-k6"} <= names
    assert "detector-k6" in names or "detector-k6" in found["left_out"]
    explained = {row["sae"]: row for row in found["scores"] if row["figure"] == "fve"}
    assert set(explained) == names
    with_null = [name for name, row in explained.items() if set(row["nulls"]) == {"random_encoder"}]
    msae = sorted((name for name in names if name.startswith("msae-")), key=_k)
    assert with_null == msae[1::2], "every second of them"


def test_the_benchmark_has_msae_and_sparse_cores_at_the_l0_of_dense_ones(results: Path) -> None:
    l0 = {row["sae"]: row["l0"] for row in figures(results, "benchmark")["rows"]}
    dense = [value for name, value in l0.items() if name.startswith("dense")]
    for method in ("msae", "sparse"):
        ks = [_k(name) for name in l0 if name.startswith(f"{method}-")]
        assert min(l0[name] for name in l0 if name.startswith(f"{method}-")) < min(dense)
        assert {below(min(dense)), above(max(dense))} <= set(ks)
    assert below(6) in {_k(name) for name in l0 if name.startswith("msae-")}


def test_random_cores_of_the_benchmark_are_at_the_ends_and_the_rest_does_not_depend_on_them(
    lab: Lab, results: Path
) -> None:
    grid = replace(GRID, benchmark_k_factors=(0.5, 1.0, 2.0), measures=("fidelity",))
    rows = {row["sae"]: row for row in PARTS["benchmark"].run(lab, grid, 0)["rows"]}
    for mode in ("dense", "sparse"):
        assert {_k(name) for name in rows if name.startswith(f"random-norm_matched-{mode}-")} == {3, 12}
        assert {_k(name) for name in rows if name.startswith(f"{mode}-")} >= {3, 6, 12}
    alone = {row["sae"]: row for row in figures(results, "benchmark")["rows"]}
    for name in ("dense-k6", "sparse-k6", "msae-k6", "batchtopk-k6"):
        assert rows[name]["fve"] == pytest.approx(alone[name]["fve"], rel=1e-5), "kept with six digits"


def _k(name: str) -> int:
    """Return the sparsity that an SAE is named after."""
    return int(name.rpartition("-k")[2])


def test_saes_that_train_as_long_as_detectors_and_their_sae_are_at_their_l0(results: Path) -> None:
    found, l0 = figures(results, "longer"), {row["sae"]: row["l0"] for row in figures(results, "paper")["rows"]}
    assert found["tokens"] == 2 * TRAIN.tokens
    detectors, *free = found["rows"]
    assert detectors["l0"] == l0["detector-k6"]
    assert len(free) == 2
    assert all(row["n_core"] == 0 for row in free)
    if found["price"] is not None:
        assert min(row["fve"] for row in free) <= found["price"] + detectors["fve"] <= max(row["fve"] for row in free)


def test_two_runs_are_compared_and_random_rows_beside_them(results: Path) -> None:
    pairs = {pair["what"]: pair for pair in figures(results, "consistency")["pairs"]}
    assert {"prefix-0", "first core, capped", "random rows", "the same without a core"} <= set(pairs)
    for pair in pairs.values():
        assert -1 <= pair["encoder_cosine"] <= 1
        assert 0 <= pair["share_found"] <= 1
    assert pairs["random rows"]["share_found"] == 0


def test_what_is_not_frozen_is_compared_beside_every_core(results: Path, directory: Path) -> None:
    pairs = {pair["what"]: pair for pair in figures(results, "consistency")["pairs"]}
    cores = ("distilled detectors", "detectors of the first core", "random detectors", "a distilled dense core")
    assert all(pairs[f"the rest beside {core}"]["sizes"] == pairs["the same without a core"]["sizes"] for core in cores)
    assert not figures(results, "consistency")["left_out"]
    frozen: dict[str, set[bytes]] = {}
    for run in (directory / "runs").glob("transfer-*/msae-k6/.."):  # the baselines of this part alone
        for sae in run.glob("*detector-k6"):
            frozen.setdefault(sae.name, set()).add(SAE.load(sae).W_enc_core.numpy().tobytes())
    assert len(frozen) >= 3
    assert all(len(rows) == 1 for rows in frozen.values()), "SAEs of all seeds share each core, random ones too"


def test_the_same_latents_in_another_order_agree_fully(planted: Planted, lab: Lab) -> None:
    sae = lab.start(BASE).sae
    one, other = (latents(lab, sae, slots) for slots in (torch.arange(8), torch.arange(8).flip(0)))
    alike = compare(one, other)
    assert alike["share_found"] == 1
    assert alike["encoder_cosine"] == pytest.approx(1)
    assert compare(one, one._replace(encoder_CD=-one.encoder_CD))["share_found"] == 0


def test_what_two_parts_need_is_trained_once(results: Path, directory: Path, lab: Lab) -> None:
    before = {path.name for path in (directory / "runs").iterdir()}
    assert lab.start(BASE).directory.name in before
    PARTS["capped"].run(lab, GRID, 0)
    assert {path.name for path in (directory / "runs").iterdir()} == before


def test_scores_of_a_shared_sae_follow_the_rule_that_is_asked_for(lab: Lab) -> None:
    one, other = (
        lab.start(replace(lab.base, attribution=replace(lab.base.attribution, quantile_over=over)))
        for over in QuantileOver
    )
    assert one.directory == other.directory
    assert torch.equal(one.attribution.scores_P, one.attribution.over(QuantileOver.ALL).scores_P)
    assert torch.equal(other.attribution.scores_P, other.attribution.over(QuantileOver.ACTIVE).scores_P)
    assert not torch.equal(one.attribution.scores_P, other.attribution.scores_P)


def test_what_was_kept_is_not_run_again(results: Path, lab: Lab) -> None:
    def never() -> Json:
        raise AssertionError("it was run again")

    settings = settings_of("paper", lab, GRID)
    kept_or_run(results, "paper", 0, settings, never)
    with pytest.raises(ConfigError, match="was made with other settings:\n  store: was"):
        kept_or_run(results, "paper", 0, settings | {"store": "another"}, never)


def test_a_distillation_that_fails_keeps_the_cycles_before(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attribute = distilling._score

    def failing(config: DistillConfig, store: Store, here: Path, sae: SAE, cycle: int, comms: Comms) -> Attribution:
        if cycle == 2:
            raise CycleFailed(cycle, "collapsed", "Try a smaller k.")
        return attribute(config, store, here, sae, cycle, comms)

    monkeypatch.setattr(distilling, "_score", failing)
    here = Lab(lab.store, replace(BASE, cycles=3), tmp_path)
    found = here.follow(here.base)
    assert "collapsed" in found.failure
    assert found.distilled is None
    assert [cycle["cycle"] for cycle in by_cycle(found)] == [0, 1]
    kept = sparsity.run(here, replace(GRID, k_factors=(1.0,), sparsity_cycles=3), 0)
    assert [cycle["cycle"] for cycle in kept["cycles"]] == [0, 1]
    assert list(kept["failures"]) == [str(BASE.k)]


def test_seeds_are_repetitions_with_a_spread(results: Path) -> None:
    spread = over_seeds(read_results(results), "paper", ["fve"])["dense-k6"]["fve"]
    assert spread is not None
    assert spread.n == 2
    assert spread.sd is not None
    assert spread.sd > 0
    made = tables(read_results(results))
    assert len([table for table in made if table.title.endswith(": fidelity")]) == 2, "benchmark, worth"
    assert len(made) == len(ON_PLANTED) + 2 * len(GRID.measures), "a table for each part, and its scores"
    assert "±" in next(table for table in made if table.title.startswith("paper")).markdown()
