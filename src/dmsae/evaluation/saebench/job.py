"""What is handed to the process that runs SAEBench, and what it says while it works.

A job is one eval on some SAEs of one model and hook. It is a JSON file; the worker answers with one JSON object a line.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from dmsae.activations.dtypes import DtypeName
from dmsae.config import Json, from_dict, to_dict
from dmsae.disk import layout
from dmsae.disk.files import canonical_hash, write_json
from dmsae.errors import BenchmarkError, ConfigError, first_line

EventKind = Literal["ready", "start", "progress", "done", "kept", "failed", "not run", "refused"]

_ROUTING = ("tpp", "scr", "absorption", "autointerp", "sparse_probing", "unlearning")
"""Parts of a path by which the package's plotting decides what kind of result a file holds."""
_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)$")


@dataclass(frozen=True, slots=True)
class JobSAE:
    """An SAE to evaluate."""

    name: str
    """What it is called in results and file names."""
    directory: Path
    """Where it is saved, in our format."""
    digest: str
    """Hash of its config and weights, or of what a null is made from."""
    null_kind: str = ""
    """What kind of null it is; empty for an SAE in its own right."""


@dataclass(frozen=True, slots=True)
class JobModel:
    """The base model, as TransformerLens is to load it."""

    name: str
    """As the user gave it."""
    path: Path
    """The directory that holds it."""
    digest: str
    """Hash of its config and weights."""
    layer: int
    """The block after which the SAEs read the residual stream."""

    @property
    def alias(self) -> str:
        """The short name under which the model is registered and results are filed."""
        return self.name.rstrip("/").split("/")[-1].lower()


@dataclass(frozen=True, slots=True)
class How:
    """How evals run, whichever they are."""

    data: Path | None = None
    """Directory with copies of Hub data sets as <owner>/<name>, for machines without network."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`."""
    dtype: DtypeName = "float32"
    """The arithmetic of the model and of the SAE."""
    seed: int = 42
    """Of everything that the package draws."""
    prepend_bos: bool = True
    """Whether running text gets a BOS token at the start of each context, as in the published results."""
    force: bool = False
    """Evaluate again what has been evaluated."""


@dataclass(frozen=True, slots=True)
class Job:
    """One eval on some SAEs."""

    eval: str
    saes: tuple[JobSAE, ...]
    model: JobModel
    settings: dict[str, Any]
    out: Path
    """Results go to `<out>/<eval>`, records to `<out>/records/<eval>`."""
    cache: Path
    """Where what does not depend on an SAE is kept, and what an interrupted eval had finished."""
    how: How = field(default_factory=How)
    versions: dict[str, str] = field(default_factory=dict)
    """Of the packages that measure, by name."""

    def key(self, sae: JobSAE) -> str:
        """Return a hash of all that the result of an SAE depends on.

        The versions of SAEBench and of the packages through which it reads models and tables are among it: another
        version may define a score anew, as absorption was after v0.3.2. Those of torch and numpy are not, which change
        the last digits; the record of a result has them.
        """
        how = [self.how.dtype, self.how.seed, self.how.prepend_bos, str(self.how.data), self.versions]
        return canonical_hash([sae.digest, self.eval, self.settings, self.model.digest, self.model.layer, *how])

    def activations(self) -> Path:
        """Return where activations are kept while several SAEs are evaluated; they are too large to keep longer."""
        return self.out / layout.UNFINISHED / "activations"

    def result(self, sae: JobSAE) -> Path:
        """Return where the package's plotting expects the result of an SAE."""
        return self.out / self.eval / f"{sae.name}_custom_sae_eval_results.json"

    def record(self, sae: JobSAE) -> Path:
        """Return where it is noted what a result was made from."""
        return self.out / layout.RECORDS / self.eval / f"{sae.name}.json"

    def log(self) -> Path:
        """Return where everything is kept that the package prints."""
        return self.out / layout.LOGS / f"{self.eval}.log"

    def write(self, path: Path) -> None:
        """Write the job for the worker."""
        write_json(path, to_dict(self))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the job in a file."""
        try:
            return from_dict(cls, json.loads(path.read_text(encoding="utf8")))
        except (OSError, ValueError, ConfigError) as error:
            raise BenchmarkError(f"{path} is not a job for SAEBench: {first_line(error)}.") from error


class Event(NamedTuple):
    """Something that the worker says."""

    kind: EventKind
    sae: str = ""
    text: str = ""
    """What it is doing, or why it did not."""
    seconds: float = 0.0

    def line(self) -> str:
        """Return the event as a line of JSON."""
        return json.dumps(self._asdict()) + "\n"

    @classmethod
    def of(cls, line: str) -> Self:
        """Return the event in a line; anything else that is printed counts as progress."""
        try:
            facts: Json = json.loads(line)
            return cls(**facts)
        except (ValueError, TypeError):
            return cls("progress", text=line.strip())


def layer_of(hook: str) -> int:
    """Return the number of the block after which a hook reads the residual stream."""
    found = _BLOCK.search(hook)
    if found is None:
        raise ConfigError(
            f"The SAE reads {hook!r}; SAEBench reads the residual stream after a block, such as 'model.layers.8'. "
            "Train an SAE at such a hook (model.hook = 8)."
        )
    return int(found.group(1))


def require_name(name: str) -> None:
    """Raise unless the package can file and plot the results of an SAE of this name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._=+-]*", name):
        raise ConfigError(
            f"The name {name!r} cannot be part of a file name. Use letters, digits, dots, dashes and underscores."
        )
    if wrong := routed_by(name):
        raise ConfigError(
            f"The name {name!r} holds {wrong!r}, by which SAEBench's plotting tells kinds of results apart: every "
            "result of this SAE would be read as one of that kind. Rename its directory."
        )


def routed_by(text: str) -> str:
    """Return the part of a path or name that would mislead the package's plotting; empty when there is none."""
    return next((part for part in _ROUTING if part in text), "")
