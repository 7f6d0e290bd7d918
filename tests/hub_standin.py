"""A small server that stands in for the Hugging Face Hub: repositories are made, committed to, listed and downloaded.

It speaks as much of the Hub's protocol as `huggingface_hub` needs for models: making a repository, asking how each file
is to be uploaded, LFS uploads, commits, what is in a repository, and files. There is one commit and no history.
"""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

OWN_ENVIRONMENT = "runs in an environment of its own: make test-formats"
"""Why tests with real packages are skipped."""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class StandIn(BaseHTTPRequestHandler):
    """Answers for repositories that are directories below one root, `<root>/<owner>/<name>`."""

    root: Path
    large: dict[str, bytes]
    """What was uploaded through LFS, by SHA-256."""

    def log_message(self, *_: object) -> None:
        """Keep quiet."""

    def do_GET(self) -> None:
        """Answer what is in a repository, or one of its files."""
        path = self.path.split("?")[0].strip("/").split("/")
        if path[:2] == ["api", "models"] and (repo := self._repo(path[2:4])):
            if path[4:5] == ["tree"]:
                return self._json([self._entry(repo, file) for file in self._files(repo)])
            siblings = [
                {"rfilename": self._name(repo, file), "size": file.stat().st_size} for file in self._files(repo)
            ]
            info = {"id": "/".join(path[2:4]), "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}
            return self._json(info)
        if path[2:3] == ["resolve"] and (repo := self._repo(path[:2])):
            return self._file(repo / "/".join(path[4:]))
        return self._answer(404, b"", {"x-error-code": "RepoNotFound"})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Make a repository, say how files are uploaded, or take a commit."""
        path, body = self.path.split("?")[0].strip("/"), self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.headers.get("authorization", "") != "Bearer hf_of_the_tests":
            return self._json({"error": "Invalid username or password."}, 401)
        if path == "api/repos/create":
            name = json.loads(body)["organization"] + "/" + json.loads(body)["name"]
            (self.root / name).mkdir(parents=True, exist_ok=True)
            return self._json({"url": f"http://{self.headers['host']}/{name}"})
        if path == "api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path.endswith("/info/lfs/objects/batch"):
            url = f"http://{self.headers['host']}/lfs/"
            objects = [
                {**one, "actions": {"upload": {"href": url + one["oid"]}}} for one in json.loads(body)["objects"]
            ]
            return self._json({"transfer": "basic", "objects": objects})
        parts = path.split("/")
        if parts[4:5] == ["preupload"]:
            files = json.loads(body)["files"]
            modes = {True: "lfs", False: "regular"}
            return self._json(
                {
                    "files": [
                        {
                            "path": f["path"],
                            "uploadMode": modes[f["path"].endswith(".safetensors")],
                            "shouldIgnore": False,
                        }
                        for f in files
                    ]
                }
            )
        if parts[4:5] == ["commit"]:
            return self._commit(self.root / "/".join(parts[2:4]), body)
        return self._answer(404, b"", {})

    def do_PUT(self) -> None:
        """Take a large file."""
        data = self.rfile.read(int(self.headers["content-length"]))
        digest = hashlib.sha256(data).hexdigest()
        assert self.path.endswith(digest), "the file that was announced is another one"
        self.large[digest] = data
        self._answer(200, b"", {})

    def _commit(self, repo: Path, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                data = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                data = self.large[value["oid"]]
            else:
                continue
            (repo / value["path"]).parent.mkdir(parents=True, exist_ok=True)
            (repo / value["path"]).write_bytes(data)
        url = f"http://{self.headers['host']}/{repo.parent.name}/{repo.name}/commit/{COMMIT}"
        self._json({"commitUrl": url, "commitOid": COMMIT})

    def _repo(self, parts: list[str]) -> Path | None:
        repo = self.root / "/".join(parts)
        return repo if len(parts) == 2 and repo.is_dir() else None

    def _files(self, repo: Path) -> list[Path]:
        return sorted(path for path in repo.rglob("*") if path.is_file())

    def _name(self, repo: Path, file: Path) -> str:
        return str(file.relative_to(repo))

    def _entry(self, repo: Path, file: Path) -> dict[str, Any]:
        return {"type": "file", "path": self._name(repo, file), "size": file.stat().st_size, "oid": file.name}

    def _file(self, file: Path) -> None:
        if not file.is_file():
            return self._answer(404, b"", {"x-error-code": "EntryNotFound", "x-repo-commit": COMMIT})
        data = file.read_bytes()
        return self._answer(200, data, {"etag": f'"{hashlib.sha1(data).hexdigest()}"', "x-repo-commit": COMMIT})

    def _json(self, value: Any, status: int = 200) -> None:
        self._answer(status, json.dumps(value).encode(), {"content-type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"content-length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def hub(root: Path) -> Iterator[dict[str, str]]:
    """Run the server on a directory of repositories, and yield the environment of a process that takes it for the Hub.

    `huggingface_hub` reads the address of the Hub when it is imported, so this has to be another process.
    """
    handler = type("OurStandIn", (StandIn,), {"root": root, "large": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    removed = ("DMSAE_OFFLINE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
    kept = {name: value for name, value in os.environ.items() if name not in removed}
    try:
        yield kept | {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(root / "cache"),
            "HF_TOKEN": "hf_of_the_tests",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }
    finally:
        server.shutdown()
        server.server_close()


_LOOP = """
import contextlib, io, json, sys, traceback
for line in sys.stdin:
    printed, failed = io.StringIO(), ""
    with contextlib.redirect_stdout(printed):
        try:
            exec(json.loads(line), {})
        except Exception:
            failed = traceback.format_exc()
    print(json.dumps([printed.getvalue(), failed]), flush=True)
"""


@contextmanager
def process(environment: dict[str, str]) -> Iterator[Callable[[str], str]]:
    """Start a process, and yield a function that runs code in it and returns what that printed.

    One process serves many tests: importing everything takes longer than any of them.
    """
    command = [sys.executable, "-c", _LOOP]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as started:
        assert started.stdin is not None
        assert started.stdout is not None
        given, answers = started.stdin, started.stdout

        def run(code: str) -> str:
            given.write(json.dumps(code) + "\n")
            given.flush()
            printed, failed = json.loads(answers.readline())
            assert not failed, failed
            return str(printed)

        yield run
        given.close()
