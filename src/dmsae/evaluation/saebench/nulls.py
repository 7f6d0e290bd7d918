"""Nulls beside the SAEs that the package is given: saved like any SAE, evaluated and filed under names of their own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dmsae.activations.store import Store
from dmsae.config import Json
from dmsae.disk import layout
from dmsae.errors import ConfigError, DmsaeError
from dmsae.evaluation.evaluate import digest_of, digest_of_null, null_owners
from dmsae.evaluation.nulls import NullKind, NullMaker
from dmsae.evaluation.saebench.job import JobSAE
from dmsae.progress import SILENT, Progress
from dmsae.sae.sae import SAE, read_made_from

SAVABLE = (NullKind.UNTRAINED, NullKind.RANDOM_ENCODER, NullKind.PERMUTED_DECODER)
"""Kinds that are SAEs; the package can be given nothing else."""


class Nulls(NamedTuple):
    """The nulls of some SAEs."""

    entries: list[JobSAE]
    beside: dict[str, dict[str, str]]
    """For each SAE, the name of its null of each kind; SAEs that are alike have the same."""
    not_made: dict[str, str]
    """Why a null could not be made, by its name."""


def require_savable(kinds: Sequence[NullKind]) -> None:
    """Raise unless nulls of all these kinds are SAEs."""
    for kind in kinds:
        if kind not in SAVABLE:
            raise ConfigError(
                f"SAEBench cannot evaluate the null {str(kind)!r}: its codes do not come from an encoder, so it is no "
                f"SAE. Choose among {', '.join(SAVABLE)}."
            )


def save_nulls(
    saes: Mapping[str, SAE],
    store: Store,
    kinds: Sequence[NullKind],
    out: Path,
    share: float,
    progress: Progress = SILENT,
) -> Nulls:
    """Save the nulls of SAEs below `out`, unless they are there; those that cannot be made are left out.

    SAEs that are alike in size and firing, by `share`, are compared with the nulls of the first of them; 0: each has
    its own.
    """
    require_savable(kinds)
    makers = {name: NullMaker(sae, store) for name, sae in saes.items()}
    owners = null_owners(makers, share)
    entries: dict[str, dict[str, JobSAE]] = {}
    not_made: dict[str, str] = {}
    with progress.bar("nulls", len(set(owners.values())) * len(kinds), "dictionaries") as bar:
        for name in dict.fromkeys(owners.values()):
            entries[name] = {}
            for kind in kinds:
                try:
                    entries[name][kind] = _saved(name, makers[name], kind, out)
                except DmsaeError as error:
                    not_made[_name(name, kind)] = str(error)
                bar.advance(1, _name(name, kind))
    beside = {name: {kind: one.name for kind, one in entries[owner].items()} for name, owner in owners.items()}
    return Nulls([one for own in entries.values() for one in own.values()], beside, not_made)


def _name(sae: str, kind: NullKind) -> str:
    """Return what a null is called in results and file names."""
    return f"{sae}-{kind}"


def _saved(name: str, maker: NullMaker, kind: NullKind, out: Path) -> JobSAE:
    """Return a null for the worker. Its digest is that of what it is made from: a repeated fit may differ by a bit."""
    digest = digest_of_null(digest_of(maker.sae), kind, maker)
    directory = out.absolute() / layout.NULL_SAES / _name(name, kind)
    made_from: Json = {"null_of": name, "null_kind": str(kind), "digest": digest}
    if not layout.has_artifact(directory, layout.SAE) or read_made_from(directory) != made_from:
        null = maker.make(kind)
        assert isinstance(null, SAE), "kinds that are no SAEs are refused"
        null.save(directory, made_from)
    return JobSAE(directory.name, directory, digest, str(kind))
