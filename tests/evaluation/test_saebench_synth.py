"""SynthSAEBench from outside: a job goes in, scores come back. Here a fake worker plays the package."""

import json
import sys
from pathlib import Path

import pytest

from conftest import Recorder
from dmsae.commands.evaluate_synth import print_synth
from dmsae.config import from_dict, to_dict
from dmsae.cores.controls import Rule
from dmsae.errors import BenchmarkError, ConfigError
from dmsae.evaluation.saebench.synth import Synth, SynthConfig, SynthJob, SynthScore, run_synth

CONFIG = SynthConfig(n_features=256, d_model=32, width=128, n_core=2)
WORKER = """
import json, sys
from pathlib import Path
assert sys.argv[3] == "dmsae.evaluation.saebench.synth_worker"
job = json.loads(Path(sys.argv[-1]).read_text())
out = Path(job["out"])
print(json.dumps({"kind": "progress", "text": "train 1/2"}), flush=True)
if job["config"]["seed"] == 13:
    print("out of luck", file=sys.stderr)
    sys.exit(3)
with (out / "calls").open("a") as calls:
    calls.write("x")
score = dict(name="msae", l0=5.1, f1=0.8, precision=0.9, recall=0.7, mcc=0.6, uniqueness=0.95, fve=0.75, dead=3)
result = dict(config=job["config"], k=5, true_l0=6.5, scores=[score])
(out / "synth.json").write_text(json.dumps(result))
"""


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    (tmp_path / "worker.py").write_text(WORKER)
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path / "worker.py"}" "$@"\n')
    python.chmod(0o755)
    return tmp_path / "env"


def test_scores_come_back_and_are_kept(environment: Path, tmp_path: Path) -> None:
    out, progress = tmp_path / "out", Recorder()
    synth = run_synth(CONFIG, out, environment, progress)
    assert synth.scores[0].f1 == 0.8
    assert progress.bars == [("SynthSAEBench", 1)]
    assert run_synth(CONFIG, out, environment) == synth
    assert (out / "calls").read_text() == "x"


def test_other_settings_are_run_again(environment: Path, tmp_path: Path) -> None:
    run_synth(CONFIG, tmp_path / "out", environment)
    run_synth(from_dict(SynthConfig, to_dict(CONFIG) | {"seed": 7}), tmp_path / "out", environment)
    assert (tmp_path / "out" / "calls").read_text() == "xx"


def test_a_worker_that_fails_is_an_error_with_its_last_words(environment: Path, tmp_path: Path) -> None:
    unlucky = from_dict(SynthConfig, to_dict(CONFIG) | {"seed": 13})
    with pytest.raises(BenchmarkError, match=r"status 3\. out of luck"):
        run_synth(unlucky, tmp_path / "out", environment)


def test_without_an_environment_the_error_says_what_to_make(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="make saebench-env"):
        run_synth(CONFIG, tmp_path / "out", tmp_path / "nowhere")


def test_damaged_scores_are_an_error(environment: Path, tmp_path: Path) -> None:
    run_synth(CONFIG, tmp_path / "out", environment)
    (tmp_path / "out" / "synth.json").write_text("{}")
    with pytest.raises(BenchmarkError, match="does not hold scores"):
        run_synth(CONFIG, tmp_path / "out", environment)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_core": 4}, "n_core = 4; it must be below 4"),
        ({"rule": Rule.ATTRIBUTION}, "rule = 'attribution'; it must be one of firing_rate"),
        ({"k": 0}, "k = 0"),
        ({"n_features": 100}, "n_features = 100; it must be at least 128"),
    ],
)
def test_impossible_settings_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_dict(SynthConfig, to_dict(CONFIG) | change)


def test_the_published_size_has_the_published_hierarchy() -> None:
    assert SynthConfig.published().n_roots == 128


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    job = SynthJob(CONFIG, tmp_path / "out", tmp_path / "cache")
    assert from_dict(SynthJob, to_dict(job)) == job


def test_scores_have_a_part_of_the_way_from_the_untrained_sae(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    score = SynthScore("msae", 5.1, 0.8, 0.9, 0.7, 0.6, 1.0, 0.75, 3)
    synth = Synth(CONFIG, 5, 6.5, [score, SynthScore("untrained", 5.0, 0.2, 0.4, 0.4, 0.2, 1.0, 0.5, 0)])
    (parts,) = synth.parts()
    assert (parts.f1, parts.mcc, parts.fve) == pytest.approx((0.75, 0.5, 0.5))
    assert parts.uniqueness is None, "the null is at the ceiling"
    synth.save(tmp_path / "synth.json")
    assert json.loads((tmp_path / "synth.json").read_text())["parts"] == [parts._asdict()]
    assert Synth.load(tmp_path / "synth.json") == synth
    print_synth(synth)
    assert "msae  0.750  0.833      0.500   0.500  –       0.500" in capsys.readouterr().out


def test_scores_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    score = SynthScore("msae", 5.1, 0.8, 0.9, 0.7, 0.6, 0.95, 0.75, 3)
    print_synth(Synth(CONFIG, 5, 6.5, [score]))
    shown = capsys.readouterr().out
    assert "0.800" in shown
    assert "k = 5; 6.5 features" in shown
    assert "Part of the way" not in shown, "there is no null"
