"""The three parts of a store."""

from enum import StrEnum


class Split(StrEnum):
    """The parts of a store, in the order in which they are harvested. No two hold text of the same document."""

    PAIRS = "pairs"
    """(x, g) at positions that a next-token loss depends on: for attribution."""
    HELDOUT = "heldout"
    """x in reading order: for evaluation."""
    TRAIN = "train"
    """x in random order: for training."""
