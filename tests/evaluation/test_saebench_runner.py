"""SAEBench is driven from outside: jobs go in, events and results come back. Here a fake worker plays the package."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conftest import Recorder
from dmsae.activations.harvest import harvest
from dmsae.activations.splits import Split
from dmsae.errors import BenchmarkError, ConfigError
from dmsae.evaluation.saebench.evals import EVALS, read_changes, require_evals, settings_of
from dmsae.evaluation.saebench.heldout import heldout_text
from dmsae.evaluation.saebench.job import Event, How, Job, JobModel, JobSAE, layer_of, require_name
from dmsae.evaluation.saebench.results import Outcome, Summary, read_figures
from dmsae.evaluation.saebench.runner import run_saebench
from dmsae.evaluation.saebench.words import sample_words
from dmsae.evaluation.saebench.worker import Events, Tee
from fake_saebench import KEYS, fake_environment, write_plan

MODEL = JobModel("owner/Tiny-Model", Path("/models/tiny"), "d" * 64, 3)
SAES = (JobSAE("one", Path("/saes/one"), "1" * 64), JobSAE("two", Path("/saes/two"), "2" * 64))


class Bench:
    """A fake environment, and a directory for results."""

    def __init__(self, directory: Path) -> None:
        self.environment, self.out, self.progress = fake_environment(directory), directory / "results", Recorder()

    def run(self, *evals: str, plan: dict[str, Any] | None = None, **settings: Any) -> Any:
        write_plan(self.out, plan)
        self.progress = Recorder()
        given: dict[str, Any] = {"environment": self.environment, "progress": self.progress} | settings
        return run_saebench(SAES, MODEL, self.out, evals or ("core",), **given)

    def calls(self) -> list[str]:
        return (self.out / "calls.txt").read_text().split()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_results_come_back_with_figures_of_ours_beside_theirs(bench: Bench) -> None:
    summary = bench.run("core")
    assert [(one.sae, one.state, one.seconds) for one in summary.outcomes] == [
        ("one", "done", 2.5),
        ("two", "done", 2.5),
    ]
    assert summary.outcomes[0].figures == {"L0": 31.5, "loss recovered": 0.9, "FVE": 0.5}
    saved = json.loads((bench.out / "summary.json").read_text())
    assert saved["outcomes"][0]["figures"]["L0"] == 31.5
    assert saved["settings"]["core"]["dataset"] == "Skylion007/openwebtext"
    assert not saved["not_run"]


def test_evals_run_one_after_the_other_in_the_order_of_the_list(bench: Bench) -> None:
    bench.run("meta_structure", "core")
    assert bench.calls() == ["core", "meta_structure"]


def test_what_is_finished_is_not_run_again(bench: Bench) -> None:
    bench.run("core", plan={"two": "failed"})
    assert [one.state for one in bench.run("core").outcomes] == ["done", "done"]
    assert [one.state for one in bench.run("core").outcomes] == ["kept", "kept"]
    assert len(bench.calls()) == 2


def test_a_result_with_other_settings_is_made_again(bench: Bench) -> None:
    bench.run("core")
    again = bench.run("core", changes={"core": {"context_size": 64}})
    assert [one.state for one in again.outcomes] == ["done", "done"]


def test_a_result_of_another_version_of_the_package_is_made_again(bench: Bench) -> None:
    installed = bench.environment / "lib" / "python3.11" / "site-packages"
    for version in ("0.6.0", "0.7.0"):
        shutil.rmtree(installed, ignore_errors=True)
        (installed / f"sae_bench-{version}.dist-info").mkdir(parents=True)
        (installed / f"sae_bench-{version}.dist-info" / "METADATA").write_text(f"Name: sae-bench\nVersion: {version}\n")
        assert [one.state for one in bench.run("core").outcomes] == ["done", "done"]
        assert [one.state for one in bench.run("core").outcomes] == ["kept", "kept"]


@pytest.mark.parametrize(
    "change",
    [
        {"how": How(seed=1)},
        {"how": How(dtype="bfloat16")},
        {"how": How(prepend_bos=False)},
        {"how": How(data=Path("data"))},
        {"settings": {"k": 2}},
        {"model": replace(MODEL, layer=4)},
        {"versions": {"sae-bench": "0.7.0"}},
    ],
)
def test_a_result_depends_on_all_that_can_change_it(change: dict[str, Any]) -> None:
    job = Job("core", SAES, MODEL, {"k": 1}, Path("out"), Path("cache"))
    assert job.key(SAES[0]) != job.key(SAES[1])
    assert replace(job, **change).key(SAES[0]) != job.key(SAES[0])
    assert replace(job, out=Path("elsewhere"), how=How(device="cuda", force=True)).key(SAES[0]) == job.key(SAES[0])


def test_an_eval_that_cannot_run_is_listed_with_its_reason(bench: Bench) -> None:
    summary = bench.run("autointerp", "core", plan={"one": "not run", "two": "not run"})
    assert summary.not_run() == {"core": "It needs a judge.", "autointerp": "It needs a judge."}
    assert bench.progress.warnings.count("one: It needs a judge.") == 2


def test_one_sae_that_fails_does_not_stop_the_other(bench: Bench) -> None:
    summary = bench.run("core", plan={"one": "failed"})
    assert [one.state for one in summary.outcomes] == ["failed", "done"]
    assert not summary.not_run()


def test_a_worker_that_dies_leaves_what_it_finished(bench: Bench) -> None:
    summary = bench.run("core", plan={"two": "die"})
    assert [one.state for one in summary.outcomes] == ["done", "failed"]
    assert "status 9" in summary.outcomes[1].reason
    assert "the last words" in summary.outcomes[1].reason


def test_a_refused_setting_is_our_error(bench: Bench) -> None:
    with pytest.raises(ConfigError, match=r"Unknown setting core\.foo"):
        bench.run("core", plan={"one": "refuse"})


def test_progress_is_shown(bench: Bench) -> None:
    bench.run("core")
    assert bench.progress.bars == [("core", 2)]
    assert bench.progress.notes == ["core (1 of 1)"]


def test_without_an_environment_the_error_says_what_to_make(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="make saebench-env"):
        run_saebench(SAES, MODEL, tmp_path, ["core"], environment=tmp_path / "nowhere")


def test_an_environment_without_the_package_says_so(bench: Bench) -> None:
    (bench.environment / "bin" / "python").write_text('#!/bin/sh\necho "No module named sae_bench" >&2\nexit 1\n')
    with pytest.raises(BenchmarkError, match="make saebench-env"):
        bench.run("core")


def test_a_result_that_is_none_is_refused(bench: Bench) -> None:
    with pytest.raises(BenchmarkError, match="it lacks eval_id"):
        bench.run("core", plan={"keys": [key for key in KEYS if key != "eval_id"]})


def test_a_result_of_another_sae_is_refused(bench: Bench) -> None:
    bench.run("core")
    job = Job("core", SAES, MODEL, {}, bench.out, bench.out)
    job.result(SAES[0]).write_bytes(job.result(SAES[1]).read_bytes())
    with pytest.raises(BenchmarkError, match="is the result of 'two', not of 'one'"):
        read_figures(job, SAES[0])


def test_a_misleading_directory_is_pointed_out(bench: Bench, tmp_path: Path) -> None:
    bench.out = tmp_path / "scratch"
    bench.run("core")
    assert "'scr'" in bench.progress.warnings[0]


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    job = Job("core", SAES, MODEL, {"context_size": 64, "dataset": "x"}, tmp_path, tmp_path, How(data=tmp_path, seed=7))
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job
    (tmp_path / "job.json").write_text('{"eval": "core"}')
    with pytest.raises(BenchmarkError, match="is not a job"):
        Job.read(tmp_path / "job.json")


def test_anything_else_that_is_printed_is_progress() -> None:
    assert Event.of("  50%|#####     |\n") == Event("progress", text="50%|#####     |")
    assert Event.of("17\n") == Event("progress", text="17")
    assert Event.of(Event("done", "one", "", 1.5).line()) == Event("done", "one", "", 1.5)


@pytest.mark.parametrize(("name", "why"), [("a/b", "file name"), ("", "file name"), ("tpp-1", "tpp"), ("descr", "scr")])
def test_names_that_the_package_would_misread_are_refused(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        require_name(name)


def test_hooks_are_blocks() -> None:
    assert layer_of("model.layers.8") == layer_of("transformer.h.8") == 8
    with pytest.raises(ConfigError, match="residual stream"):
        layer_of("model.layers.8.mlp")


def test_settings_are_published_unless_changed(tmp_path: Path) -> None:
    published = settings_of(["core", "absorption"], small=False)
    assert published["core"]["n_eval_sparsity_variance_batches"] == 2000
    assert published["absorption"]["words"] is None
    file = tmp_path / "settings.toml"
    file.write_text("[core]\ncontext_size = 64\n")
    changed = settings_of(["core"], True, read_changes(file))["core"]
    assert (changed["context_size"], changed["dataset"], changed["eval_batch_size_prompts"]) == (64, "heldout", 16)


def test_unknown_names_are_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'absorption'"):
        require_evals(["absorbtion"])
    with pytest.raises(ConfigError, match="Did you mean 'core'"):
        settings_of(["core"], False, {"cores": {}})
    with pytest.raises(ConfigError, match="No evals"):
        require_evals([])
    with pytest.raises(ConfigError, match="no settings file"):
        read_changes(tmp_path / "none.toml")


def test_every_eval_has_figures() -> None:
    assert all(one.figures and one.about for one in EVALS.values())
    assert len(EVALS) == 10


def test_figures_say_which_way_is_better() -> None:
    figures = [one.figures for one in EVALS.values()]
    neither = {name for of in figures for name, one in of.items() if one.ceiling is None and not one.better}
    assert neither == {"L0", "all dimensions", "AUC, all dimensions"}, "the last two are ceilings themselves"
    assert all(one.ceiling in of for of in figures for one in of.values() if isinstance(one.ceiling, str))


def test_the_part_of_the_way_takes_its_ceiling_from_the_result() -> None:
    probing, without = ({"top 1": 0.7, "all dimensions": 0.8}, {"top 1": 0.6})
    outcomes = [
        Outcome("sparse_probing", "one", "done", probing, 1.0),
        Outcome("sparse_probing", "one-untrained", "done", without, 1.0),
        Outcome("tpp", "one", "done", {"TPP, 20 latents": 0.2}, 1.0),
        Outcome("tpp", "one-untrained", "done", {"TPP, 20 latents": 0.1}, 1.0),
    ]
    top, dense, tpp = Summary({}, {}, outcomes, {"one": {"untrained": "one-untrained"}}).rows()
    assert (top.null, top.ceiling) == (0.6, 0.8)
    assert top.part == pytest.approx(0.5)
    assert (dense.null, dense.part) == (None, None)
    assert (tpp.null, tpp.part) == (0.1, None), "it has a null to beat and no ceiling"


def test_heldout_text_is_the_stores_and_no_part_of_it_is_read_twice(tiny_config: Any, tmp_path: Path) -> None:
    store = harvest(tiny_config(), root=tmp_path)
    text = heldout_text(store, tmp_path / "cache")
    lines = [json.loads(line)["text"] for line in (text.directory / "heldout.jsonl").read_text().splitlines()]
    tokens = store.tokens(Split.HELDOUT)["tokens"]
    assert text.n_tokens == int((tokens >= 0).sum())
    assert sum(len(line.split()) for line in lines) == int((tokens > 2).sum())
    fitted = text.fitted(settings_of(["core"], True)["core"] | {"eval_batch_size_prompts": 2, "context_size": 16})
    assert fitted["n_eval_reconstruction_batches"] == min(10, text.n_tokens // 32)


def test_words_keep_every_letter() -> None:
    words = [f"{letter}{i}" for letter in "abcdefghijklmnopqrstuvwxyz" for i in range(30 if letter in "xz" else 300)]
    chosen = sample_words(words, 1000, seed=0)
    assert chosen == sample_words(list(reversed(words)), 1000, seed=0)
    assert len(set(chosen)) == len(chosen)
    assert {letter: sum(word[0] == letter for word in chosen) for letter in "axz"} == {"a": 41, "x": 20, "z": 20}
    assert sample_words(words, None, seed=0) == words
    with pytest.raises(BenchmarkError, match="starts with z"):
        sample_words([word for word in words if word[0] != "z"], 100, seed=0)


def test_the_worker_passes_on_bars_and_nothing_else() -> None:
    channel, log = io.StringIO(), io.StringIO()
    tee = Tee(log, Events(channel))
    for text in (
        "UserWarning: a | b\n",
        "\rReconstruction Batches:  17%|█▋    | 1/6 [01:53<09:27]",
        "  0%|   | 0/28 [0]",
    ):
        tee.write(text)
    assert [Event.of(line).text for line in channel.getvalue().splitlines()] == ["Reconstruction Batches 1/6"]
    assert log.getvalue().startswith("UserWarning")


def test_a_data_set_here_is_found_from_elsewhere(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").mkdir()
    monkeypatch.chdir(tmp_path)
    summary = bench.run("core", changes={"core": {"dataset": "text"}})
    assert summary.settings["core"]["dataset"] == str(tmp_path / "text")
