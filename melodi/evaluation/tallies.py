"""What is added up while documents are read, beside the sums of all of them.

A tally is called with every segment that was read and the nats of its targets; several can listen
to one pass.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from melodi.data.segments import Segment

Tally = Callable[[Segment, NDArray[np.float64]], object]


class PerDocument:
    """Nats and predictions of each document of a split."""

    def __init__(self, documents: int) -> None:
        self.nats = np.zeros(documents)
        self.predictions = np.zeros(documents, np.int64)

    def __call__(self, segment: Segment, nats_RT: NDArray[np.float64]) -> None:
        counted_RT = segment.targets >= 0
        reading = segment.documents >= 0  # a document is in one row at a time
        documents = segment.documents[reading]
        self.nats[documents] += np.where(counted_RT, nats_RT, 0.0).sum(1)[reading]
        self.predictions[documents] += counted_RT.sum(1)[reading]


class ByPowers:
    """Nats and predictions by a number that each target has, in buckets that double: 0, 1, 2 to 3,
    4 to 7 and so on."""

    def __init__(self, number: Callable[[NDArray[np.int64]], NDArray[np.int64]]) -> None:
        """number: of the place of a token in its document, counted from 0."""
        self.number = number
        self.nats, self.predictions = np.zeros(0), np.zeros(0)

    def __call__(self, segment: Segment, nats_RT: NDArray[np.float64]) -> None:
        counted_RT = segment.targets >= 0
        if not counted_RT.any():
            return
        place_RT = segment.positions[:, None] + np.arange(nats_RT.shape[1])
        # 0 has no power of two below it: it has the first bucket to itself.
        bucket = np.frexp(self.number(place_RT)[counted_RT])[1]
        missing = max(int(bucket.max()) + 1 - len(self.nats), 0)
        self.nats, self.predictions = (
            np.pad(a, (0, missing)) for a in (self.nats, self.predictions)
        )
        self.nats += np.bincount(bucket, nats_RT[counted_RT], len(self.nats))
        self.predictions += np.bincount(bucket, minlength=len(self.nats))

    def means(self) -> list[dict[str, float]]:
        """Of each bucket that has predictions, its first number, mean nats, and predictions."""
        return [
            {"first": 1 << i >> 1, "nats": nats / count, "predictions": int(count)}
            for i, (nats, count) in enumerate(zip(self.nats, self.predictions, strict=True))
            if count
        ]


def by_position() -> ByPowers:
    """By the tokens of the document that a prediction is made from, 1 for the first."""
    return ByPowers(lambda place_RT: place_RT + 1)


def by_place_in_window(window: int) -> ByPowers:
    """By the tokens of its own window that a prediction is made from, 1 for the first."""
    return ByPowers(lambda place_RT: place_RT % window + 1)


def by_window(window: int) -> ByPowers:
    """By the whole windows of the document that lie before the prediction."""
    return ByPowers(lambda place_RT: place_RT // window)
