"""Models and datasets from the Hub, against a small server that answers as the Hub does.

huggingface_hub reads the address of its server when it is imported, so each test runs in a process of its own.
"""

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import build_documents
from dmsae.activations.harvest import harvest
from dmsae.activations.request import HarvestConfig, HarvestRequest
from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.text.corpus import TextConfig

pytestmark = pytest.mark.usefixtures("one_thread")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """The few answers of the Hub that downloading a model and streaming a dataset ask for."""

    repositories: dict[str, Path]
    """Directories by the repository's address in the API: `models/owner/name`, `datasets/owner/name`."""

    def log_message(self, *_: object) -> None:
        """Keep quiet."""

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        for repository, directory in self.repositories.items():
            api, resolve = f"/api/{repository}", f"/{repository.removeprefix('models/')}/resolve/"
            if path == api or path.startswith(f"{api}/revision/"):
                return self._answer_json(self._info(repository, directory))
            if path.startswith(f"{api}/tree/"):
                return self._answer_json(self._tree(directory) if path.endswith(COMMIT) else [])
            if path.startswith(resolve):
                return self._answer_file(directory / path.removeprefix(resolve).split("/", 1)[1])
        return self._answer(404, b"", {})

    do_HEAD = do_GET

    def _info(self, repository: str, directory: Path) -> dict[str, Any]:
        files = [{"rfilename": path.name} for path in directory.iterdir()]
        return {"id": repository.split("/", 1)[1], "sha": COMMIT, "private": False, "tags": [], "siblings": files}

    def _tree(self, directory: Path) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": path.name}
            for path in directory.iterdir()
        ]

    def _answer_file(self, path: Path) -> None:
        if not path.is_file():
            return self._answer(404, b"", {"x-error-code": "EntryNotFound", "x-repo-commit": COMMIT})
        data = path.read_bytes()
        headers = {"etag": f'"{hashlib.sha1(data).hexdigest()}"', "x-repo-commit": COMMIT}
        if (wanted := self.headers.get("range")) and self.command == "GET":
            first, last = wanted.removeprefix("bytes=").split("-")
            part = data[int(first) : int(last) + 1]
            headers["content-range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
            return self._answer(206, part, headers)
        return self._answer(200, data, headers)

    def _answer_json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), {"content-type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"content-length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "dataset"
    path.mkdir()
    rows: list[dict[str, Any]] = [{"text": text, "n": 1} for text in build_documents(300)]
    rows.insert(7, {"text": None, "n": 1})
    (path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(tiny_model: Path, dataset: Path, tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Return a function that runs code in a process that takes the little server for the Hub."""
    handler = type("OurHub", (Hub,), {"repositories": {"models/us/model": tiny_model, "datasets/us/texts": dataset}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    removed = ("DMSAE_OFFLINE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN")
    environment = {name: value for name, value in os.environ.items() if name not in removed} | {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "hf"),
        "NO_PROXY": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }

    def run(code: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    yield run
    server.shutdown()
    server.server_close()


TEXT = """
from dmsae.errors import DmsaeError
from dmsae.text.corpus import HubText, TextConfig, open_corpus

def error(function):
    try:
        function()
        print("no error")
    except DmsaeError as error:
        print(type(error).__name__, error)
"""
MODEL = """
from dmsae.activations.base_model import ModelConfig, identify
"""


def test_a_model_and_a_dataset_from_the_hub_are_harvested_like_local_ones(
    run: Callable[[str], str], dataset: Path, tiny_config: Callable[..., HarvestConfig], tmp_path: Path
) -> None:
    code = f"""{TEXT}{MODEL}
from pathlib import Path
from dmsae.activations.harvest import harvest
from dmsae.activations.request import HarvestConfig
from dmsae.text.tokens import TokenConfig

config = HarvestConfig(
    model=ModelConfig(name="us/model", hook=0, device="cpu"),
    text=TextConfig(source="hub:us/texts", heldout_fraction=0.2),
    tokens=TokenConfig(context_length=16),
    train_tokens=1000, heldout_tokens=100, pair_tokens=100, shard_tokens=256, dtype="float32",
)
print(harvest(config, Path({str(tmp_path / "hub")!r})).path)
"""
    from_hub = Store.open(Path(run(code).strip()))
    text = TextConfig(source=str(dataset), heldout_fraction=0.2)
    # A null is nothing on the Hub; in a local file a line without text is an error, so it is left out there.
    lines = (dataset / "train.jsonl").read_text().splitlines(keepends=True)
    (dataset / "train.jsonl").write_text("".join(line for line in lines if "null" not in line))
    local = harvest(tiny_config(text=text, train_tokens=1000, heldout_tokens=100, pair_tokens=100), tmp_path / "local")
    assert isinstance(from_hub.request, HarvestRequest)
    assert from_hub.model.revision == from_hub.request.text["revision"] == COMMIT
    assert from_hub.model.weights_sha256 == local.model.weights_sha256
    for split in Split:
        ours, theirs = from_hub.tokens(split), local.tokens(split)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        for a, b in zip(from_hub.batches(split, 100), local.batches(split, 100), strict=True):
            torch.testing.assert_close(a["x"], b["x"])


def test_the_identity_of_a_hub_dataset_names_its_commit(run: Callable[[str], str]) -> None:
    code = f"""{TEXT}
import json
opened = open_corpus(TextConfig(source="hub:us/texts", hub=HubText(revision="main")))
print(json.dumps([opened.source, opened.identity, opened.hint_if_too_small()]))
"""
    source, identity, hint = json.loads(run(code))
    assert (source, hint) == ("hub:us/texts", "")
    assert identity == {
        "kind": "hub",
        "field": "text",
        "dataset": "us/texts",
        "subset": "",
        "split": "train",
        "revision": COMMIT,
    }


def test_what_the_hub_does_not_have_is_a_clear_error(run: Callable[[str], str]) -> None:
    code = f"""{TEXT}{MODEL}
read = lambda **settings: list(open_corpus(TextConfig(source="hub:us/texts", **settings)).documents(0))
error(lambda: open_corpus(TextConfig(source="hub:us/absent")))
error(lambda: read(hub=HubText(split="tset")))
error(lambda: read(hub=HubText(subset="absent")))
error(lambda: read(field="txt"))
error(lambda: read(field="n"))
error(lambda: identify(ModelConfig(name="us/absent")))
"""
    errors = run(code).splitlines()
    expected = [
        ("CorpusError", "'us/absent' cannot be reached"),
        ("CorpusError", "cannot be read", "text.hub.split"),
        ("CorpusError", "cannot be read", "text.hub.subset"),
        ("CorpusError", "has no column 'txt'. Did you mean 'text'"),
        ("CorpusError", "holds int under 'n', expected text"),
        ("ModelError", "'us/absent': no such directory; not found on the Hub either", "Check the name"),
    ]
    assert len(errors) == len(expected), errors
    for line, parts in zip(errors, expected, strict=True):
        assert all(part in line for part in parts), line


def test_an_unreachable_hub_is_a_clear_error(run: Callable[[str], str]) -> None:
    code = f"""
import os
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
{TEXT}{MODEL}
error(lambda: open_corpus(TextConfig(source="hub:us/texts")))
error(lambda: identify(ModelConfig(name="us/model")))
"""
    corpus_error, model_error = run(code).splitlines()
    assert corpus_error.startswith("CorpusError The Hub dataset 'us/texts' cannot be reached")
    assert model_error.startswith("ModelError 'us/model': no such directory; not found on the Hub either")
    assert "the network" in model_error


@pytest.mark.parametrize("before", ["hub._ANSWER_SECONDS = 0.5", 'os.environ["DMSAE_OFFLINE"] = "1"'])
def test_a_hub_that_never_answers_is_not_waited_for(before: str, run: Callable[[str], str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        code = f"""
import os
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:{silent.getsockname()[1]}"
{TEXT}{MODEL}
from dmsae.text import hub
{before}
error(lambda: identify(ModelConfig(name="models/mistyped")))
"""
        assert "'models/mistyped': no such directory; not found on the Hub either" in run(code)


def test_a_model_that_was_downloaded_before_needs_no_network(run: Callable[[str], str]) -> None:
    code = f"""{TEXT}{MODEL}
import os
first = identify(ModelConfig(name="us/model", hook=0))
os.environ["DMSAE_OFFLINE"] = "1"
print(identify(ModelConfig(name="us/model", hook=0)) == first)
"""
    assert run(code).strip() == "True"
