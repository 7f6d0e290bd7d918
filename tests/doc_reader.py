"""Someone who follows the documentation: types its commands and pastes its Python, in one directory.

Two things differ from what a reader has. The bundled model and text are tiny stand-ins, which lie in the cache where
the real ones would be. And sizes are smaller: `SMALLER` says which settings, in flags and in recipes.
"""

import json
import math
import os
import random
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any
from unittest import mock

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from conftest import build_model
from dmsae.cli import main
from dmsae.config import recipe_names
from dmsae.disk.files import sha256_of
from dmsae.disk.layout import ASSET_MANIFEST
from dmsae.text import assets
from doc_blocks import DOCS, Block

_TEXT = "When I met my sister, she was tired."
_MORE = "he they we were is had has saw left found lost brother friend dog house river happy late and but"
_WORDS = [*_TEXT.split(), *_MORE.split()]
DEMO_KEY = "5030aa71"
"""How the pages name the store of the demo, whose key here is another."""


_NUMBER = re.compile(r"[0-9][0-9_.e-]*")


def _divided(by: int) -> Callable[[str], str]:
    return lambda value: str(math.ceil(int(value.replace("_", "")) / by))


SMALLER: dict[str, Callable[[str], str]] = {
    "train_tokens": lambda _: "3000",
    "heldout_tokens": lambda _: "400",
    "pair_tokens": lambda _: "400",
    "shard_tokens": lambda _: "1024",
    "context_length": lambda _: "32",
    "tokens": lambda _: "7680",
    "lr": lambda _: "4e-3",
    "batch_size": lambda _: "128",
    "width": _divided(8),
    "k": _divided(8),
    "max_rate": lambda _: "0.95",  # the few latents of a tiny first prefix all fire often,
    "min_similarity": lambda _: "0.2",  # and those of SAEs that hardly trained are hardly alike
}
"""What the tests make of the value of a setting, by its name."""


class Reader:
    """A reader with a directory to work in, a cache, a model and texts of their own."""

    def __init__(self, where: Path) -> None:
        self.home, self.cache = where / "home", where / "cache"
        self.home.mkdir()
        _stand_in_assets(self.cache / "assets")
        _save_model(self.home / "models" / "mine", seed=1)
        _write_texts(self.home / "texts")
        (self.home / "docs").symlink_to(DOCS)
        self._sizes = _small_harvest(where)
        self._small_recipes = {name: _small_recipe(name, where) for name in recipe_names()}

    def follow(self, blocks: list[Block]) -> None:
        """Run the blocks of a page one after another; Python blocks share their names."""
        names: dict[str, Any] = {"__name__": "__main__"}
        with self._at_home():
            for block in blocks:
                if not block.not_run:
                    self._run(block, names)

    def _run(self, block: Block, names: dict[str, Any]) -> None:
        where = f"{block.page}:{block.line}"
        match block.language:
            case "bash":
                for command in commands(block.source):
                    self._type(command, where)
            case "python":
                exec(compile("\n" * block.line + self._own(block.source), where, "exec"), names)
            case "toml" if block.title:
                Path(block.title).write_text(smaller_recipe(block.source), encoding="utf8")
            case "text":
                pass
            case _:
                raise AssertionError(f"{where}: a block of {block.language!r} is neither run nor said not to be")

    def _type(self, command: str, where: str) -> None:
        """Run one command: of dmsae in this process, to save the seconds that importing takes, any other in bash."""
        words = shlex.split(smaller_flags(self._own(command)), comments=True)
        words = [self._small_recipes.get(word, word) for word in words]
        if words[0] != "dmsae":
            subprocess.run(["bash", "-euc", command], check=True, capture_output=True)
            return
        if words[1] == "harvest" and "--recipe" not in words:
            words += ["--recipe", self._sizes]
        try:
            main(words[1:])
        except SystemExit as end:
            if end.code:
                raise AssertionError(f"{where}: {command!r} ended with {end.code}") from None

    def _own(self, source: str) -> str:
        """Return code with the names that things have here: the SAEs of a smaller k, and the demo's store."""
        source = re.sub(r"(?<=-k)\d+", lambda found: SMALLER["k"](found[0]), source)
        return source.replace(DEMO_KEY, self._demo_key[:8]) if DEMO_KEY in source else source

    @cached_property
    def _demo_key(self) -> str:
        """The key of the demo's store: the only one that there is when it is first named."""
        (store,) = (self.cache / "stores").glob("*/store.json")
        return store.parent.name

    @contextmanager
    def _at_home(self) -> Iterator[None]:
        environment = {"DMSAE_CACHE": str(self.cache), "DMSAE_OFFLINE": "1"}
        with mock.patch.dict(os.environ, environment), chdir(self.home):
            yield


def commands(source: str) -> list[str]:
    """Return the commands of a block of bash, those that go over several lines in one, without comments."""
    lines = source.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def smaller_flags(command: str) -> str:
    """Return a command with smaller sizes: those of flags whose last word is in `SMALLER`."""
    words = command.split(" ")
    setting = ""
    for i, word in enumerate(words):
        if word.startswith("--"):
            setting = word.rpartition(".")[2].removeprefix("--").replace("-", "_")
        elif setting in SMALLER and _NUMBER.fullmatch(word):
            words[i] = SMALLER[setting](word)
    return " ".join(words)


def _shrunk(name: str, value: str) -> str:
    return _NUMBER.sub(lambda found: SMALLER[name](found[0]), value)


def smaller_recipe(toml: str) -> str:
    """Return a recipe with smaller sizes; short trainings take small batches."""
    lines = []
    for line in toml.splitlines():
        name, _, value = line.partition(" = ")
        if name in SMALLER:
            line = f"{name} = {_shrunk(name, value)}"
        lines += [line, "batch_size = 128"] if name == "tokens" else [line]
    return "\n".join(lines) + "\n"


def _small_recipe(name: str, where: Path) -> str:
    path = where / f"{name}.toml"
    shipped = (resources.files("dmsae") / "recipes" / path.name).read_text(encoding="utf8")
    path.write_text(smaller_recipe(shipped), encoding="utf8")
    return str(path)


def _small_harvest(where: Path) -> str:
    """Write a recipe with nothing but small sizes, for harvests that take the default ones."""
    path = where / "sizes.toml"
    sizes = (f"{name} = {SMALLER[name]('')}" for name in ("train_tokens", "heldout_tokens", "pair_tokens"))
    path.write_text("\n".join(["[harvest]", *sizes, ""]), encoding="utf8")
    return str(path)


def _stand_in_assets(folder: Path) -> None:
    """Put a tiny model and a tiny text where the bundled ones would be."""
    model, text = (folder / f"{name}-{assets.find(name).version}" for name in ("smollm2-135m", "probes"))
    _save_model(model, seed=0)
    text.mkdir(parents=True)
    prompts = "\n".join(f'"{document}"' for document in _documents(900, seed=0))
    (text / "1_texts.csv").write_text(f"prompt\n{prompts}\n", encoding="utf8")
    for unpacked in (model, text):
        checksums = {file.name: sha256_of(file) for file in unpacked.iterdir()}
        (unpacked / ASSET_MANIFEST).write_text(json.dumps({"files": checksums}), encoding="utf8")


def _save_model(folder: Path, seed: int) -> None:
    """Write a random Llama of 14 blocks, deep enough for the hooks that the pages name, and its tokenizer."""
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", "<unk>", *_WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    sizes = {"hidden_size": 32, "num_hidden_layers": 14, "max_position_embeddings": 256, "initializer_range": 0.1}
    build_model(seed, vocab_size=len(vocabulary), **sizes).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def _documents(n: int, seed: int) -> list[str]:
    choose = random.Random(seed)
    return [" ".join(choose.choices(_WORDS, k=choose.randint(8, 40))) for _ in range(n)]


def _write_texts(folder: Path) -> None:
    """Write texts in the formats that the pages name."""
    folder.mkdir()
    (folder / "notes.txt").write_text("\n\n".join(_documents(600, seed=1)), encoding="utf8")
    lines = (json.dumps({"body": document}) for document in _documents(600, seed=2))
    (folder / "articles.jsonl").write_text("\n".join(lines), encoding="utf8")
