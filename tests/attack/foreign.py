"""Files of strangers, made wrong in every way: each must end in an error of ours, in bounded memory and time."""

import gzip
import io
import json
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from attack.tally import Outcome, Tally
from conftest import build_model, build_tokenizer
from dmsae.activations.base_model import BaseModel, ModelConfig
from dmsae.config import read_recipe
from dmsae.cores.attribution import Attribution
from dmsae.cores.core import Core
from dmsae.disk.artifact import write_sealed
from dmsae.errors import DmsaeError
from dmsae.formats import load_any
from dmsae.formats.exchange import export_sae
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE
from dmsae.text.readers import read_documents
from three_cycles import run_cycles, scored

_MEMORY = 1 << 30
_SECONDS = 10
_VALUES: list[Any] = [None, True, -1, 0, 1e308, float("nan"), 10**30, "", "x", "\x1b[2J", [], [[]], {}, {"a": {}}]


class _TooSlow(BaseException):
    """Raised when a file takes longer than it may."""


class _Code:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran-code-of-a-stranger",)


Make = Callable[[Path, random.Random], Callable[[], object]]
"""Writes a hostile file into a directory, and returns what reads it."""


def attack_foreign(n_files: int, scratch: Path, seed: int, tally: Tally) -> None:
    """Read hostile files of all kinds in a process that may use a gigabyte."""
    scratch.mkdir(parents=True, exist_ok=True)
    report = scratch / "report.json"
    report.unlink(missing_ok=True)
    # A process of its own, not a fork: libraries with threads may not survive one.
    command = [sys.executable, "-X", "faulthandler", "-m", "attack.foreign", str(n_files), str(scratch), str(seed)]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, cwd=scratch)
    if not report.exists():
        tally.add("foreign files", Outcome.UNTYPED, f"the reader ended with {ended.returncode}: {ended.stderr[-2000:]}")
        return
    for kind, outcome, example in json.loads(report.read_text()):
        tally.add(kind, Outcome(outcome), example)


def _read_hostile_files(n_files: int, scratch: Path, draws: random.Random) -> list[tuple[str, Outcome, str]]:
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + _MEMORY, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, _too_slow)
    outcomes = []
    for number in range(n_files):
        kind, make = draws.choice(list(_KINDS.items()))
        place = scratch / f"{number % 8}-{kind.split()[0]}"
        place.mkdir(exist_ok=True)
        for old in place.iterdir():
            old.unlink()
        read = make(place, draws)
        signal.alarm(_SECONDS)
        outcome, example = _outcome(read, place)
        signal.alarm(0)
        if Path("ran-code-of-a-stranger").exists():
            outcome, example = Outcome.SILENT, "code ran"
        outcomes.append((kind, outcome, example if outcome not in (Outcome.DETECTED, Outcome.HARMLESS) else ""))
    return outcomes


def _too_slow(*_: object) -> None:
    raise _TooSlow


def _outcome(read: Callable[[], object], place: Path) -> tuple[Outcome, str]:
    try:
        read()
    except DmsaeError as error:
        return (Outcome.DETECTED if place.name in str(error) else Outcome.UNNAMED), str(error)
    except (Exception, _TooSlow):
        return Outcome.UNTYPED, traceback.format_exc(limit=-3)
    return Outcome.HARMLESS, ""  # what was changed does not matter to a reader


def _mutated(data: bytes, draws: random.Random) -> bytes:
    """Return bytes with a few of them changed, left out or put in, or cut short."""
    changed = bytearray(data)
    for _ in range(draws.choice([1, 1, 2, 8])):
        at = draws.randrange(len(changed) + 1)
        match draws.choice(["set", "set", "flip", "insert", "remove", "cut"]):
            case "set" if at < len(changed):
                changed[at] = draws.randrange(256)
            case "flip" if at < len(changed):
                changed[at] ^= 1 << draws.randrange(8)
            case "insert":
                changed[at:at] = draws.randbytes(draws.choice([1, 4, 100]))
            case "remove":
                del changed[at : at + draws.choice([1, 4, 100])]
            case "cut" if draws.random() < 0.3:
                del changed[at:]
    return bytes(changed)


def _edited(value: Any, draws: random.Random) -> Any:
    """Return a JSON value with one part of it replaced, removed or added."""
    if isinstance(value, dict) and value and draws.random() < 0.8:
        key = draws.choice(list(value))
        kept = {name: one for name, one in value.items() if name != key}
        return kept if draws.random() < 0.2 else value | {key: _edited(value[key], draws)}
    if isinstance(value, list) and value and draws.random() < 0.6:
        at = draws.randrange(len(value))
        return [*value[:at], _edited(value[at], draws), *value[at + 1 :]]
    return draws.choice(_VALUES)


def _state(draws: random.Random) -> dict[str, Any]:
    seed = torch.Generator().manual_seed(draws.randrange(1000))
    state: dict[str, Any] = {
        "W_enc": torch.randn(4, 8, generator=seed),
        "b_enc": torch.zeros(8),
        "W_dec": torch.randn(8, 4, generator=seed),
        "b_dec": torch.zeros(4),
        "threshold": torch.tensor(0.1),
        "k": torch.tensor(2),
        "group_sizes": torch.tensor([2, 6]),
    }
    odd = [
        torch.zeros(1).expand(40_000, 40_000),
        torch.zeros(4, 8).to_sparse(),
        torch.zeros(4, 8, device="meta"),
        torch.zeros(4, 8, dtype=torch.complex64),
        torch.full((4, 8), float("inf")),
        torch.zeros(0, 8),
        torch.tensor(3),
        _Code(),
        *_VALUES,
    ]
    if draws.random() < 0.5:
        state[draws.choice(list(state))] = draws.choice(odd)
    return state


def _torch_file(place: Path, draws: random.Random) -> Callable[[], object]:
    file = io.BytesIO()
    torch.save(_state(draws), file)
    data = file.getvalue()
    if draws.random() < 0.1:
        data = pickle.dumps({"W_enc": _Code()})
    (place / "ae.pt").write_bytes(_mutated(data, draws) if draws.random() < 0.8 else data)
    if draws.random() < 0.3:
        trainer = {"trainer": {"dict_class": "BatchTopKSAE", "k": 2, "group_sizes": [2, 6], "lm_name": "m"}}
        (place / "config.json").write_text(json.dumps(_edited(trainer, draws)))
    return lambda: load_any(place)


def _saelens(place: Path, draws: random.Random) -> Callable[[], object]:
    tensors = {
        name: torch.randn(8, 4) if name == "W_dec" else torch.zeros(8) for name in ("W_dec", "b_enc", "threshold")
    }
    tensors |= {"W_enc": torch.randn(4, 8), "b_dec": torch.zeros(4)}
    if draws.random() < 0.3:
        tensors[draws.choice(list(tensors))] = draws.choice([torch.zeros(3), torch.tensor(1.0), torch.ones(8).int()])
    data = save(tensors)
    (place / "sae_weights.safetensors").write_bytes(_mutated(data, draws) if draws.random() < 0.5 else data)
    details = {"k": 2, "matryoshka_widths": [2, 8]}
    config = {
        "architecture": "jumprelu",
        "metadata": {"sae_lens_version": "6.1", "training_architecture_details": details},
    }
    text = json.dumps(_edited(config, draws) if draws.random() < 0.7 else config).encode()
    if draws.random() < 0.1:
        text = draws.choice([b"[" * 100_000, b'{"a":' * 50_000, b"9" * 10_000, b"\xff\xfe"])
    (place / "cfg.json").write_bytes(_mutated(text, draws) if draws.random() < 0.3 else text)
    return lambda: load_any(place)


def _ours(place: Path, draws: random.Random) -> Callable[[], object]:
    """A saved SAE of ours whose facts were changed and sealed again."""
    SAE(SAEConfig(4, 8, 2, (2, 8))).save(place, {"model": None})
    facts = json.loads((place / "sae.json").read_text())
    del facts["facts_sha256"]
    edited = _edited(facts, draws)
    write_sealed(place / "sae.json", edited if isinstance(edited, dict) else {})
    return lambda: load_any(place)


def _sealed_again(make: Callable[[Path], object], name: str, read: Callable[[Path], object]) -> Make:
    """Return an attack on an artifact of ours: its facts are changed and sealed again, or its tensors are mutated."""

    def write(place: Path, draws: random.Random) -> Callable[[], object]:
        make(place)
        if draws.random() < 0.3:
            weights = place / f"{name}.safetensors"
            weights.write_bytes(_mutated(weights.read_bytes(), draws))
        else:
            facts = json.loads((place / f"{name}.json").read_text())
            facts.pop("facts_sha256", None)
            edited = _edited(facts, draws)
            write_sealed(place / f"{name}.json", edited if isinstance(edited, dict) else {})
        return lambda: read(place)

    return write


def _exported(kind: str, weights: str) -> Make:
    """Return an attack on what an export to another package leaves."""

    def write(place: Path, draws: random.Random) -> Callable[[], object]:
        sae = SAE.init(SAEConfig(4, 8, 8, (2, 8)), torch.Generator().manual_seed(0))
        export_sae(sae, kind, place / "made")
        for file in list((place / "made").iterdir()):
            file.rename(place / file.name)
        (place / "made").rmdir()
        file = place / weights
        if draws.random() < 0.6:
            file.write_bytes(_mutated(file.read_bytes(), draws))
        for config in place.glob("*.json"):
            if draws.random() < 0.7:
                config.write_text(json.dumps(_edited(json.loads(config.read_text()), draws)))
        return lambda: load_any(place)

    return write


def _model(place: Path, draws: random.Random) -> Callable[[], object]:
    """A model directory whose config was edited, or names code of its own."""
    build_model().save_pretrained(place)
    build_tokenizer().save_pretrained(place)
    file = place / "config.json"
    config = json.loads(file.read_text())
    if draws.random() < 0.2:
        config |= {"auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}, "model_type": "own"}
        (place / "own.py").write_text("import os; os.mkdir('ran-code-of-a-stranger')")
    file.write_text(json.dumps(_edited(config, draws)))
    return lambda: BaseModel.load(ModelConfig(name=str(place), hook=0, device="cpu"))


def _recipe(place: Path, draws: random.Random) -> Callable[[], object]:
    text = b'[distill]\nk = 4\nnesting = [16, 64]\n[distill.train]\nlr = 3e-3\n[harvest.model]\nname = "x"\n'
    (place / "mine.toml").write_bytes(_mutated(text * draws.choice([1, 3]), draws))
    return lambda: read_recipe(str(place / "mine.toml"))


def _text(place: Path, draws: random.Random) -> Callable[[], object]:
    """Text of any kind, hostile or damaged, that is read to its end."""
    name, data = draws.choice(
        [
            ("a.txt", "\x00\x1b[2J\u202e\ud7ff 🙂\r\n\n".encode() * 50),
            ("a.txt.gz", gzip.compress(b"a" * 30_000_000, 1)),
            ("a.jsonl", b'{"text": "a", "b": [1, {"c": null}]}\n' * 30),
            ("a.jsonl", b'{"text": ' + b"[" * 100_000),
            ("a.csv", b'id,text\n1,"a ""b"" c"\n2,plain\n' * 20),
            ("a.csv.gz", gzip.compress(b'text\n"never closed\n' * 100)),
        ]
    )
    (place / name).write_bytes(_mutated(data, draws) if draws.random() < 0.8 else data)

    def read() -> None:
        for _ in read_documents(place / name, "text", draws.choice(["paragraph", "line", "file"]), limit=1_000_000):
            pass

    return read


_KINDS: dict[str, Make] = {
    "ae.pt": _torch_file,
    "saelens": _saelens,
    "sparsify": _exported("sparsify", "sae.safetensors"),
    "safetensors": _exported("safetensors", "model.safetensors"),
    "sae.json, sealed again": _ours,
    "core.json, sealed again": _sealed_again(
        lambda place: run_cycles([[1.0, 2.0, 0.5]]).cores[0].save(place), "core", Core.load
    ),
    "attribution.json, sealed again": _sealed_again(
        lambda place: scored([1.0, 2.0, 0.5]).save(place), "attribution", Attribution.load
    ),
    "model directory": _model,
    "recipe": _recipe,
    "text": _text,
}


def main() -> None:
    """Read hostile files, and leave a report of what became of them."""
    n_files, scratch, seed = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    report = _read_hostile_files(n_files, scratch, random.Random(seed))
    (scratch / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
