"""Algorithm 1: what is selected, what crosses a restart, and that a killed run ends like one never killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dmsae.cores.attribution import Attribution, AttributionConfig
from dmsae.cores.core import Core
from dmsae.disk.files import sha256_of
from dmsae.disk.run import claimed, read_settings
from dmsae.distillation.distill import DistillConfig, distil, distilled_directory
from dmsae.distillation.status import stages
from dmsae.errors import BusyError, ConfigError, TrainingError
from dmsae.sae.sae import SAE, SAEConfig, core_first, load_sae, read_made_from, save_sae
from dmsae.training.schedule import TrainConfig
from planted import Planted, planted_store

pytestmark = pytest.mark.usefixtures("one_thread")
TRAIN = TrainConfig(tokens=200 * 256, batch_size=256, lr=4e-3, log_every=50, device="cpu")
CONFIG = DistillConfig(
    width=96,
    k=2,
    prefixes=(24, 96),
    cycles=2,
    train=TRAIN,
    attribution=AttributionConfig(quantile=0.99, batch_size=256),
)
SHORT = DistillConfig(
    width=64,
    k=2,
    prefixes=(16, 64),
    cycles=2,
    train=TrainConfig(tokens=60 * 64, batch_size=64, lr=3e-3, log_every=5, checkpoint_seconds=0.0, device="cpu"),
    attribution=AttributionConfig(quantile=0.95, batch_size=64),
)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return planted_store(tmp_path_factory.mktemp("planted") / "store")


@pytest.fixture(scope="module")
def run(planted: Planted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("distilled") / "run"
    distil(CONFIG, planted.store, directory)
    return directory


def files_of(directory: Path) -> dict[str, bytes]:
    """Everything in a run but its lock and what the clock said."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in (".lock", "timing.jsonl")
    }


@pytest.mark.parametrize("seed", range(3))
def test_directions_that_carry_gradient_are_recovered(seed: int, tmp_path: Path) -> None:
    """Half of the planted directions carry loss gradient; the other half fire as often and carry none."""
    planted = planted_store(tmp_path / "store", seed=seed)
    core = distil(replace(CONFIG, seed=seed), planted.store, tmp_path / "run").distilled
    # In the space that the data fills: what an encoder row is outside of it (half its dimensions) meets only noise.
    inside = torch.nn.functional.normalize(core.encoder_CD @ planted.directions.T, dim=1)
    cosine, nearest = inside.max(dim=1)
    assert cosine.median() >= 0.97
    assert (nearest < planted.n_loud).float().mean() >= 0.9
    assert len(set(nearest.tolist()) & set(range(planted.n_loud))) >= planted.n_loud - 1


def test_cores_are_nested_by_lineage_and_rows_never_change(run: Path) -> None:
    cores = [Core.load(run / f"cycle-{cycle}") for cycle in range(CONFIG.cycles + 1)]
    distilled = Core.load(distilled_directory(run))
    assert set(distilled.identities) == set(cores[-1].identities) & set(cores[-2].identities)
    first = {}
    for core in cores:
        for identity, row in zip(core.identities, core.encoder_CD, strict=True):
            first.setdefault(identity, row)
    for identity, row in zip(distilled.identities, distilled.encoder_CD, strict=True):
        assert torch.equal(row, first[identity])


def test_each_cycle_is_trained_with_exactly_the_core_before_it(run: Path) -> None:
    for cycle in range(1, CONFIG.cycles + 1):
        core, sae = Core.load(run / f"cycle-{cycle - 1}"), load_sae(run / f"cycle-{cycle}" / "sae")
        assert torch.equal(sae.W_enc_core, core.encoder_CD)
        assert sae.config.prefixes == core_first(CONFIG.prefixes, len(core))


def test_only_the_frozen_rows_cross_a_restart() -> None:
    """Two cores of one size, one seed: all that differs between the fresh SAEs is the frozen rows."""
    config = SAEConfig(d_model=8, width=32, k=2, prefixes=core_first((8, 32), 5), n_core=5)
    one, two = (
        SAE.init(config, torch.Generator().manual_seed(3), torch.full((5, 8), value)).state_dict()
        for value in (1.0, 2.0)
    )
    different = [name for name in one if not torch.equal(one[name], two[name])]
    assert different == ["W_enc_core"]


def test_summary_and_reports_agree_with_the_artifacts(planted: Planted, run: Path) -> None:
    heard = []
    again = distil(CONFIG, planted.store, run, heard.append)
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
    distil(CONFIG, planted.store, run)
    assert files_of(run) == before
    assert all(stage.state == "done" for stage in stages(run))


def test_other_settings_are_refused_with_the_difference(planted: Planted, run: Path) -> None:
    before = files_of(run)
    with pytest.raises(ConfigError, match=r"distill\.coverage: was 0\.9, now 0\.5"):
        distil(replace(CONFIG, coverage=0.5), planted.store, run)
    assert files_of(run) == before


def test_a_second_process_is_kept_out(planted: Planted, run: Path) -> None:
    with claimed(run, read_settings(run)), pytest.raises(BusyError, match="in use"):
        distil(CONFIG, planted.store, run)


def test_cycle_0_may_be_an_sae_of_ours(planted: Planted, run: Path, tmp_path: Path) -> None:
    source = run / "cycle-0" / "sae"
    imported = distil(replace(CONFIG, cycle0=str(source)), planted.store, tmp_path / "run")
    assert torch.equal(imported.cores[0].encoder_CD, Core.load(run / "cycle-0").encoder_CD)
    said = read_made_from(tmp_path / "run" / "cycle-0" / "sae")["imported_from"]
    assert said["sha256"] == sha256_of(source / "sae.safetensors")
    with pytest.raises(ConfigError, match=r"k is given as 4, but .* was trained with 2"):
        distil(replace(CONFIG, cycle0=str(source), k=4), planted.store, tmp_path / "other")


def test_cycle_0_of_another_model_is_refused(planted: Planted, run: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_sae(load_sae(run / "cycle-0" / "sae"), source, {"model": {"weights_sha256": "other", "hook": "nowhere"}})
    with pytest.raises(ConfigError, match="weights_sha256 other"):
        distil(replace(CONFIG, cycle0=str(source)), planted.store, tmp_path / "run")


def test_a_core_that_leaves_no_room_says_what_to_change(planted: Planted, tmp_path: Path) -> None:
    crowded = replace(SHORT, width=20, prefixes=(16, 20))
    with pytest.raises(ConfigError, match=r"core grew to \d+ latents: lower coverage"):
        distil(crowded, planted.store, tmp_path / "run")


def test_a_cycle_that_collapses_stops_the_run_and_says_so(planted: Planted, tmp_path: Path) -> None:
    doomed = TrainConfig(tokens=60 * 64, batch_size=64, lr=1e-6, collapse_fve=0.99, device="cpu")
    with pytest.raises(TrainingError, match="Cycle 0 collapsed"):
        distil(replace(SHORT, train=doomed), planted.store, tmp_path / "run")
    assert stages(tmp_path / "run")[0].state == "collapsed"


def test_impossible_settings_name_the_field(planted: Planted, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cycles = 0"):
        DistillConfig(cycles=0)
    with pytest.raises(ConfigError, match=r"coverage = 1\.5"):
        DistillConfig(coverage=1.5)
    with pytest.raises(ConfigError, match=r"train\.seed = 7"):
        DistillConfig(train=TrainConfig(seed=7))
    with pytest.raises(ConfigError, match="prefixes"):
        distil(DistillConfig(width=64, k=2, prefixes=(80, 64)), planted.store, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_attribution_and_sae_of_a_cycle_can_be_read_alone(run: Path) -> None:
    attribution, sae = Attribution.load(run / "cycle-1"), load_sae(run / "cycle-1" / "sae")
    assert len(attribution.scores_P) == sae.config.prefixes[0]


def start(store: Path, directory: Path) -> subprocess.Popen[str]:
    """Begin the short distillation in a process of its own; it says so when its imports are done."""
    code = (
        "import sys, torch; from pathlib import Path; torch.set_num_threads(1)\n"
        "from test_distill import SHORT, distil\n"
        "from dmsae.activations.store import Store\n"
        "print('ready', flush=True)\n"
        "distil(SHORT, Store.open(Path(sys.argv[1])), Path(sys.argv[2]))\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, str(store), str(directory)],
        cwd=Path(__file__).parent,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def test_killed_at_random_moments_a_run_ends_as_if_never_killed(planted: Planted, tmp_path: Path) -> None:
    with start(planted.store.path, tmp_path / "whole") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        since = time.monotonic()
        assert child.wait() == 0
        whole_seconds = time.monotonic() - since
    choose = random.Random(0)
    kills = 0
    for _ in range(6):
        with start(planted.store.path, tmp_path / "killed") as child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(choose.uniform(0, 0.4 * whole_seconds))
            kills += child.poll() is None
            child.send_signal(signal.SIGKILL)
    assert kills >= 2
    with start(planted.store.path, tmp_path / "killed") as child:
        assert child.wait() == 0
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")


def test_imported_sae_is_copied_whole(planted: Planted, run: Path, tmp_path: Path) -> None:
    """A run stays complete when the checkpoint that it began from is gone."""
    source = tmp_path / "source"
    save_sae(load_sae(run / "cycle-0" / "sae"), source)
    config = replace(CONFIG, cycle0=str(source))
    distil(config, planted.store, tmp_path / "run")
    assert load_sae(tmp_path / "run" / "cycle-0" / "sae").config == load_sae(source).config
