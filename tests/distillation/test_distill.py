"""Algorithm 1: what is selected, what survives a restart, and that a killed run ends like one that was not."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dmsae.config import to_dict
from dmsae.cores.attribution import Attribution, AttributionConfig
from dmsae.cores.core import Core
from dmsae.disk import layout
from dmsae.disk.files import sha256_of
from dmsae.disk.run import claimed, read_settings
from dmsae.distillation.distill import Cycle0, CycleReport, DistillConfig, distill
from dmsae.distillation.status import StageState, stages
from dmsae.distillation.transfer import k_noncore
from dmsae.errors import BusyError, ConfigError, TrainingError
from dmsae.sae.config import DenseCore, core_first
from dmsae.sae.objective import BatchResult
from dmsae.sae.sae import SAE, read_made_from
from dmsae.training.config import TrainConfig
from dmsae.training.learner import Learner
from dmsae.training.metrics import read_metrics
from planted import MODEL, Planted, planted_store

pytestmark = pytest.mark.usefixtures("one_thread")
TRAIN = TrainConfig(tokens=200 * 256, batch_size=256, lr=4e-3, log_every=50, device="cpu")
CONFIG = DistillConfig(
    width=96,
    k=2,
    nesting=(24, 96),
    cycles=2,
    train=TRAIN,
    attribution=AttributionConfig(quantile=0.99, batch_size=256),
)
SHORT = DistillConfig(
    width=64,
    k=2,
    nesting=(16, 64),
    cycles=2,
    train=TrainConfig(tokens=60 * 64, batch_size=64, lr=3e-3, log_every=5, checkpoint_seconds=0.0, device="cpu"),
    attribution=AttributionConfig(quantile=0.95, batch_size=64),
)
NARROW = replace(SHORT, width=32, k=4, nesting=(16, 32), cycles=1, center_input=False)
"""A dictionary of which the core takes so large a share that a transfer would lower k."""


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return planted_store(tmp_path_factory.mktemp("planted") / "store")


@pytest.fixture(scope="module")
def run(planted: Planted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("distilled") / "run"
    distill(CONFIG, planted.store, directory)
    return directory


def files_of(directory: Path) -> dict[str, bytes]:
    """Return every file of a run except its lock and its timings."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in (layout.LOCK, layout.TIMING)
    }


@pytest.mark.parametrize("seed", range(3))
def test_directions_that_carry_gradient_are_recovered(seed: int, tmp_path: Path) -> None:
    """Half of the planted directions carry loss gradient; the other half fire as often but carry none."""
    planted = planted_store(tmp_path / "store", seed=seed)
    core = distill(replace(CONFIG, seed=seed), planted.store, tmp_path / "run").distilled
    # Only within the space that the data spans: outside of it (half of all dimensions) encoder rows meet only noise.
    inside = torch.nn.functional.normalize(core.encoder_CD @ planted.directions.T, dim=1)
    cosine, nearest = inside.max(dim=1)
    assert cosine.median() >= 0.97
    assert (nearest < planted.n_read).float().mean() >= 0.9
    assert len(set(nearest.tolist()) & set(range(planted.n_read))) >= planted.n_read - 1


def test_the_distilled_core_holds_the_rows_that_both_of_the_last_cores_hold(run: Path) -> None:
    """Rows are compared bit by bit, so that nothing rests on the lineage that the run itself keeps."""
    before, last = (Core.load(run / f"cycle-{cycle}") for cycle in (CONFIG.cycles - 1, CONFIG.cycles))
    distilled = Core.load(run / layout.DISTILLED)
    shared = rows_of(before) & rows_of(last)
    assert rows_of(distilled) == shared
    assert 0 < len(shared) < len(rows_of(before) | rows_of(last))


def test_lineage_says_where_a_row_was_learned_and_which_cores_hold_it(run: Path) -> None:
    cores = [Core.load(run / f"cycle-{cycle}") for cycle in range(CONFIG.cycles + 1)]
    learned = [SAE.load(run / f"cycle-{cycle}").W_enc for cycle in range(CONFIG.cycles + 1)]
    for core in (*cores, Core.load(run / layout.DISTILLED)):
        for latent, row in zip(core.lineage, core.encoder_CD, strict=True):
            assert torch.equal(row, learned[latent.birth_cycle][latent.birth_index])
            assert latent.birth_index >= SAE.load(run / f"cycle-{latent.birth_cycle}").config.n_core
            holders = [one.cycle for one in cores[: core.cycle + 1] if row.numpy().tobytes() in rows_of(one)]
            assert list(latent.selected_in) == holders


def rows_of(core: Core) -> set[bytes]:
    """Return the encoder rows of a core, bit by bit."""
    return {row.numpy().tobytes() for row in core.encoder_CD}


def test_each_cycle_is_trained_with_exactly_the_core_before_it(run: Path) -> None:
    for cycle in range(1, CONFIG.cycles + 1):
        core, sae = Core.load(run / f"cycle-{cycle - 1}"), SAE.load(run / f"cycle-{cycle}" / "sae")
        assert torch.equal(sae.W_enc_core, core.encoder_CD)
        assert sae.config.prefixes == core_first(CONFIG.nesting, len(core))


class Start(NamedTuple):
    """A training as it was before its first step."""

    weights: dict[str, Tensor]
    batch_BD: Tensor
    """The first batch, on the training scale."""
    n_moments: int
    """Parameters that the optimiser already holds moments of."""


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[Start]:
    """A list to which each training adds itself before its first step."""
    seen: list[Start] = []
    advance = Learner.advance

    def watched(learner: Learner, step: int, x_BD: Tensor, batch_variance: float) -> BatchResult:
        if step == 0:
            weights = {name: tensor.clone() for name, tensor in learner.sae.state_dict().items()}
            seen.append(Start(weights, x_BD.clone(), len(learner.optimiser.state)))
        return advance(learner, step, x_BD, batch_variance)

    monkeypatch.setattr(Learner, "advance", watched)
    return seen


def n_shared_directions(first: Tensor, second: Tensor) -> int:
    """Return how many rows of one matrix point exactly the way of a row of the other."""
    one, two = (torch.nn.functional.normalize(rows.double(), dim=1) for rows in (first, second))
    return int((one @ two.T > 1 - 1e-6).any(1).sum())


def test_every_cycle_starts_from_its_own_weights_and_data_order(
    planted: Planted, tmp_path: Path, starts: list[Start]
) -> None:
    distill(SHORT, planted.store, tmp_path / "run")
    assert len(starts) == SHORT.cycles + 1
    for i, one in enumerate(starts):
        for other in starts[:i]:
            assert n_shared_directions(one.weights["W_dec"], other.weights["W_dec"]) == 0
            assert n_shared_directions(one.weights["W_enc_noncore"], other.weights["W_enc_noncore"]) == 0
            assert n_shared_directions(one.batch_BD, other.batch_BD) < len(one.batch_BD) / 8
    seeds = {read_settings(tmp_path / "run" / f"cycle-{cycle}")["train"]["seed"] for cycle in range(SHORT.cycles + 1)}
    assert len(seeds) == SHORT.cycles + 1


def test_only_the_encoder_rows_of_the_core_survive_a_restart(
    planted: Planted, tmp_path: Path, starts: list[Start]
) -> None:
    """Two runs begin from SAEs of which every tensor differs, but which lead to the same choice of latents."""
    distill(NARROW, planted.store, tmp_path / "trained")
    one = SAE.load(tmp_path / "trained" / "cycle-0")
    two = SAE.load(tmp_path / "trained" / "cycle-0")
    for tensor in (two.W_enc_noncore, two.b_enc, two.threshold):
        tensor.mul_(2)  # exact, and so are the codes: all of them are doubled
    two.W_dec.neg_()  # attribution takes absolute values
    two.b_dec.add_(1)  # the encoder does not subtract it
    starts.clear()
    for name, sae in (("one", one), ("two", two)):
        sae.save(tmp_path / name)
        distill(replace(NARROW, cycle0=Cycle0(str(tmp_path / name))), planted.store, tmp_path / f"from-{name}")
    first, second = (start.weights for start in starts)
    assert torch.equal(first["W_enc_core"], Core.load(tmp_path / "from-one" / "cycle-0").encoder_CD)
    assert torch.equal(second["W_enc_core"], 2 * first["W_enc_core"])
    assert [name for name in first if not torch.equal(first[name], second[name])] == ["W_enc_core"]
    fresh = torch.cat([first["W_dec"], first["W_enc_noncore"]])
    assert n_shared_directions(fresh, torch.cat([one.W_enc, one.W_dec, -one.W_dec])) == 0
    assert torch.equal(starts[0].batch_BD, starts[1].batch_BD)
    assert [start.n_moments for start in starts] == [0, 0]


def test_k_counts_the_other_latents_beside_a_core(planted: Planted, tmp_path: Path) -> None:
    """Distillation gives all of k to the non-core latents; only a transfer rounds it down to their share."""
    config = DistillConfig(width=64, k=4, nesting=(16, 64))
    assert k_noncore(4, 64, 24) == 3
    assert config.sae(8, 24).core == DenseCore(24, k_noncore=4)
    assert config.sae(8, 24).k_selected == 4

    distill(NARROW, planted.store, tmp_path / "run")
    n_core = len(Core.load(tmp_path / "run" / "cycle-0"))
    assert k_noncore(NARROW.k, NARROW.width, n_core) < NARROW.k
    saved = json.loads((tmp_path / "run" / "cycle-1" / "sae" / "sae.json").read_text())["config"]
    assert saved["core"] == {"n": n_core, "k_noncore": NARROW.k, "kind": "dense"}
    assert read_metrics(tmp_path / "run" / "cycle-1" / "sae")[0].l0_noncore == NARROW.k


def test_summary_and_reports_agree_with_the_artifacts(planted: Planted, run: Path) -> None:
    heard: list[CycleReport] = []
    again = distill(CONFIG, planted.store, run, heard.append)
    summary = json.loads((run / "summary.json").read_text())
    assert [report.core.size for report in heard] == [len(core) for core in again.cores]
    assert [cycle["core"]["size"] for cycle in summary["cycles"]] == [len(core) for core in again.cores]
    for report, before in zip(heard[1:], again.cores, strict=False):
        assert report.core.kept + report.core.new == report.core.size
        assert report.core.kept + report.core.dropped == len(before)
        assert report.n_frozen == len(before)
        assert 0 <= report.l0_core <= report.n_frozen
    assert heard[0].n_frozen == 0


def test_a_finished_run_is_left_as_it_is(planted: Planted, run: Path) -> None:
    before = files_of(run)
    distill(CONFIG, planted.store, run)
    assert files_of(run) == before
    assert all(stage.state is StageState.DONE for stage in stages(run))


def test_other_settings_are_refused_with_the_difference(planted: Planted, run: Path) -> None:
    before = files_of(run)
    with pytest.raises(ConfigError, match=r"distill\.coverage: was 0\.9, now 0\.5"):
        distill(replace(CONFIG, coverage=0.5), planted.store, run)
    assert files_of(run) == before


def test_a_second_process_is_kept_out(planted: Planted, run: Path) -> None:
    with claimed(run, read_settings(run)), pytest.raises(BusyError, match="in use"):
        distill(CONFIG, planted.store, run)


def test_cycle_0_may_be_an_sae_of_ours(planted: Planted, run: Path, tmp_path: Path) -> None:
    source = run / "cycle-0" / "sae"
    imported = distill(replace(CONFIG, cycle0=Cycle0(str(source))), planted.store, tmp_path / "run")
    assert torch.equal(imported.cores[0].encoder_CD, Core.load(run / "cycle-0").encoder_CD)
    origin = read_made_from(tmp_path / "run" / "cycle-0" / "sae")["imported_from"]
    assert origin["sha256"] == sha256_of(source / "sae.safetensors")
    with pytest.raises(ConfigError, match=r"k is given as 4, but .* says that it is 2"):
        distill(replace(CONFIG, cycle0=Cycle0(str(source), k=4)), planted.store, tmp_path / "other")


def test_cycle_0_of_another_model_is_refused(planted: Planted, run: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    other = to_dict(replace(MODEL, weights_sha256="other"))
    SAE.load(run / "cycle-0" / "sae").save(source, {"model": other})
    with pytest.raises(ConfigError, match="weights_sha256 other"):
        distill(replace(CONFIG, cycle0=Cycle0(str(source))), planted.store, tmp_path / "run")


def test_a_core_that_leaves_no_room_says_what_to_change(planted: Planted, tmp_path: Path) -> None:
    crowded = replace(SHORT, width=20, nesting=(16, 20))
    with pytest.raises(TrainingError, match=r"core grew to \d+ latents .* Lower coverage"):
        distill(crowded, planted.store, tmp_path / "run")


def test_a_cycle_that_collapses_stops_the_run_and_says_so(planted: Planted, tmp_path: Path) -> None:
    doomed = TrainConfig(tokens=60 * 64, batch_size=64, lr=1e-6, collapse_fve=0.99, device="cpu")
    with pytest.raises(TrainingError, match="Cycle 0 collapsed"):
        distill(replace(SHORT, train=doomed), planted.store, tmp_path / "run")
    first = stages(tmp_path / "run")[0]
    assert first.state is StageState.FAILED
    assert first.note.startswith("collapsed at step")


def test_impossible_settings_name_the_field(planted: Planted, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cycles = 0"):
        DistillConfig(cycles=0)
    with pytest.raises(ConfigError, match=r"coverage = 1\.5"):
        DistillConfig(coverage=1.5)
    with pytest.raises(ConfigError, match=r"train\.seed = 7"):
        DistillConfig(train=TrainConfig(seed=7))
    with pytest.raises(ConfigError, match=r"nesting = \(80, 64\)"):
        distill(DistillConfig(width=64, k=2, nesting=(80, 64)), planted.store, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_attribution_and_sae_of_a_cycle_can_be_read_on_their_own(run: Path) -> None:
    attribution, sae = Attribution.load(run / "cycle-1"), SAE.load(run / "cycle-1" / "sae")
    assert len(attribution.scores_P) == sae.config.prefixes[0]


def start(store: Path, directory: Path) -> subprocess.Popen[str]:
    """Start the short distillation in a separate process, and return it."""
    code = (
        "import sys, torch; from pathlib import Path; torch.set_num_threads(1)\n"
        "from test_distill import SHORT, distill\n"
        "from dmsae.activations.store import Store\n"
        "distill(SHORT, Store.open(Path(sys.argv[1])), Path(sys.argv[2]))\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, str(store), str(directory)],
        cwd=Path(__file__).parent,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def test_a_run_killed_at_random_moments_ends_like_one_that_was_not(planted: Planted, tmp_path: Path) -> None:
    """Moments are counted in files that a run has written: a busy machine cannot move all of them past its end."""
    with start(planted.store.path, tmp_path / "whole") as child:
        assert child.wait() == 0
    n_files = len(files_of(tmp_path / "whole"))
    choose = random.Random(0)
    for _ in range(5):
        n_before = count_files(tmp_path / "killed")
        with start(planted.store.path, tmp_path / "killed") as child:
            target = n_before + choose.randint(1, n_files // 8)
            while count_files(tmp_path / "killed") < target:
                assert child.poll() is None
                time.sleep(0.001)
            time.sleep(choose.uniform(0, 0.1))
            assert child.poll() is None
            child.send_signal(signal.SIGKILL)
    with start(planted.store.path, tmp_path / "killed") as child:
        assert child.wait() == 0
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")


def count_files(directory: Path) -> int:
    """Return how many files there are that a run does not remove again. Others may come and go meanwhile."""
    passing = (layout.LOCK, layout.CHECKPOINT)
    names = [name for _, _, inside in os.walk(directory) for name in inside]
    return sum(name not in passing and not name.endswith(".tmp") for name in names)


def test_imported_sae_is_copied_whole(planted: Planted, run: Path, tmp_path: Path) -> None:
    """A run stays complete when the checkpoint that it started from is gone."""
    source = tmp_path / "source"
    SAE.load(run / "cycle-0" / "sae").save(source)
    config = replace(CONFIG, cycle0=Cycle0(str(source)))
    distill(config, planted.store, tmp_path / "run")
    assert SAE.load(tmp_path / "run" / "cycle-0" / "sae").config == SAE.load(source).config
