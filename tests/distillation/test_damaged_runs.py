"""A run whose files were damaged, edited or exchanged: each is named, and none is taken for what it was."""

import json
import shutil
from pathlib import Path

import pytest

from dmsae.cores.attribution import AttributionConfig
from dmsae.cores.core import Core
from dmsae.distillation.config import DistillConfig
from dmsae.distillation.distill import distill
from dmsae.distillation.status import stages
from dmsae.errors import CheckpointError, DmsaeError
from dmsae.sae.sae import SAE
from dmsae.training.config import TrainConfig
from planted import Planted, planted_store

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = DistillConfig(
    width=64,
    k=2,
    nesting=(16, 64),
    cycles=2,
    train=TrainConfig(tokens=60 * 64, batch_size=64, lr=3e-3, log_every=5, device="cpu"),
    attribution=AttributionConfig(quantile=0.95, batch_size=64, n_bootstrap=5),
)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return planted_store(tmp_path_factory.mktemp("planted") / "store", n_rows=4096)


@pytest.fixture(scope="module")
def finished(planted: Planted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("distilled") / "run"
    distill(CONFIG, planted.store, directory)
    return directory


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_every_file_is_named_when_it_is_emptied(planted: Planted, run: Path) -> None:
    names = [path.relative_to(run) for path in sorted(run.rglob("*")) if path.is_file()]
    decisive = [name for name in names if name.name not in (".lock", "timing.jsonl") and name.parts[0] != "distilled"]
    assert len(decisive) >= 3 * 9
    for name in decisive:
        content = (run / name).read_bytes()
        (run / name).write_bytes(b"")
        with pytest.raises(DmsaeError, match=name.name):
            distill(CONFIG, planted.store, run)
        (run / name).write_bytes(content)
    distill(CONFIG, planted.store, run)


@pytest.mark.parametrize("name", ["sae/fidelity.json", "sae/status.json", "sae/metrics.jsonl", "../summary.json"])
def test_an_edited_number_is_not_reported(planted: Planted, run: Path, name: str) -> None:
    path = (run / "cycle-1" / name).resolve()
    text = path.read_text()
    at = next(i for i, letter in enumerate(text) if letter == "." and text[i + 1].isdigit())
    path.write_text(text[: at + 1] + str((int(text[at + 1]) + 1) % 10) + text[at + 2 :])
    with pytest.raises(CheckpointError, match=path.name):
        distill(CONFIG, planted.store, run)


@pytest.mark.parametrize("name", ["attribution", "core", "sae/sae", "sae/status", "sae/fidelity", "sae/metrics"])
def test_a_file_of_another_cycle_is_refused(planted: Planted, run: Path, name: str) -> None:
    for path in (run / "cycle-1" / name).parent.glob(f"{Path(name).name}.*"):
        shutil.copy(path, run / "cycle-2" / path.relative_to(run / "cycle-1"))
    with pytest.raises(CheckpointError, match=f"cycle-2/{name}"):
        distill(CONFIG, planted.store, run)


def test_an_sae_of_another_cycle_is_refused_by_whoever_opens_it(run: Path) -> None:
    for suffix in ("json", "safetensors"):
        shutil.copy(run / "cycle-1" / "sae" / f"sae.{suffix}", run / "cycle-2" / "sae")
    with pytest.raises(CheckpointError, match=r"cycle-2/sae/sae\.json was made for another .*cycle-2/config"):
        SAE.load(run / "cycle-2" / "sae")


def test_another_core_in_the_place_of_the_distilled_one_is_refused(run: Path) -> None:
    shutil.rmtree(run / "distilled")
    shutil.copytree(run / "cycle-1", run / "distilled", ignore=shutil.ignore_patterns("sae", "config*"))
    facts = json.loads((run / "distilled" / "core.json").read_text())
    assert facts["cycle"] == 1
    with pytest.raises(CheckpointError, match=r"distilled/core\.json"):
        Core.load(run)


def test_status_names_a_damaged_file(run: Path) -> None:
    (run / "cycle-1" / "sae" / "status.json").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"cycle-1/sae/status\.json.*trains this SAE again"):
        stages(run)


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "distill", "cycles": 10**12},
        {"kind": "distill", "cycles": "three"},
        {"kind": "distill", "cycles": -1},
        {"kind": "train"},
        {"kind": "train", "schedule": [], "saes": 3},
        {"kind": ["train"]},
        {},
    ],
)
def test_status_of_an_absurd_run_is_an_error_in_no_time(tmp_path: Path, settings: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        stages(tmp_path)
