"""TOKENS -> SEGMENTS, each row one document.

1. `prepare` makes a token store from sources of text: corpus.py reads them, draft.py writes it.
2. `TokenStore` opens it. The tokens of a split are one memory-mapped file, and its documents are
   views of it.
3. `Rows` walks a split: each row of a batch follows one document from start to end, then takes the
   next one from a queue that all rows share.
"""

import functools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from melodi.data.corpus import open_sources
from melodi.data.prepare import (
    DTYPES,
    FORMAT,
    SPLITS,
    VERSION,
    Draft,
    IntArray,
    Shares,
    full_disk_named,
    trained_on,
)
from melodi.data.tokenizer import Tokenizer, load_tokenizer
from melodi.files import checksum


def prepare(
    sources: Sequence[str | Path] = (),
    out: str | Path = "store",
    vocab_size: int | None = None,
    tokenizer: str | Path | None = None,
    workers: int | None = None,
    text_column: str = "text",
    validation_share: float = 0.02,
    test_share: float = 0.02,
) -> "TokenStore":
    """Makes the store `out`, or goes on making it. Without sources: Python's standard library.
    The vocabulary is trained, 2048 by default, unless a tokenizer is given."""
    if tokenizer is not None and vocab_size is not None:
        raise ValueError(
            f"vocab_size={vocab_size} and tokenizer={tokenizer}: give only one of them"
        )
    shares = Shares(validation_share, test_share)
    shares.check()
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    corpus = open_sources(sources, text_column)
    request = {
        "sources": [source.description for source in corpus],
        "contents": [source.fingerprint for source in corpus],
        "text_column": text_column,
        "tokenizer": given.digest() if given else f"trained, {vocab_size or 2048}",
        "validation_share": validation_share,
        "test_share": test_share,
    }
    out = Path(out)
    with full_disk_named(out):
        draft = Draft(out, request)
        if draft.progress["tokenizer_digest"] is None:
            draft.take_tokenizer(given or trained_on(corpus, vocab_size or 2048, shares))
        draft.append_documents(corpus, workers or os.cpu_count() or 1)
        draft.finish(shares)
    return TokenStore.open(out)


class TokenStore:
    """A finished store: `split(name)` gives its documents, `tokenizer` made their tokens."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self.vocab_size: int = manifest["vocab_size"]

    @classmethod
    def open(cls, path: str | Path) -> "TokenStore":
        path = Path(path)
        if (path / Draft.PROGRESS).is_file() and not (path / "manifest.json").is_file():
            raise ValueError(f"store {path} is unfinished: run its melodi prepare again")
        if not (path / "manifest.json").is_file():
            raise ValueError(f"{path} is no token store: make one with melodi prepare --out {path}")
        try:
            manifest = json.loads((path / "manifest.json").read_text("utf-8"))
            is_store = manifest["format"] == FORMAT
        except (ValueError, KeyError, TypeError):
            is_store = False
        if not is_store:
            raise ValueError(f"{path} is no token store: its manifest.json is not one of {FORMAT}")
        if manifest["version"] != VERSION:
            raise ValueError(
                f"store {path} has version {manifest['version']} and this melodi reads {VERSION}: "
                "prepare it again"
            )
        store = cls(path, manifest)
        for split in SPLITS:
            store._check_size(split)
        return store

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        tokenizer = load_tokenizer(self.path)
        if tokenizer.digest() != self.manifest["tokenizer_digest"]:
            raise ValueError(
                f"the tokenizer in {self.path} is not the one that made the store: prepare it again"
            )
        return tokenizer

    def split(self, name: str) -> "Documents":
        if name not in SPLITS:
            raise ValueError(f"split {name!r} is unknown: choose one of {', '.join(SPLITS)}")
        path = self.path / f"{name}.tokens"
        dtype = DTYPES[self.manifest["dtype"]]
        # An empty file cannot be mapped.
        empty = not self.manifest["splits"][name]["tokens"]
        tokens = np.empty(0, dtype) if empty else np.memmap(path, dtype, "r")
        with (self.path / f"{name}.index").open("rb") as file:
            return Documents(np.asarray(tokens), np.load(file, allow_pickle=False))

    def verify(self) -> None:
        """Compares all files with their checksums."""
        for split in SPLITS:
            for kind, expected in self.manifest["splits"][split]["checksums"].items():
                path = self.path / f"{split}.{kind}"
                if checksum(path) != expected:
                    raise ValueError(f"{path} is damaged: its checksum differs; prepare it again")
        _ = self.tokenizer

    def _check_size(self, split: str) -> None:
        about = self.manifest["splits"][split]
        tokens, index = self.path / f"{split}.tokens", self.path / f"{split}.index"
        for path in (tokens, index):
            if not path.is_file():
                raise ValueError(f"store {self.path} lacks {path.name}: prepare it again")
        expected = about["tokens"] * DTYPES[self.manifest["dtype"]].itemsize
        if tokens.stat().st_size != expected:
            raise ValueError(
                f"{tokens} has {tokens.stat().st_size} bytes, not {expected}: prepare it again"
            )


class Documents:
    """The documents of a split: `documents[i]` is a view of the file, not a copy."""

    def __init__(self, tokens: NDArray[Any], index: IntArray) -> None:
        """index: where each document starts and the last one ends, in tokens and in bytes."""
        self.tokens = tokens
        self.offsets, byte_offsets = index
        self.lengths: IntArray = np.diff(self.offsets)
        self.num_bytes: IntArray = np.diff(byte_offsets)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> NDArray[Any]:
        if not 0 <= i < len(self):
            raise IndexError(f"document {i} of {len(self)}")
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]


@dataclass
class Batch:
    tokens: IntArray
    """(rows, T), padded with 0 where the document has nothing left to predict from."""
    targets: IntArray
    """(rows, T), the next token, -1 where there is nothing to predict."""
    starts: NDArray[np.bool_]
    """(rows,): this row begins a new document with this segment."""


class Rows:
    """Segments of T tokens for every row, each row walking one document at a time.

    All rows take their documents from one queue, which is shuffled anew in each epoch, so a very
    long document holds up only its own row. The state is where each row and the queue stand.
    """

    def __init__(
        self, documents: Documents, num_rows: int, segment_length: int, seed: int = 0
    ) -> None:
        for name, value in (("num_rows", num_rows), ("segment_length", segment_length)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.documents = documents
        self.segment_length = segment_length
        self.seed = seed
        # One token alone predicts nothing.
        self.usable = np.flatnonzero(documents.lengths >= 2)
        if not len(self.usable):
            raise ValueError(
                f"none of the {len(documents)} documents has two tokens, so there is nothing to "
                "predict: choose another split, or prepare longer documents"
            )
        self.row_documents = [-1] * num_rows  # -1: takes the next one from the queue
        self.row_positions = [0] * num_rows
        self._start_epoch(0)

    def next(self) -> Batch:
        shape = len(self.row_documents), self.segment_length
        tokens = np.zeros(shape, np.int64)
        targets = np.full(shape, -1, np.int64)
        starts = np.array(self.row_documents) < 0
        for row in range(len(self.row_documents)):
            if starts[row]:
                self.row_documents[row], self.row_positions[row] = self._take_document(), 0
            document = self.documents[self.row_documents[row]]
            position = self.row_positions[row]
            end = min(position + self.segment_length, len(document) - 1)
            tokens[row, : end - position] = document[position:end]
            targets[row, : end - position] = document[position + 1 : end + 1]
            self.row_positions[row] = end
            if end == len(document) - 1:
                self.row_documents[row] = -1
        return Batch(tokens, targets, starts)

    @property
    def epoch(self) -> float:
        """Documents taken from the queue, in passes over all of them."""
        return self._epoch + self._place / len(self.usable)

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "place": self._place,
            "documents": list(self.row_documents),
            "positions": list(self.row_positions),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        documents, positions = list(state["documents"]), list(state["positions"])
        if len(documents) != len(self.row_documents):
            raise ValueError(
                f"the saved position has {len(documents)} rows and this run has "
                f"{len(self.row_documents)}: resume with as many rows"
            )
        for document, position in zip(documents, positions, strict=True):
            fits = document < len(self.documents) and state["place"] <= len(self.usable)
            if not fits or (document >= 0 and position >= self.documents.lengths[document] - 1):
                raise ValueError(
                    f"the saved position (document {document}, token {position}) is not in these "
                    "documents: resume with the store that the run began with"
                )
        self.row_documents, self.row_positions = documents, positions
        self._start_epoch(state["epoch"])
        self._place = state["place"]

    def _take_document(self) -> int:
        if self._place == len(self._queue):
            self._start_epoch(self._epoch + 1)
        self._place += 1
        return int(self._queue[self._place - 1])

    def _start_epoch(self, epoch: int) -> None:
        self._epoch, self._place = epoch, 0
        random = np.random.Generator(np.random.PCG64([self.seed, epoch]))
        self._queue = random.permutation(self.usable)
