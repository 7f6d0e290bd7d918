"""The worker runs the real evals on a tiny model: results are valid, and kept until something changes."""

import json
import os
import sys
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from benched import SKIP, job_of, sae_of_kind, save
from conftest import build_documents, build_model, build_tokenizer

pytest.importorskip("sae_bench", reason=SKIP)

from sae_bench.sae_bench_utils.graphing_utils import find_eval_results_files, get_core_results, get_eval_results
from transformers import AutoConfig

from dmsae.errors import ConfigError
from dmsae.evaluation.saebench import lens, needs, package
from dmsae.evaluation.saebench.evals import EVALS, settings_of
from dmsae.evaluation.saebench.job import Event, How, Job, JobModel, JobSAE
from dmsae.evaluation.saebench.results import read_figures
from dmsae.evaluation.saebench.runner import run_saebench
from dmsae.evaluation.saebench.worker import Worker

TINY_CORE = {
    "n_eval_reconstruction_batches": 2,
    "n_eval_sparsity_variance_batches": 3,
    "eval_batch_size_prompts": 4,
    "context_size": 16,
    "exclude_special_tokens_from_reconstruction": True,
    "compute_featurewise_density_statistics": True,
    "compute_featurewise_weight_based_metrics": True,
}


class Listener:
    """Remembers what a worker says."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def say(self, event: Event) -> None:
        self.events.append(event)

    def last(self) -> Event:
        return self.events[-1]


@pytest.fixture(autouse=True)
def _come_back() -> Any:
    """The worker changes the current directory."""
    before = Path.cwd()
    yield
    os.chdir(before)


@pytest.fixture
def saes(tmp_path: Path) -> list[JobSAE]:
    x_BD = torch.randn(512, 16, generator=torch.Generator().manual_seed(2))
    return [save(sae_of_kind(kind, x_BD), tmp_path / "saes" / kind) for kind in ("msae", "detector")]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A data set of running text."""
    directory = tmp_path / "text"
    directory.mkdir()
    lines = [json.dumps({"text": document}) for document in build_documents(200)]
    (directory / "text.jsonl").write_text("\n".join(lines))
    return directory


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A stand-in for a data set of the Hub: biographies by profession and gender, of words that mean nothing."""
    directory = tmp_path / "data" / "LabHC" / "bias_in_bios"
    directory.mkdir(parents=True)
    for split, each, seed in (("train", 64, 0), ("test", 32, 1)):
        texts = iter(build_documents(28 * 2 * each, seed))
        rows = [
            {"hard_text": f"w{profession} w{30 + gender} {next(texts)}", "profession": profession, "gender": gender}
            for profession in range(28)
            for gender in range(2)
            for _ in range(each)
        ]
        (directory / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "data"


def run(job: Job) -> Listener:
    listener = Listener()
    Worker(job, listener).run()  # type: ignore[arg-type]
    return listener


def test_core_writes_valid_results_that_the_package_can_plot(
    tiny_model: Path, saes: list[JobSAE], text: Path, tmp_path: Path
) -> None:
    job = job_of("core", saes, tiny_model, 0, tmp_path / "out", dataset=str(text), **TINY_CORE)
    assert [event.kind for event in run(job).events] == ["ready", "start", "done", "start", "done"]
    for sae in saes:
        package.require_valid("core", job.result(sae))
        figures = read_figures(job, sae)
        assert {"L0", "loss recovered", "FVE", "FVE (theirs)"} <= set(figures)
    os.chdir(job.out)
    files = find_eval_results_files(["core"])
    assert set(get_core_results(files)) == {"msae_custom_sae", "detector_custom_sae"}
    plotted = get_eval_results(files)
    assert plotted["detector_custom_sae"]["sae_class"] == "dmsae_detector"
    assert [event.kind for event in run(job).events] == ["ready", "kept", "kept"]
    assert not (job.out / "unfinished").exists()


def test_a_null_is_a_kind_of_its_own_in_the_packages_plots(
    tiny_model: Path, saes: list[JobSAE], text: Path, tmp_path: Path
) -> None:
    null = replace(saes[0], null_kind="untrained")
    job = job_of("core", [null], tiny_model, 0, tmp_path / "out", dataset=str(text), **TINY_CORE)
    assert run(job).last().kind == "done"
    assert json.loads(job.result(null).read_text())["sae_cfg_dict"]["architecture"] == "null_untrained"


def test_results_do_not_depend_on_which_saes_are_evaluated_together(
    tiny_model: Path, saes: list[JobSAE], text: Path, tmp_path: Path
) -> None:
    together = job_of("core", saes, tiny_model, 0, tmp_path / "a", dataset=str(text), **TINY_CORE)
    alone = job_of("core", saes[1:], tiny_model, 0, tmp_path / "b", dataset=str(text), **TINY_CORE)
    run(together), run(alone)
    assert read_figures(together, saes[1]) == read_figures(alone, saes[1])


def test_an_eval_that_fails_says_why_and_the_next_sae_is_tried(
    tiny_model: Path, saes: list[JobSAE], text: Path, tmp_path: Path
) -> None:
    broken = JobSAE("broken", tmp_path / "nowhere", "0" * 64)
    job = job_of("core", [broken, saes[0]], tiny_model, 0, tmp_path / "out", dataset=str(text), **TINY_CORE)
    failed, done = (event for event in run(job).events if event.kind in ("failed", "done"))
    assert "holds no saved sae" in failed.text
    assert done.sae == "msae"


def test_an_error_that_core_swallows_is_not_lost(tiny_model: Path, saes: list[JobSAE], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "text.jsonl").write_text('{"words": "no column that it knows"}\n')
    settings = TINY_CORE | {"dataset": str(tmp_path / "empty")}
    event = run(job_of("core", saes[:1], tiny_model, 0, tmp_path / "out", **settings)).last()
    assert event.kind == "failed"
    assert "column" in event.text


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("core", "data set Skylion007/openwebtext"),
        ("sparse_probing", "data sets LabHC/bias_in_bios, canrager/amazon_reviews_mcauley_1and5, codeparrot"),
        ("scr", "data sets LabHC/bias_in_bios, canrager/amazon_reviews_mcauley_1and5:"),
        ("tpp", "data sets LabHC/bias_in_bios"),
        ("ravel", "only the models gemma-2-2b and pythia-160m-deduped"),
        ("unlearning", "a prompt only for gemma-2-2b-it"),
        ("autointerp", "the key in $OPENAI_API_KEY"),
    ],
)
def test_an_eval_that_cannot_run_here_names_what_is_missing(
    name: str, lacks: str, tiny_model: Path, saes: list[JobSAE], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    settings = settings_of([name], small=False)[name]
    events = run(job_of(name, saes[:1], tiny_model, 0, tmp_path / "out", **settings)).events
    assert [event.kind for event in events] == ["ready", "not run"]
    assert lacks in events[-1].text


@pytest.mark.parametrize("name", ["google/gemma-2-2b", "google/gemma-2-2b-it"])
def test_unlearning_puts_saes_of_gemma_into_the_instruct_model(
    name: str, tiny_model: Path, saes: list[JobSAE], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the package is called with is looked at where it is called: the model cannot be had here."""
    from sae_bench.evals.unlearning import main

    called: list[Any] = []
    monkeypatch.setattr(main, "run_eval", lambda config, *_, **__: called.append(config))
    monkeypatch.setattr(needs, "_why_not", lambda *_: "")
    monkeypatch.setattr(needs, "_has_model", lambda *_: True)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / needs.FORGET).write_text("")
    job = job_of("unlearning", saes[:1], tiny_model, 0, tmp_path / "out", data=tmp_path / "data", llm_batch_size=4)
    run(replace(job, model=replace(job.model, name=name)))
    assert [(config.model_name, config.llm_batch_size) for config in called] == [("gemma-2-2b-it", 4)]


def test_ravel_is_called_with_the_model_and_a_place_for_what_it_keeps(
    tiny_model: Path, saes: list[JobSAE], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not run: it needs another version of transformers, and a model that cannot be had here."""
    from sae_bench.evals.ravel import main

    called: list[tuple[Any, Any]] = []
    monkeypatch.setattr(main, "run_eval", lambda config, *_, artifacts_path: called.append((config, artifacts_path)))
    monkeypatch.setattr(needs, "_why_not", lambda *_: "")
    monkeypatch.setattr("transformers.__version__", "4.57.0")
    job = job_of("ravel", saes[:1], tiny_model, 0, tmp_path / "out", llm_batch_size=4, top_n_entities=50)
    run(replace(job, model=replace(job.model, name="google/gemma-2-2b")))
    ((config, place),) = called
    assert (config.model_name, config.llm_dtype, config.random_seed) == ("gemma-2-2b", "float32", 42)
    assert (config.llm_batch_size, config.top_n_entities) == (4, 50)
    assert config.artifact_dir == place
    assert Path(place).is_relative_to(job.cache / "ravel")


def test_ravel_says_that_it_needs_another_version_of_transformers(
    tiny_model: Path, saes: list[JobSAE], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.__version__", "5.22.2")
    job = job_of("ravel", saes, tiny_model, 0, tmp_path)
    assert needs.missing(job, "gemma-2-2b").endswith("It needs an environment with transformers below 5.")


def test_unlearning_of_gemma_saes_says_when_the_instruct_model_cannot_be_had(
    tiny_model: Path, saes: list[JobSAE], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DMSAE_OFFLINE", "1")
    (tmp_path / needs.FORGET).write_text("")
    job = job_of("unlearning", saes, tiny_model, 0, tmp_path, data=tmp_path)
    assert "SAEs of gemma-2-2b in google/gemma-2-2b-it: not on this machine" in needs.missing(job, "gemma-2-2b")
    monkeypatch.setattr(needs, "_why_not", lambda *_: "")
    assert not needs.missing(job, "gemma-2-2b-it")


OFFICIAL = "EleutherAI/pythia-70m-deduped"


def test_a_published_model_is_read_from_its_directory_and_keeps_its_name(
    tiny_model: Path, saes: list[JobSAE], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    local = job_of("core", saes[:1], tiny_model, 0, tmp_path / "local", dataset=str(text), **TINY_CORE)
    published = replace(local, model=replace(local.model, name=OFFICIAL), out=tmp_path / "published")
    assert run(local).last().kind == "done"
    assert [event.text for event in run(published).events if event.kind == "failed"] == []
    assert read_figures(published, saes[0]) == read_figures(local, saes[0])
    result = json.loads(published.result(saes[0]).read_text())
    assert result["eval_config"]["model_name"] == "pythia-70m-deduped"


def test_other_models_are_not_read_from_that_directory(tiny_model: Path, tmp_path: Path) -> None:
    model = JobModel(OFFICIAL, tiny_model, "0" * 64, 0)
    build_model(hidden_size=32).save_pretrained(tmp_path)
    before = AutoConfig.from_pretrained
    with lens.from_directory(model):
        assert AutoConfig.from_pretrained(OFFICIAL).hidden_size == 16
        assert AutoConfig.from_pretrained(tmp_path).hidden_size == 32
    assert AutoConfig.from_pretrained == before


def test_only_a_data_set_that_a_setting_names_can_be_changed(
    tiny_model: Path, saes: list[JobSAE], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("transformers.__version__", "4.57.0")
    settings = settings_of(["core"], small=False)["core"]
    core, ravel = (job_of(name, saes, tiny_model, 0, tmp_path, **settings) for name in ("core", "ravel"))
    below = "put a copy into <owner>/<name> below --data"
    assert needs.missing(core, "gemma-2-2b").endswith(f"{below}, or change core.dataset.")
    assert needs.missing(ravel, "gemma-2-2b").endswith(f"{below}.")


def test_unknown_settings_are_refused_with_the_nearest(tiny_model: Path, saes: list[JobSAE], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'context_size'"):
        run(job_of("core", saes, tiny_model, 0, tmp_path / "out", context_sise=3))


@pytest.mark.parametrize("name", EVALS)
@pytest.mark.parametrize("small", [False, True])
def test_our_settings_are_ones_that_the_package_has(name: str, small: bool) -> None:
    assert set(settings_of([name], small)[name]) <= package.known_settings(name)


def test_meta_structure_needs_only_the_decoder(tiny_model: Path, saes: list[JobSAE], tmp_path: Path) -> None:
    settings = {"train_steps": 20, "train_batch_size": 32, "autocast": False}
    job = job_of("meta_structure", saes[:1], tiny_model, 0, tmp_path / "out", **settings)
    assert run(job).last().kind == "done"
    assert read_figures(job, saes[0])["decoder FVE"] < 1


BIOS = "LabHC/bias_in_bios_class_set1"
TINY_PROBES = {"dataset_names": [BIOS], "context_length": 16, "llm_batch_size": 32, "sae_batch_size": 32}


def test_sparse_probing_reads_copies_of_hub_data(
    tiny_model: Path, saes: list[JobSAE], hub: Path, tmp_path: Path
) -> None:
    settings = TINY_PROBES | {"probe_train_set_size": 64, "probe_test_set_size": 32, "k_values": [1, 2]}
    job = job_of("sparse_probing", saes, tiny_model, 0, tmp_path / "out", data=hub, **settings)
    assert [event.text for event in run(job).events if event.kind == "failed"] == []
    assert 0 <= read_figures(job, saes[1])["top 1"] <= 1


@pytest.mark.parametrize("name", ["scr", "tpp"])
def test_scr_and_tpp_run_on_copies_of_hub_data(
    name: str, tiny_model: Path, saes: list[JobSAE], hub: Path, tmp_path: Path
) -> None:
    pairs = {BIOS: [("professor", "nurse")]}
    sizes = {"train_set_size": 96, "test_set_size": 48, "n_values": [2, 20], "probe_lr": 0.03}
    settings = TINY_PROBES | sizes | {"column1_vals_lookup": pairs}
    job = job_of(name, saes[:1], tiny_model, 0, tmp_path / "out", data=hub, **settings)
    assert [event.text for event in run(job).events if event.kind == "failed"] == []
    assert job.result(saes[0]).parent.name == name
    assert list(read_figures(job, saes[0])) == list(EVALS[name].figures)


def test_sae_probes_shares_the_models_activations(saes: list[JobSAE], tmp_path: Path) -> None:
    model = tmp_path / "long-model"
    build_model(max_position_embeddings=2048).save_pretrained(model)
    build_tokenizer().save_pretrained(model)
    settings = {"dataset_names": ["96_spam_is"], "ks": [1, 2]}
    job = job_of("sparse_probing_sae_probes", saes, model, 0, tmp_path / "out", **settings)
    assert [event.text for event in run(job).events if event.kind == "failed"] == []
    assert len(list(job.cache.rglob("96_spam_is_blocks.0.hook_resid_post.pt"))) == 1
    figures = read_figures(job, saes[0])
    assert 0.3 <= figures["top 1"] <= 1
    assert figures["all dimensions"] > 0.5


class Judge(BaseHTTPRequestHandler):
    """Answers like gpt-4o-mini, and always the same."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": "1, 2"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "gpt-4o-mini", "choices": [choice]}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def test_autointerp_asks_the_judge_that_is_named(
    tiny_model: Path, saes: list[JobSAE], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "n_latents": 3,
        "total_tokens": 1500,
        "llm_context_size": 16,
        "llm_batch_size": 8,
        "buffer": 2,
    }
    settings |= {"dataset_name": str(text), "dead_latent_threshold": 1, "scoring": True}
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{server.server_address[1]}/v1")
        job = job_of("autointerp", saes[:1], tiny_model, 0, tmp_path / "out", **settings)
        events = run(job).events
        server.shutdown()
    assert [event.text for event in events if event.kind == "failed"] == []
    assert 0 <= read_figures(job, saes[0])["score"] <= 1


def test_a_process_of_its_own_is_driven_from_outside(
    tiny_model: Path, saes: list[JobSAE], text: Path, tmp_path: Path
) -> None:
    job = job_of("core", saes, tiny_model, 0, tmp_path)
    where: dict[str, Any] = {"environment": Path(sys.prefix), "how": How(device="cpu")}
    changes = {"core": TINY_CORE | {"dataset": str(text)}}
    summary = run_saebench(saes, job.model, tmp_path / "out", ["core", "ravel"], changes=changes, **where)
    assert [outcome.state for outcome in summary.outcomes] == ["done", "done", "not run", "not run"]
    assert list(summary.not_run()) == ["ravel"]
    assert "Reconstruction Batches" in (tmp_path / "out" / "logs" / "core.log").read_text()
    with pytest.raises(ConfigError, match=r"Unknown setting core\.foo"):
        run_saebench(saes, job.model, tmp_path / "out", ["core"], changes={"core": {"foo": 1}}, **where)
