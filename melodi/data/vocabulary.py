"""TRAINING DOCUMENTS -> VOCABULARY: from a bounded sample, and from nothing that is held out."""

import numpy as np

from melodi.data.corpus import Source
from melodi.data.progress import progress_bar
from melodi.data.splits import Shares, assign_splits, place_of, split_number
from melodi.data.text import Document
from melodi.data.tokenizer import Tokenizer, train_tokenizer

SAMPLE_CHARACTERS = 20_000_000
SAMPLE_BLOCK = 1 << 14
REMOTE_SAMPLE_BYTES = 1 << 30


def train_vocabulary(corpus: list[Source], vocab_size: int, shares: Shares) -> Tokenizer:
    return train_tokenizer(sample(corpus, shares), vocab_size)


def sample(corpus: list[Source], shares: Shares) -> list[str]:
    """Blocks of text spread evenly over the training documents; of a remote source only the
    beginning.

    Which documents are for training is known only when all have been read: duplicates and empty
    ones do not count, and a split that would be empty is filled from another. So blocks are taken
    from all, those of documents that their name puts in training apart from the others, and what
    turns out to be held out or skipped is dropped at the end.
    """
    named, others, usable = Blocks(), Blocks(), UsableDocuments()
    number = 0
    for source in corpus:
        num_bytes = 0
        with progress_bar("sampling", source.num_bytes) as bar:
            for document in source.documents():
                blocks = others if is_held_out(document, shares) else named
                for piece in document.pieces():
                    blocks.add(number, piece)
                usable.add(number, document)
                number += 1
                bar.update(document.num_bytes)
                if blocks is named:  # what is held out is no part of the sample
                    num_bytes += document.num_bytes
                if source.is_remote and num_bytes > REMOTE_SAMPLE_BYTES:
                    break
    training = usable.for_training(shares)
    return [text for number, text in (*named.kept, *others.kept) if number in training]


def is_held_out(document: Document, shares: Shares) -> bool:
    """By what its source or else its name says; it may yet move to fill another split."""
    if document.split is None:
        return bool(shares.splits(np.array([place_of(document.name)]))[0])
    return document.split != "train"


class Blocks:
    """Blocks of text, each with its document's number: every block at first, and every other one of
    those whenever there are too many."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, str]] = []
        self.stride, self.seen, self.size = 1, 0, 0

    def add(self, number: int, piece: str) -> None:
        for start in range(0, len(piece), SAMPLE_BLOCK):
            if self.seen % self.stride == 0:
                self.kept.append((number, piece[start : start + SAMPLE_BLOCK]))
                self.size += len(self.kept[-1][1])
            self.seen += 1
            if self.size > SAMPLE_CHARACTERS:
                self.kept, self.stride = self.kept[::2], 2 * self.stride
                self.size = sum(len(text) for _, text in self.kept)


class UsableDocuments:
    """The documents that a store would keep, with what decides their split."""

    def __init__(self) -> None:
        self.digests: set[int] = set()
        self.rows: list[tuple[int, int, int]] = []

    def add(self, number: int, document: Document) -> None:
        if document.reason_to_skip(self.digests) is None:
            self.digests.add(document.digest())
            self.rows.append((number, place_of(document.name), split_number(document.split)))

    def for_training(self, shares: Shares) -> set[int]:
        numbers, places, official = np.array(self.rows, np.int64).reshape(-1, 3).T
        return set(numbers[assign_splits(places, official, shares) == 0].tolist())
