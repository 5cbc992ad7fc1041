"""DOCUMENTS -> SPLITS: which documents are trained on, and which are held out.

A document belongs to a split by the hash of its name, unless its source says otherwise, so that
adding documents does not move others. Where that leaves a split empty, which only happens to small
corpora, the document nearest to it moves there from the largest split.
"""

import hashlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from melodi.data.store import SPLITS

IntArray = NDArray[np.int64]
UNSAID = -1
"""The split of a document whose source does not say one."""


class Shares(NamedTuple):
    """How much of the documents is held out."""

    validation: float
    test: float

    def check(self) -> None:
        # Asked so that what is not a number is refused too.
        if not (self.validation >= 0 and self.test >= 0 and sum(self) < 1):
            raise ValueError(
                f"validation_share={self.validation} and test_share={self.test} must not be "
                "negative and must leave something to train on: give less than 1 in all"
            )

    def splits(self, places: IntArray) -> IntArray:
        """The split of each place, as an index into SPLITS."""
        fractions = places / 2.0**63
        bounds = (self.validation, self.validation + self.test)
        return np.select([fractions < bounds[0], fractions < bounds[1]], [1, 2], 0)


def place_of(name: str) -> int:
    """A document's place in the range of 63 bits that the splits share out."""
    digest = hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def split_number(split: str | None) -> int:
    """What a source says about a document, as an index into SPLITS."""
    return UNSAID if split is None else SPLITS.index(split)


def assign_splits(places: IntArray, official: IntArray, shares: Shares) -> IntArray:
    """The split of each document; official: what its source says, or UNSAID."""
    splits = np.where(official == UNSAID, shares.splits(places), official)
    if (official != UNSAID).any():
        return splits
    for split, share in enumerate((1.0, *shares)):
        counts = np.bincount(splits, minlength=len(SPLITS))
        # A lone document is for training.
        can_give = counts.max() > (1 if split else 0)
        if share and can_give and not counts[split]:
            donors = np.flatnonzero(splits == counts.argmax())
            splits[donors[places[donors].argmin()]] = split
    return splits
