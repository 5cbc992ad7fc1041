"""TOKENS -> SEGMENTS: the one walk through documents, each row one document.

A segment is what the model reads in one go: T tokens of every row. A row follows one document from
start to end, then takes the next one import functools
from a queue that all rows share, so a very long document
holds up only its own row. The rest of the segment in which a document ends is padding.

Training walks for ever, the queue shuffled anew in each epoch (`Walker.shuffled`); evaluation walks
once, the longest documents first, so that the rows end at about the same time (`Walker.once`).
With `turns`, as many sets of rows take turns, a segment reads one of them, and more documents are
under way than a segment has rows.
Every process follows all rows, by the lengths of the documents, and reads the tokens of its own.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from melodi.data.store import Documents, IntArray

NONE = -1
"""In place of a document: the row takes the next one from the queue, if there is one."""


@dataclass(frozen=True)
class Segment:
    """T tokens of each row; rows without a document are padding."""

    tokens: IntArray
    """(rows, T), padded with 0 where the document has nothing left to predict from."""
    targets: IntArray
    """(rows, T), the next token, -1 where there is nothing to predict."""
    starts: NDArray[np.bool_]
    """(rows,): this row begins a new document with this segment."""
    positions: IntArray
    """(rows,): the place in its document where each row's segment begins."""
    documents: IntArray
    """(rows,): which document each row reads, NONE where there is none."""

    @classmethod
    def padding(cls, num_rows: int, length: int) -> "Segment":
        return cls(
            tokens=np.zeros((num_rows, length), np.int64),
            targets=np.full((num_rows, length), -1, np.int64),
            starts=np.zeros(num_rows, bool),
            positions=np.zeros(num_rows, np.int64),
            documents=np.full(num_rows, NONE, np.int64),
        )

    def take(self, rows: slice) -> "Segment":
        """Some of the rows."""
        return Segment(
            self.tokens[rows],
            self.targets[rows],
            self.starts[rows],
            self.positions[rows],
            self.documents[rows],
        )


Order = Callable[[int], IntArray]
"""The documents of an epoch, in the order in which they are read; none when all is over."""


class Walker:
    """Segments of T tokens for every row. The state is where each row and the queue stand."""

    def __init__(
        self,
        documents: Documents,
        order: Order,
        num_rows: int,
        segment_length: int,
        mine: range | None = None,
        turns: int = 1,
    ) -> None:
        """num_rows: of a segment. mine: those that this process reads; all when not given."""
        sizes = (("num_rows", num_rows), ("segment_length", segment_length), ("turns", turns))
        for name, value in sizes:
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.documents = documents
        self.num_predictions = num_predictions(documents)
        self.order = order
        self.num_rows, self.segment_length, self.turns = num_rows, segment_length, turns
        self.mine = range(num_rows) if mine is None else mine
        self.row_documents = [NONE] * num_rows * turns
        self.row_positions = [0] * num_rows * turns
        self.turn = 0
        """Which set of rows is read next."""
        self.predictions = 0
        """In the segment given last, of all rows of all processes."""
        self._start_epoch(0)

    @classmethod
    def shuffled(
        cls,
        documents: Documents,
        num_rows: int,
        segment_length: int,
        seed: int = 0,
        mine: range | None = None,
        turns: int = 1,
    ) -> "Walker":
        """All documents once in each epoch, in another order each time, for ever. No more turns are
        taken than there are documents for."""
        usable = np.flatnonzero(num_predictions(documents))
        if not len(usable):
            raise ValueError(
                f"none of the {len(documents)} documents has two tokens, so there is nothing to "
                "predict: choose another split, or prepare longer documents"
            )

        def order(epoch: int) -> IntArray:
            return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(usable)

        turns = max(min(turns, len(usable) // max(num_rows, 1)), min(turns, 1))
        return cls(documents, order, num_rows, segment_length, mine, turns)

    @classmethod
    def once(
        cls,
        documents: Documents,
        num_rows: int,
        segment_length: int,
        chosen: list[int] | None = None,
        mine: range | None = None,
    ) -> "Walker":
        """The chosen documents, all when not given, once and the longest first. To be iterated."""
        usable = np.arange(len(documents)) if chosen is None else np.array(chosen, np.int64)
        usable = usable[num_predictions(documents)[usable] > 0]
        longest_first = usable[np.argsort(documents.lengths[usable], kind="stable")][::-1]
        return cls(
            documents,
            lambda epoch: longest_first[: 0 if epoch else None],
            num_rows,
            segment_length,
            mine,
        )

    def next(self) -> Segment:
        """The next segment of my rows; padding alone when all is over."""
        segment = Segment.padding(len(self.mine), self.segment_length)
        self.predictions = 0
        first = self.turn * self.num_rows
        self.turn = (self.turn + 1) % self.turns
        for row in range(first, first + self.num_rows):
            starts = self.row_documents[row] == NONE
            if starts:
                self.row_documents[row], self.row_positions[row] = self._take_document(), 0
            document, position = self.row_documents[row], self.row_positions[row]
            if document == NONE:
                continue
            end = min(position + self.segment_length, int(self.num_predictions[document]))
            if row - first in self.mine:
                i, length = row - first - self.mine.start, end - position
                tokens = self.documents[document][position : end + 1]
                segment.tokens[i, :length], segment.targets[i, :length] = tokens[:-1], tokens[1:]
                segment.starts[i], segment.positions[i] = starts, position
                segment.documents[i] = document
            self.predictions += end - position
            self.row_positions[row] = end
            if end == self.num_predictions[document]:
                self.row_documents[row] = NONE
        return segment

    def __iter__(self) -> Iterator[Segment]:
        """Segments until all rows, also those of other processes, have read everything."""
        while any(document != NONE for document in self.row_documents) or self._has_more():
            yield self.next()

    @property
    def epoch(self) -> float:
        """Documents taken from the queue, in passes over all of them."""
        return self._epoch + self._place / max(len(self._queue), 1)

    def epochs_in(self, steps: int) -> float:
        """How many passes over all documents so many segments of all rows are."""
        return steps * self.num_rows / self.segments_in_epoch

    @functools.cached_property
    def segments_in_epoch(self) -> int:
        """Of all documents."""
        segments = -(-self.num_predictions // self.segment_length)
        return int(segments[self.order(0)].sum())

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "place": self._place,
            "documents": list(self.row_documents),
            "positions": list(self.row_positions),
            "turn": self.turn,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        documents, positions = list(state["documents"]), list(state["positions"])
        if len(documents) != len(self.row_documents):
            raise ValueError(
                f"the saved position has {len(documents)} rows and this run has "
                f"{len(self.row_documents)}: resume with as many rows"
            )
        for document, position in zip(documents, positions, strict=True):
            fits = document < len(self.documents) and state["place"] <= len(self._queue)
            if not fits or (document != NONE and position >= self.num_predictions[document]):
                raise ValueError(
                    f"the saved position (document {document}, token {position}) is not in these "
                    "documents: resume with the store that the run began with"
                )
        self.row_documents, self.row_positions = documents, positions
        self.turn = state.get("turn", 0)
        self._start_epoch(state["epoch"])
        self._place = state["place"]

    def _take_document(self) -> int:
        if not self._has_more():
            return NONE
        if self._place == len(self._queue):
            self._start_epoch(self._epoch + 1)
        self._place += 1
        return int(self._queue[self._place - 1])

    def _has_more(self) -> bool:
        return self._place < len(self._queue) or len(self.order(self._epoch + 1)) > 0

    def _start_epoch(self, epoch: int) -> None:
        self._epoch, self._place = epoch, 0
        self._queue: IntArray = self.order(epoch)


def num_predictions(documents: Documents) -> IntArray:
    """A document of n tokens gives n - 1 predictions, of every token but the first."""
    return np.maximum(documents.lengths - 1, 0)
