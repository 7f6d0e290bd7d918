"""Errors that a user can act on.

Each message says what was received, what was expected, and what to do next. The command line prints the message and
exits with status 2; anything that is not a `DmsaeError` is a bug of ours and keeps its traceback.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class DmsaeError(Exception):
    """Base of every error that dmsae raises on purpose.

    >>> try:
    ...     dmsae.TrainConfig(lr=-1.0)
    ... except dmsae.DmsaeError as error:
    ...     print(error)
    lr = -1.0; it must be a positive number.
    """


class ConfigError(DmsaeError):
    """A setting is unknown, impossible, or contradicts another one."""


class AssetError(DmsaeError):
    """A bundled model or corpus cannot be fetched, or is not what it should be."""


class ModelError(DmsaeError):
    """A base model or its hook point cannot be used."""


class WrongModelError(ModelError):
    """An SAE is put into a model, or at a hook, that it was not made from."""

    def __init__(self, message: str, differs: str) -> None:
        super().__init__(message)
        self.differs = differs
        """What differs: `model`, `hook`, `width` or `normalisation`."""


class GradientError(DmsaeError):
    """The gradient of the next-token loss is missing, zero or not finite."""


class CorpusError(DmsaeError):
    """Text cannot be read, or there is not enough of it."""


class StoreError(DmsaeError):
    """An activation store is missing, incomplete, or of another kind than asked for."""


class StoreCorruptError(StoreError):
    """A file of a store is not what was written."""


class BusyError(DmsaeError):
    """Another process holds the lock on what this one wants to write."""


class DiskSpaceError(DmsaeError):
    """What is about to be written does not fit on the disk."""


class TrainingError(DmsaeError):
    """Training cannot continue: the numbers are no longer finite, or the data ran out."""


class MeshError(DmsaeError):
    """The ranks of a mesh cannot work together."""


class LostRankError(MeshError):
    """A rank of a mesh has ended, or has been silent for too long: there is nobody left to talk to."""


class SweepError(DmsaeError):
    """Jobs cannot be started as asked for, or some of them failed."""


class AttributionError(DmsaeError):
    """No core can be selected: the attribution scores are all zero, not finite, or not of the latents asked for."""


class BenchmarkError(DmsaeError):
    """A benchmark of another package cannot be run, or did not end as it should."""


class JudgeError(DmsaeError):
    """A language model that is asked over the network cannot be reached, or does not answer as it should."""


class CheckpointError(DmsaeError):
    """A checkpoint or saved SAE is damaged, or belongs to another configuration."""


class ExportError(DmsaeError):
    """An SAE cannot be held by the format that it is to be written in."""


class HubError(DmsaeError):
    """The Hub cannot be reached, does not take what is pushed, or holds something else than asked for."""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type's name when it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def nearest(given: str, known: Iterable[str]) -> str:
    """Return a sentence that offers the names closest to `given`, or all of them when few."""
    names = sorted(set(known))
    close = get_close_matches(given, names, n=3, cutoff=0.5)
    if close:
        return f"Did you mean {' or '.join(repr(name) for name in close)}?"
    if len(names) <= 12:
        return f"Known: {', '.join(names) or 'none'}."
    return f"Known: {', '.join(names[:12])} and {len(names) - 12} more."
