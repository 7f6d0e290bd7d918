"""The planted benchmark from end to end: SAEs, cores, nulls, tables and the command."""

import json
from pathlib import Path

import pytest

from dmsae.cli import main
from dmsae.config import to_dict
from dmsae.cores.attribution import AttributionConfig
from dmsae.distillation.config import DistillConfig
from dmsae.errors import ConfigError
from dmsae.evaluation.planted import PlantedConfig
from dmsae.experiments import planted_benchmark as module
from dmsae.experiments.planted_benchmark import PlantedBenchmarkConfig, PlantedResult, planted_benchmark
from dmsae.experiments.planted_tables import planted_tables
from dmsae.training.config import TrainConfig

TINY = PlantedBenchmarkConfig(
    PlantedConfig(
        d_model=24, n_features=24, n_pairs=2, n_families=2, train_rows=8000, heldout_rows=2000, pair_rows=2000
    ),
    DistillConfig(
        width=48,
        k=2,
        nesting=(24, 48),
        cycles=1,
        attribution=AttributionConfig(batch_size=256, n_bootstrap=0),
        train=TrainConfig(tokens=120 * 256, batch_size=256, lr=1e-2, device="cpu"),
    ),
)
SAES = ["dense-k2", "random-norm_matched-dense-k2", "msae-k2", "detector-k2", "random-detector-k2"]
CORES = [
    "distilled dense",
    "distilled detector",
    "attribution",
    "firing_rate",
    "mean_activation",
    "random_subset",
]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planted")


@pytest.fixture(scope="module")
def result(where: Path) -> PlantedResult:
    return planted_benchmark(TINY, where, seeds=(3,))


def test_every_sae_and_core_is_there_beside_its_null(result: PlantedResult) -> None:
    assert [one.sae for one in result.saes] == SAES
    assert [one.core for one in result.cores] == CORES
    for sae in result.saes:
        assert sae.seed == 3
        assert set(sae.attribution) == {"all", "active", "rate", "mean"}
        assert sae.untrained.share_found <= 0.1
        assert sae.attribution_untrained["all"].auc is not None
        assert 0 <= sae.recovery.f1 <= 1
    for core in result.cores:
        assert core.chance == 0.25
        assert core.recovery.precision <= core.recovery.share_features <= 1
    assert result.cores[0].recovery.n_latents == result.cores[2].recovery.n_latents


def test_trained_saes_find_what_untrained_ones_do_not(result: PlantedResult) -> None:
    msae = next(one for one in result.saes if one.sae == "msae-k2")
    for figure in ("mcc_signed", "mcc_absolute", "f1", "share_found"):
        assert getattr(msae.recovery, figure) > getattr(msae.untrained, figure) + 0.15, figure
    ranking = msae.attribution["all"]
    assert ranking.auc is not None
    assert ranking.auc_random_high is not None
    assert ranking.auc > ranking.auc_random_high


def test_a_finished_benchmark_is_not_run_again(
    result: PlantedResult, where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmsae.training.passes.Pass._loop", lambda *_: pytest.fail("something was trained again"))
    again = planted_benchmark(TINY, where, seeds=(3,))
    assert again == result
    kept = json.loads((where / "planted.json").read_text())
    assert kept["config"]["distill"] == json.loads(json.dumps(to_dict(TINY.distill)))
    assert [one["recovery"]["f1"] for one in kept["saes"]] == [one.recovery.f1 for one in result.saes]


def test_tables_show_every_figure(result: PlantedResult) -> None:
    recovery, rankings, cores = planted_tables(result)
    assert [row[0] for row in recovery.rows] == [row[0] for row in rankings.rows] == SAES
    assert [row[0] for row in cores.rows] == CORES
    for table in (recovery, rankings, cores):
        assert all(len(row) == len(table.header) for row in table.rows)
    first = result.saes[0]
    assert f"{first.recovery.f1:.2f} ({first.untrained.f1:.2f})" in recovery.rows[0]


def test_seeds_are_given_once(tmp_path: Path) -> None:
    for seeds in ((), (1, 1)):
        with pytest.raises(ConfigError, match="seeds"):
            planted_benchmark(TINY, tmp_path, seeds)
    assert not list(tmp_path.iterdir())


def test_the_command_prints_the_tables(
    result: PlantedResult, where: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def finished(*given: object) -> PlantedResult:
        asked.append(given[:3])
        return result

    monkeypatch.setattr(module, "planted_benchmark", finished)
    main(["evaluate", "planted", "--out", str(where), "--seeds", "3"])
    assert asked == [(None, where, (3,))]
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*SAES, *CORES, "planted.json"))
