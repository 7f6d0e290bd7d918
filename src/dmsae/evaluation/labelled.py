"""Labelled texts for probing: the bundled tables that are kept out of the training text, or the user's own.

A table has two classes. The bundled ones are those of *Are Sparse Autoencoders Useful?* (Kantamneni et al., 2025);
whichever of them may be probed is reserved by the asset, so that neither they nor any text that also appears in them is
ever trained on. As in sae-probes, a text is represented by the activation of its last token, and of two labels the one
that sorts last is the positive class.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.activations.base_model import BaseModel
from dmsae.config import require, require_whole
from dmsae.disk.files import sha256_of
from dmsae.errors import CorpusError, first_line, nearest
from dmsae.evaluation.prompts import last_token_activations
from dmsae.progress import SILENT, Progress
from dmsae.seeds import derive_seed
from dmsae.text import assets
from dmsae.text.readers import read_documents

_ASSET = "probes"
_SUFFIX = ".csv.zst"
_TEXT, _LABEL = "prompt", "target"


@dataclass(frozen=True, slots=True)
class LabelledConfig:
    """Which labelled texts, and how many."""

    tables: tuple[str, ...] = (
        "62_wikidata_occupation_ispolitician",
        "63_wikidata_occupation_issinger",
        "92_glue_sst2",
        "96_spam_is",
        "105_click_bait",
        "113_movie_sent",
        "140_news_class_Technology",
        "161_agnews_0",
    )
    """Bundled tables by name, or paths of .csv files with the columns `prompt` and `target`. The default takes one or
    two of each kind that the bundled corpus reserves: occupations, sentiment, spam, headlines, news. Grammar and the
    gender of names are left out, because a dense probe of the bundled model hardly reads them."""
    n_train: int = 400
    """Texts of each table that probes are trained on, half of each class."""
    n_test: int = 200
    """Texts of each table that probes are tested on, half of each class."""
    max_tokens: int = 48
    """Of a longer text, the last tokens are kept."""
    seed: int = 0
    """Decides which texts are taken, and how they are split."""

    def __post_init__(self) -> None:
        require(len(self.tables) > 0, "labelled.tables", self.tables, "name at least one table")
        for name, low in (("n_train", 20), ("n_test", 2)):
            value = getattr(self, name)
            require_whole(f"labelled.{name}", value, low)
            require(value % 2 == 0, f"labelled.{name}", value, "be even: the classes are of equal size")
        require_whole("labelled.max_tokens", self.max_tokens, 2)


class Table(NamedTuple):
    """Labelled texts in random order, the classes of equal size in both parts."""

    name: str
    train_texts: list[str]
    train_labels: Tensor
    """1 for the positive class, else 0."""
    test_texts: list[str]
    test_labels: Tensor


class TableActivations(NamedTuple):
    """A table whose texts have become activations of their last tokens."""

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor


def read_classes(name: str, progress: Progress = SILENT) -> tuple[list[str], list[str]]:
    """Return the distinct texts of a table's negative and positive class, in the order of the file.

    Texts with both labels, and those of a single word, are left out: the first token of a context is an attention sink.
    """
    path = _locate(name, progress)
    labels_of: dict[str, set[str]] = {}
    columns = (read_documents(path, column, may_be_empty=True) for column in (_TEXT, _LABEL))
    for text, label in zip(*columns, strict=True):
        labels_of.setdefault(text, set()).add(label)
    labels = sorted({label for several in labels_of.values() for label in several})
    if len(labels) != 2:
        shown = ", ".join(labels[:4]) + (", …" if len(labels) > 4 else "")
        raise CorpusError(f"The table {name} has {len(labels)} labels ({shown}); expected two.")
    negative, positive = (
        [text for text, of_text in labels_of.items() if of_text == {label} and len(text.split()) > 1]
        for label in labels
    )
    return negative, positive


def read_table(name: str, config: LabelledConfig, progress: Progress = SILENT) -> Table:
    """Return a balanced sample of a table, split into a training and a test part by the seed."""
    n_train, n_test = config.n_train // 2, config.n_test // 2
    parts: tuple[list[tuple[str, int]], list[tuple[str, int]]] = ([], [])
    choose = random.Random(derive_seed(config.seed, "labelled", Path(name).stem))
    for label, texts in enumerate(read_classes(name, progress)):
        drawn = draw(texts, n_train + n_test, f"The class {label} of the table {name}", choose)
        parts[0].extend((text, label) for text in drawn[:n_train])
        parts[1].extend((text, label) for text in drawn[n_train:])
    for part in parts:
        choose.shuffle(part)
    (train_texts, train_labels), (test_texts, test_labels) = (
        ([text for text, _ in part], torch.tensor([label for _, label in part])) for part in parts
    )
    return Table(name, train_texts, train_labels, test_texts, test_labels)


def draw(texts: Sequence[str], n: int, what: str, choose: random.Random) -> list[str]:
    """Return n different texts in random order; too few of them is an error."""
    if len(texts) < n:
        raise CorpusError(f"{what} has {len(texts)} usable texts, but {n} are asked for. Ask for fewer.")
    return choose.sample(list(texts), n)


def table_activations(
    model: BaseModel, config: LabelledConfig, cache: Path | None = None, progress: Progress = SILENT
) -> list[TableActivations]:
    """Return all tables with the activations of their texts' last tokens."""
    tables = []
    for name in config.tables:
        table = read_table(name, config, progress)
        texts = [*table.train_texts, *table.test_texts]
        x_BD = last_token_activations(model, texts, config.max_tokens, cache, progress)
        n = len(table.train_texts)
        tables.append(TableActivations(Path(name).stem, x_BD[:n], table.train_labels, x_BD[n:], table.test_labels))
    return tables


def own_tables(names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of each table that is a file of the user's, by name; a bundled one is known by its name."""
    try:
        return {name: sha256_of(Path(name)) for name in names if _is_own(name)}
    except OSError as error:
        raise CorpusError(f"A labelled table cannot be read: {first_line(error)}.") from error


def _is_own(name: str) -> bool:
    return Path(name).is_file()


def _locate(name: str, progress: Progress) -> Path:
    """Return a table's file. A bundled one that is not reserved was trained on, which is worth a warning."""
    if _is_own(name):
        return Path(name)
    folder = assets.fetch(_ASSET, progress)
    path = folder / f"{name}{_SUFFIX}"
    if not path.is_file():
        known = [file.name.removesuffix(_SUFFIX) for file in folder.glob(f"*{_SUFFIX}")]
        raise CorpusError(f"There is no file and no bundled table {name!r}. {nearest(name, known)}")
    if not any(fnmatch(path.name, pattern) for pattern in assets.find(_ASSET).reserved):
        progress.warn(f"The table {name} is part of the bundled training text: an SAE may have been trained on it.")
    return path
