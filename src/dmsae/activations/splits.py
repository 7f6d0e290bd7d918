"""The three parts of a store."""

from enum import StrEnum


class Split(StrEnum):
    """The parts of a store, in the order in which they are harvested."""

    PAIRS = "pairs"
    """(x, g) at positions that have a next token: for attribution."""
    HELDOUT = "heldout"
    """x of documents that training never sees, in reading order: for evaluation."""
    TRAIN = "train"
    """x in random order: for training."""
