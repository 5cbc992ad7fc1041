"""Whole-document evaluation: perplexity, bits per byte, is the memory used.

1. Documents are read from start to end, several at a time, each in its own row of the memory.
2. A document of n tokens gives n - 1 predictions, counted across window and segment edges.
3. Perplexity is exp(total nats / total predictions); bits per byte divides by all UTF-8 bytes.
4. The same pass with memory dropped at every window shows what the memory is worth.

Shapes: R rows, T tokens of a segment.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from melodi.data.segments import Segment, Walker, num_predictions
from melodi.data.store import Documents
from melodi.evaluation.intervals import perplexity
from melodi.evaluation.tallies import Tally
from melodi.model import LanguageModel, Scored
from melodi.stream.reader import evaluating

Nats = Callable[..., Scored]
"""`model.nats`, or what wraps it."""


@dataclass
class Evaluation:
    """Sums over documents; those of several processes, or of several sets, can be added up."""

    nats: float = 0.0
    predictions: int = 0
    documents: int = 0
    tokens: int = 0
    bytes: int = 0

    @property
    def loss(self) -> float:
        return self.nats / max(self.predictions, 1)

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / max(self.bytes, 1)

    def __add__(self, other: "Evaluation") -> "Evaluation":
        return Evaluation.from_array(self.to_array() + other.to_array())

    def to_array(self) -> np.ndarray:
        """All sums in one flat float64 array, as a reduction over processes needs them."""
        return np.array(dataclasses.astuple(self), np.float64)

    @classmethod
    def from_array(cls, array: Sequence[float] | np.ndarray) -> "Evaluation":
        nats, *numbers = array
        return cls(float(nats), *map(int, numbers))


def evaluate(
    model: LanguageModel,
    documents: Documents,
    chosen: list[int] | None = None,
    rows: int = 8,
    segment_windows: int = 8,
    with_memory: bool = True,
    nats: Nats | None = None,
    mine: range | None = None,
    progress: Callable[[int], object] | None = None,
    tallies: Sequence[Tally] = (),
) -> Evaluation:
    """Reads the chosen documents (all when not given) once, memory carried through or dropped.

    `nats` stands in for `model.nats` where the model is wrapped. Of many processes each reads the
    rows `mine`, all in step, and gets the sums over those, which add up to the sums over all.
    `progress` hears of tokens read; `tallies` get the nats of every segment.
    """
    nats, mine = nats or model.nats, mine or range(rows)
    device = model.embedding.weight.device
    windows = segment_windows if with_memory else 1
    result = Evaluation()
    with evaluating(model), torch.inference_mode():
        state = model.empty_state(len(mine))
        for segment in Walker.once(documents, rows, windows * model.config.window, chosen, mine):
            state = state.forget(segment.starts if with_memory else [True] * len(mine))
            tokens_RT, targets_RT = (
                torch.from_numpy(array).to(device) for array in (segment.tokens, segment.targets)
            )
            nats_RT, state, _ = nats(tokens_RT, targets_RT, state)
            nats_read = nats_RT.cpu().double().numpy()
            count(result, nats_read, segment, documents)
            for tally in tallies:
                tally(segment, nats_read)
            if progress is not None:
                progress(int((segment.targets >= 0).sum()))
    if 0 in mine:  # documents that predict nothing are in no row, and are counted by one process
        indices = np.arange(len(documents)) if chosen is None else np.array(chosen, np.int64)
        unread = indices[num_predictions(documents)[indices] == 0]
        count_documents(result, documents, unread)
    return result


def count(result: Evaluation, nats_RT: np.ndarray, segment: Segment, documents: Documents) -> None:
    """Adds a segment that has been read, and the documents that begin in it."""
    counted = segment.targets >= 0
    result.nats += float(nats_RT[counted].sum())
    result.predictions += int(counted.sum())
    count_documents(result, documents, segment.documents[segment.starts])


def count_documents(result: Evaluation, documents: Documents, indices: np.ndarray) -> None:
    result.documents += len(indices)
    result.tokens += int(documents.lengths[indices].sum())
    result.bytes += int(documents.num_bytes[indices].sum())


def choose(documents: Documents, max_tokens: int | None) -> list[int]:
    """Whole documents, in order, until they hold `max_tokens`; at least one."""
    if max_tokens is None:
        return list(range(len(documents)))
    usable = np.flatnonzero(num_predictions(documents)).tolist()
    before = np.cumsum(documents.lengths[usable]) - documents.lengths[usable]
    return [i for i, tokens in zip(usable, before, strict=True) if tokens < max_tokens]
