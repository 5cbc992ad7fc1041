"""Batches: the segments of this process's rows, each built while the step before it runs.

1. A thread walks one segment ahead of the step, reads its tokens, checks them, and pins them where
   a GPU will fetch them.
2. What is saved is where the walk stood after the batch that was given out last. So a run that
   resumes gets the batch that was built and never used.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from melodi.boundary import check_ids
from melodi.data.segments import Walker


class Batch(NamedTuple):
    """On the host. B: rows of this process, T: tokens of a segment."""

    tokens_BT: Tensor
    targets_BT: Tensor
    starts_B: Tensor
    """Rows that begin a new document."""
    predictions: int
    """Of all rows of all processes."""
    after: dict[str, Any]
    """Where the walk stands after it."""


class Batches:
    """The batches of a walk, for ever."""

    def __init__(self, walker: Walker, vocab_size: int, pinned: bool = False) -> None:
        self.walker, self.vocab_size, self.pinned = walker, vocab_size, pinned
        self._after = walker.state_dict()
        self._thread = ThreadPoolExecutor(1, "batches")
        self._ahead: Future[Batch] | None = None

    def next(self) -> Batch:
        ahead = self._ahead or self._thread.submit(self._build)
        batch = ahead.result()
        self._ahead = self._thread.submit(self._build)
        self._after = batch.after
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the walk stood after the batch that was given out last."""
        return self._after

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._ahead is not None:
            self._ahead.exception()  # waits until nobody walks
        self._ahead = None
        self.walker.load_state_dict(state)
        self._after = self.walker.state_dict()

    def _build(self) -> Batch:
        segment = self.walker.next()
        tensors = [torch.from_numpy(array) for array in (segment.tokens, segment.targets)]
        for what, tensor, lowest in zip(("token", "target"), tensors, (0, -1), strict=True):
            check_ids(what, tensor, lowest, self.vocab_size)
        tokens_BT, targets_BT = (t.pin_memory() if self.pinned else t for t in tensors)
        return Batch(
            tokens_BT,
            targets_BT,
            torch.from_numpy(segment.starts),
            self.walker.predictions,
            self.walker.state_dict(),
        )
