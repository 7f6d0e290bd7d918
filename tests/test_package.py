"""The package that is built: complete, small in what it asks for, and working where nothing else of the project is."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from dmsae.config import recipe_names
from doc_blocks import DOCS, blocks_of

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]
BUILD = "import sys; from setuptools import build_meta; build_meta.{}(sys.argv[1])"


def build(what: str, sources: Path, out: Path) -> Path:
    """Build a distribution from sources with the backend that pip would call, and return the file."""
    out.mkdir(exist_ok=True)
    command = [sys.executable, "-W", "ignore", "-c", BUILD.format(what), str(out)]
    result = subprocess.run(command, cwd=sources, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, built from a copy of what is in the repository."""
    where = tmp_path_factory.mktemp("package")
    sources = where / "sources"
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", sources / "src", ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources / name)
    return build("build_sdist", sources, where / "sdist")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from nothing but the sdist, as pip would."""
    where = tmp_path_factory.mktemp("from-sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(where, filter="data")
    (sources,) = where.iterdir()
    return build("build_wheel", sources, where / "wheel")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that holds the wheel and, to save minutes, sees the dependencies of this one."""
    environment = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    install = ["--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True, capture_output=True)
    (site,) = environment.glob("lib/python*/site-packages")
    # A .pth file adds the folder, but not the editable install of this project that the folder's own .pth files add.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf8")
    return python.parent


def run(command: list[str | Path], where: Path) -> str:
    """Return what a command prints that is run as by a user who has nothing but the environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = kept | {"DMSAE_CACHE": str(where / "cache"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=where, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    package = ROOT / "src" / "dmsae"
    files = {path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    expected = {path.relative_to(package.parent).as_posix() for path in files}
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == expected


def test_what_the_package_asks_for_is_what_it_says(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
    metadata = message_from_bytes(archive.read(name))
    assert metadata["Version"] == PROJECT["version"]
    needed = metadata.get_all("Requires-Dist") or []
    assert len([one for one in needed if "extra ==" not in one]) == len(PROJECT["dependencies"])
    assert set(metadata.get_all("Provides-Extra") or []) == set(PROJECT["optional-dependencies"])


def test_commands_run_where_only_the_wheel_is(installed: Path, tmp_path: Path) -> None:
    assert run([installed / "dmsae", "--version"], tmp_path) == f"dmsae {PROJECT['version']}\n"
    assert ", ".join(recipe_names()) in " ".join(run([installed / "dmsae", "--help"], tmp_path).split())
    found = run([installed / "python", "-c", "import dmsae; print(dmsae.__file__)"], tmp_path)
    assert Path(found.strip()).is_relative_to(installed.parent), "it is the wheel that runs, not the sources"


def test_the_ten_line_example_runs_where_only_the_wheel_is(installed: Path, tmp_path: Path) -> None:
    (example,) = [block for block in blocks_of(DOCS / "quickstart.md") if block.language == "python"]
    printed = run([installed / "python", "-W", "error", "-c", example.source], tmp_path)
    assert "Lineage(" in printed
    assert (tmp_path / "runs" / "mine-saes").is_dir()
