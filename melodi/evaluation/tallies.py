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
