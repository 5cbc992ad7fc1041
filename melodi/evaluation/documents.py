"""Whole-document evaluation: perplexity, bits per byte, loss by position, is the memory used.

1. Documents are read from start to end, several at a time, each in its own row of the memory.
2. A document of n tokens gives n - 1 predictions, counted across window and segment edges.
3. Perplexity is exp(total nats / total predictions); bits per byte divides by all UTF-8 bytes.
4. The same pass with memory dropped at every window shows what the memory is worth.

Shapes: R rows, T tokens of a segment, H heads, t queries, k keys.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from melodi.data.store import Documents
from melodi.layers.melodi import LongTermLayer
from melodi.layers.transformer_xl import MemorizingLayer
from melodi.memory import MemoryState
from melodi.model import LanguageModel
from melodi.sharded import gather

Nats = Callable[[Tensor, Tensor, MemoryState], tuple[Tensor, MemoryState]]
POSITION_BUCKETS = 24


@dataclass
class Evaluation:
    """Sums over documents; several can be added up."""

    nats: float = 0.0
    predictions: int = 0
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    nats_by_position: np.ndarray = field(default_factory=lambda: np.zeros(POSITION_BUCKETS))
    predictions_by_position: np.ndarray = field(default_factory=lambda: np.zeros(POSITION_BUCKETS))
    """By the power of two of the position in the document."""

    @property
    def loss(self) -> float:
        return self.nats / max(self.predictions, 1)

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / max(self.bytes, 1)

    def by_position(self) -> list[dict[str, float]]:
        """Mean nats for positions from `first` up to twice that."""
        return [
            {"first": 1 << i, "nats": nats / count, "predictions": int(count)}
            for i, (nats, count) in enumerate(
                zip(self.nats_by_position, self.predictions_by_position, strict=True)
            )
            if count
        ]


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
) -> Evaluation:
    """Reads the chosen documents (all when not given) once, memory carried through or dropped.

    `nats` stands in for `model.nats` where the model is wrapped. Of many processes each reads the
    rows `mine`, all in step, and gets the sums over those. `progress` hears of tokens read.
    """
    nats, mine = nats or model.nats, mine or range(rows)
    device = model.embedding.weight.device
    windows = segment_windows if with_memory else 1
    result = Evaluation()
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        state = model.empty_state(len(mine))
        for everyone in walks(documents, chosen, rows, windows * model.config.window):
            walk = everyone.rows(slice(mine.start, mine.stop))
            state = state.forget(walk.starts_R if with_memory else [True] * len(mine))
            tokens_RT, targets_RT = (
                torch.from_numpy(array).to(device) for array in (walk.tokens_RT, walk.targets_RT)
            )
            nats_RT, state = nats(tokens_RT, targets_RT, state)
            add(result, nats_RT.double().cpu().numpy(), walk)
            if progress is not None:
                progress(int((walk.targets_RT >= 0).sum()))
    model.train(was_training)
    indices = range(len(documents)) if chosen is None else chosen
    result.documents = len(indices)
    result.tokens = int(sum(documents.lengths[i] for i in indices))
    result.bytes = int(sum(documents.num_bytes[i] for i in indices))
    return result


@dataclass
class Walk:
    """One segment of every row; rows without a document are padding."""

    tokens_RT: np.ndarray
    targets_RT: np.ndarray
    starts_R: np.ndarray
    position_R: np.ndarray
    """The place in its document where each row's segment begins."""

    def rows(self, rows: slice) -> "Walk":
        return Walk(
            self.tokens_RT[rows], self.targets_RT[rows], self.starts_R[rows], self.position_R[rows]
        )


def walks(documents: Documents, chosen: list[int] | None, rows: int, length: int) -> Iterator[Walk]:
    """All segments of the documents, the longest first, so that the rows end at about one time."""
    queue = list(range(len(documents)) if chosen is None else chosen)
    queue = [i for i in queue if documents.lengths[i] >= 2]
    queue.sort(key=lambda i: documents.lengths[i])
    reading: list[int | None] = [None] * rows
    place = [0] * rows
    while queue or any(i is not None for i in reading):
        walk = Walk(
            tokens_RT=np.zeros((rows, length), np.int64),
            targets_RT=np.full((rows, length), -1, np.int64),
            starts_R=np.zeros(rows, bool),
            position_R=np.zeros(rows, np.int64),
        )
        for row in range(rows):
            if reading[row] is None and queue:
                reading[row], place[row] = queue.pop(), 0
                walk.starts_R[row] = True
            document = reading[row]
            if document is None:
                continue
            start = place[row]
            piece = documents[document][start : start + length + 1].astype(np.int64)
            walk.tokens_RT[row, : len(piece) - 1] = piece[:-1]
            walk.targets_RT[row, : len(piece) - 1] = piece[1:]
            walk.position_R[row] = start
            place[row] = start + length
            if place[row] >= documents.lengths[document] - 1:
                reading[row] = None
        yield walk


def add(result: Evaluation, nats_RT: np.ndarray, walk: Walk) -> None:
    counted = walk.targets_RT >= 0
    result.nats += float(nats_RT[counted].sum())
    result.predictions += int(counted.sum())
    position_RT = walk.position_R[:, None] + np.arange(1, nats_RT.shape[1] + 1)
    bucket = np.minimum(np.log2(position_RT).astype(int), POSITION_BUCKETS - 1)[counted]
    result.nats_by_position += np.bincount(bucket, nats_RT[counted], POSITION_BUCKETS)
    result.predictions_by_position += np.bincount(bucket, minlength=POSITION_BUCKETS)


def choose(documents: Documents, max_tokens: int | None) -> list[int]:
    """Whole documents, in order, until they hold `max_tokens`; at least one."""
    if max_tokens is None:
        return list(range(len(documents)))
    usable = [i for i in range(len(documents)) if documents.lengths[i] >= 2]
    before = np.cumsum(documents.lengths[usable]) - documents.lengths[usable]
    return [i for i, tokens in zip(usable, before, strict=True) if tokens < max_tokens]


def vital_signs(model: LanguageModel) -> dict[str, float]:
    """The mean gate of each layer that has one: the share of what is read from long-term memory.
    Where the model is sharded, every process must ask at the same time."""
    return {
        f"gate/{i}": gather(layer.gate.alpha()).mean().item()
        for i, layer in enumerate(model.stack)
        if isinstance(layer, LongTermLayer | MemorizingLayer)
    }


def memory_shares(
    model: LanguageModel, tokens: np.ndarray, nats: Nats | None = None
) -> dict[str, float]:
    """The share of attention that goes to memory while these tokens are read, from the second
    window on: of self-attention to the past in each layer, and its mean."""
    device = model.embedding.weight.device
    tokens_1T = torch.from_numpy(tokens.astype(np.int64))[None].to(device)
    was_training = model.training
    model.eval()
    with torch.inference_mode(), watching(model) as shares:
        (nats or model.nats)(tokens_1T, torch.full_like(tokens_1T, -1), model.empty_state(1))
    model.train(was_training)
    means = {name: float(np.mean(values[1:])) for name, values in shares.items() if values[1:]}
    return {**means, "past": float(np.mean(list(means.values())))} if means else {}


@contextlib.contextmanager
def watching(model: LanguageModel) -> Iterator[dict[str, list[float]]]:
    """Collects, while the model reads, the share of self-attention that goes to the past: to
    short-term memory or the cache. The share of long-term memory is the gate's."""
    shares: dict[str, list[float]] = {}

    def wrap(name: str, past: int, attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def watched(q: Tensor, k: Tensor, v: Tensor, bias: Any, visible: Tensor) -> Tensor:
            # Attending to indicators of the past instead of values gives the mass on it.
            is_past = torch.zeros_like(v)
            is_past[:, :, :past] = 1
            shares.setdefault(name, []).append(
                attention(q, k, is_past, bias, visible).mean().item()
            )
            return attention(q, k, v, bias, visible)

        return watched

    for i, layer in enumerate(model.stack):
        if layer.past_slots:
            attention = layer.block.self_attention
            layer.block.self_attention = wrap(f"past/{i}", layer.past_slots, attention)  # type: ignore[method-assign]
    try:
        yield shares
    finally:
        for layer in model.stack:
            layer.block.__dict__.pop("self_attention", None)
