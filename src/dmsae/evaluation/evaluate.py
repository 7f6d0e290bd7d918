"""An evaluation: SAEs and their nulls through the measures asked for, in a directory in which it can be resumed.

    <out>/evaluation.json   what was asked for last: subjects, settings, results, scores beside their nulls
    <out>/results/          one file for each result, named by a hash of all that it depends on

A result that is there is not measured again, so asking for more SAEs or measures costs only these. What does not depend
on any SAE is kept in the cache directory and shared by all evaluations.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from dmsae.activations.base_model import BaseModel, ModelConfig
from dmsae.activations.request import HarvestRequest
from dmsae.activations.store import Store
from dmsae.config import Json, from_dict, require, to_dict
from dmsae.disk import layout
from dmsae.disk.artifact import read_sealed, write_sealed
from dmsae.disk.files import canonical_hash, exclusive_lock
from dmsae.errors import CheckpointError, ConfigError, DmsaeError, LostRankError, nearest
from dmsae.evaluation.measures import MEASURES, Measure
from dmsae.evaluation.nulls import NullConfig, NullKind, NullMaker
from dmsae.evaluation.scores import Evaluation, as_json
from dmsae.evaluation.subject import Subject, require_heldout
from dmsae.progress import SILENT, Progress
from dmsae.ranks import ONE, Axis, settled
from dmsae.sae.sae import SAE

_AT_ONCE = 16
"""Subjects that a measure is given at a time: they share its work, and an interruption loses no more than theirs."""


@dataclass(frozen=True)
class EvaluateConfig:
    """What is measured.

    >>> dmsae.EvaluateConfig(measures=("fidelity", "activity")).nulls
    (<NullKind.UNTRAINED: 'untrained'>, ...)
    """

    measures: tuple[str, ...] = tuple(name for name, measure in MEASURES.items() if measure.by_default)
    """Names of measures, in the order in which they run."""
    nulls: tuple[NullKind, ...] = tuple(NullKind)
    """The nulls that every SAE is evaluated beside."""
    null: NullConfig = field(default_factory=NullConfig)
    share_nulls: float = 0.1
    """SAEs of one width share the nulls of the first of them if their core and prefix groups have as many latents, each
    but for this share, and L0s that differ, in all, by no more than it. 0: every SAE has nulls of its own."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The config of each measure by name; those left out have their defaults."""

    def __post_init__(self) -> None:
        for name in (*self.measures, *self.settings):
            if name not in MEASURES:
                raise ConfigError(f"Unknown measure {name!r}. {nearest(name, MEASURES)}")
        require(bool(self.measures), "measures", self.measures, "name at least one measure")
        require(0 <= self.share_nulls < math.inf, "share_nulls", self.share_nulls, "be a number of at least 0")

    def of(self, measure: str) -> Any:
        """Return the config of one measure."""
        return self.settings.get(measure) or MEASURES[measure].config()


def evaluate(
    saes: Mapping[str, SAE],
    store: Store,
    out: Path | str,
    config: EvaluateConfig | None = None,
    model: BaseModel | Callable[[], BaseModel] | None = None,
    progress: Progress = SILENT,
    everyone: Axis = ONE,
) -> Evaluation:
    """Measure SAEs, by name, and their nulls on a store's held-out text, and return what was found.

    `model`, or what loads it, is the base model; by default it is looked for where the store says. It is loaded when a
    measure needs it. A measure that cannot run, because the store holds no text for example, is left out with the
    reason; the others run. So is a null that cannot be made; the next call tries it again. On a mesh all ranks call
    this together: each measures some of the SAEs and nulls, and the first writes down what all of them found.

    >>> saes = {f"cycle {i}": dmsae.SAE.load(run / f"cycle-{i}" / "sae") for i in (0, 1)}
    >>> found = dmsae.evaluate(saes, store, "evaluation", dmsae.EvaluateConfig(measures=("fidelity",)))
    >>> all(row.score > row.null for row in found.rows() if row.figure == "fve")
    True
    """
    config, out, is_first = config or EvaluateConfig(), Path(out), everyone.rank == 0
    progress = progress if is_first else SILENT
    measured: dict[str, Json] = {}
    not_run: dict[str, str] = {}
    makers: dict[str, NullMaker] = {}
    owners: dict[str, str] = {}
    with ExitStack() as held:
        with settled(everyone):
            require(bool(saes), "saes", list(saes), "name at least one SAE")
            require_heldout(store, [Subject(name, sae) for name, sae in saes.items()])
            bench = _Bench(store, saes, out / layout.RESULTS, model, progress, everyone)
            makers = {name: NullMaker(sae, store, config.null) for name, sae in saes.items()}
            if is_first:
                held.enter_context(exclusive_lock(out / layout.LOCK, f"The evaluation in {out}"))
                owners = null_owners(makers, config.share_nulls if config.nulls else 0.0)
        owners = everyone.of_first(owners)  # ranks may round differently, and have to agree
        candidates = [one for name in saes for one in _candidates(name, makers[name], owners[name], config.nulls)]
        for i, name in enumerate(config.measures):
            progress.note(f"{name} ({i + 1} of {len(config.measures)}): {MEASURES[name].about}")
            try:
                measured[name] = bench.measure(name, config.of(name), candidates)
            except LostRankError:
                raise
            except DmsaeError as error:
                not_run[name] = str(error)
                progress.warn(f"{name} has not run. {error}")
        if not measured:
            raise ConfigError("None of the measures could run: " + " ".join(not_run.values()))
        subjects = {one.name: one.facts for one in candidates}
        not_made = {one.name: bench.not_made[one.digest] for one in candidates if one.digest in bench.not_made}
        evaluation = Evaluation(store.key, to_dict(store.model), subjects, measured, not_run, not_made)
        with settled(everyone):
            if is_first:
                evaluation.save(out)
    return evaluation


class _Candidate:
    """A subject that is made only if something about it is still to be measured."""

    def __init__(self, name: str, sae_digest: str, kind: NullKind | None, nulls: NullMaker) -> None:
        self.name, self.kind, self._nulls = name, kind, nulls
        self.digest = digest_of_null(sae_digest, kind, nulls) if kind else sae_digest
        self.facts: Json = {"digest": self.digest, "config": to_dict(nulls.sae.config), "null_of": "", "null_kind": ""}

    @cached_property
    def subject(self) -> Subject:
        dictionary = self._nulls.make(self.kind) if self.kind else self._nulls.sae
        return Subject(self.name, dictionary, self.facts["null_of"], self.facts["null_kind"])


def null_owners(makers: Mapping[str, NullMaker], within: float) -> dict[str, str]:
    """Return, for each SAE, the one whose nulls it is compared with: the first that is alike in size and firing,
    by `within`, or itself."""
    owners: dict[str, str] = {}
    for name, maker in makers.items():
        alike = (one for one in dict.fromkeys(owners.values()) if within and makers[one].may_stand_for(maker, within))
        owners[name] = next(alike, name)
    return owners


def _candidates(name: str, nulls: NullMaker, owner: str, kinds: Sequence[NullKind]) -> Iterator[_Candidate]:
    """Yield an SAE and, unless they are those of another, its nulls."""
    sae_digest = digest_of(nulls.sae)
    itself = _Candidate(name, sae_digest, None, nulls)
    itself.facts["nulls_from"] = owner
    yield itself
    for kind in kinds if owner == name else ():
        null = _Candidate(f"{name} / {kind}", sae_digest, kind, nulls)
        null.facts |= {"null_of": name, "null_kind": str(kind)}
        yield null


class _Bench:
    """Runs measures on candidates and keeps their results; on a mesh, a rank's own bench for its share of them."""

    def __init__(
        self,
        store: Store,
        saes: Mapping[str, SAE],
        directory: Path,
        model: BaseModel | Callable[[], BaseModel] | None,
        progress: Progress,
        everyone: Axis,
    ) -> None:
        self.store, self._saes, self._directory, self._progress = store, saes, directory, progress
        self._everyone = everyone
        self._load = model or partial(load_model, store, progress=progress)
        self.cache = layout.evaluation_cache()
        self.not_made: dict[str, str] = {}
        """Why nulls cannot be made, by digest. It is the same on all ranks."""

    @cached_property
    def model(self) -> BaseModel:
        """The model that the store's activations come from, loaded once; it reads prompts as it read that text."""
        self.store.require_text()
        model = self._load if isinstance(self._load, BaseModel) else self._load()
        self.store.model.require_same(model.identity, f"the store {self.store.key}", "the model given")
        for sae in self._saes.values():
            if sae.sample is not None:
                sae.sample.require_model(model, model.identity.hook)
        request = self.store.request
        if not isinstance(request, HarvestRequest):
            return model
        return model.reading(request.tokens.prepend_bos, request.max_norm_ratio)

    def measure(self, name: str, config: Any, candidates: Sequence[_Candidate]) -> Json:
        """Return the results of one measure; those that are kept are not measured again."""
        candidates = [one for one in candidates if one.kind not in MEASURES[name].same_nulls]
        read: Mapping[str, str] = {}
        with settled(self._everyone):
            read = MEASURES[name].files(config)
        files = {one.name: self._file(name, MEASURES[name], config, read, one) for one in candidates}
        kept: dict[str, Json] = {}
        if self._everyone.rank == 0:
            kept = {file: found for file in files.values() if (found := _kept(self._directory / file)) is not None}
        kept = self._everyone.of_first(kept)
        wanted = [one for one in candidates if files[one.name] not in kept and one.digest not in self.not_made]
        # The same SAE under two names is measured once: no two ranks write one file.
        missing = list({files[one.name]: one for one in wanted}.values())
        mine: tuple[dict[str, Json], dict[str, str]] = ({}, {})
        with settled(self._everyone):
            mine = self._measured(MEASURES[name], config, missing[self._everyone.rank :: self._everyone.size], files)
        for found, not_made in self._everyone.of_each(mine):
            kept |= found
            self.not_made |= not_made
        files = {subject: file for subject, file in files.items() if file in kept}
        return {
            "version": MEASURES[name].version,
            "settings": to_dict(config),
            **({"files": dict(read)} if read else {}),
            "seconds": sum(kept[file]["seconds"] for file in dict.fromkeys(files.values())),
            "results": {subject: kept[file]["result"] for subject, file in files.items()},
        }

    def _measured(
        self, measure: Measure, config: Any, candidates: Sequence[_Candidate], files: Mapping[str, str]
    ) -> tuple[dict[str, Json], dict[str, str]]:
        """Return the results of some candidates by file, in which each is kept as soon as it is there, and by digest
        why nulls among them cannot be made."""
        measured: dict[str, Json] = {}
        not_made: dict[str, str] = {}
        for some in (candidates[start : start + _AT_ONCE] for start in range(0, len(candidates), _AT_ONCE)):
            subjects = self._made(some, not_made)
            if not subjects:
                continue  # a model that nothing is measured on is not loaded
            given = {what: getattr(self, what) for what in measure.takes}
            started = time.monotonic()
            results = measure.function(subjects, **given, config=config, progress=self._progress)
            seconds = (time.monotonic() - started) / len(subjects)
            for subject, result in zip(subjects, results, strict=True):
                file = files[subject.name]
                measured[file] = {"result": as_json(result), "seconds": seconds}
                write_sealed(self._directory / file, measured[file])
        return measured, not_made

    def _made(self, candidates: Sequence[_Candidate], not_made: dict[str, str]) -> list[Subject]:
        """Return the subjects, of which nulls may still have to be made; note why one cannot be, and leave it out."""
        subjects: list[Subject] = []
        with self._progress.bar("nulls", len(candidates), "dictionaries") as bar:
            for one in candidates:
                try:
                    subjects.append(one.subject)
                except DmsaeError as error:
                    if not one.kind:
                        raise
                    not_made[one.digest] = str(error)
                bar.advance(1, one.facts["null_kind"])
        return subjects

    def _file(self, name: str, measure: Measure, config: Any, read: Mapping[str, str], candidate: _Candidate) -> str:
        """Return the name of the file that keeps the result of a candidate: a hash of all that it depends on."""
        made_from = [name, measure.version, to_dict(config), candidate.digest]
        if {"store", "model"} & set(measure.takes):
            made_from.append(self.store.key)
        if read:
            made_from.append(dict(read))
        return f"{name}-{canonical_hash(made_from)[:16]}.json"


def _kept(file: Path) -> Json | None:
    """Return a result that was kept; None when there is none, or it is damaged and has to be measured again."""
    try:
        return read_sealed(file)
    except CheckpointError:
        return None


def load_model(store: Store, name: str = "", device: str = "auto", progress: Progress = SILENT) -> BaseModel:
    """Load the model that a store's activations come from: where it was then, or from another place."""
    facts = {key: to_dict(store.model)[key] for key in ("name", "revision", "hook", "dtype")}
    if name:
        facts |= {"name": name, "revision": ""}
    return BaseModel.load(from_dict(ModelConfig, {**facts, "device": device}), progress=progress)


def digest_of(sae: SAE) -> str:
    """Return a hash of an SAE: its config and all of its weights."""
    digest = hashlib.sha256(canonical_hash(to_dict(sae.config)).encode())
    for name, tensor in sae.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def digest_of_null(sae_digest: str, kind: NullKind, nulls: NullMaker) -> str:
    """Return a hash of all that a null is made from; it need not be made for that."""
    return canonical_hash([sae_digest, kind, nulls.facts])
