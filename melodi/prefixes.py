"""Scores many texts that begin alike: what they share is read once, and its memory is kept.

The texts form a tree. An edge is a stretch of ids that the same texts share; it is read from the
memory at its upper end, together with some of its siblings. What is at its lower end is kept until
all texts below it are read, so no more memories exist than rows times the branchings on one path.

Shapes: B rows, T ids, D width, n scored ids.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from melodi.layers.nats import chunks, linear_nats, logits_of
from melodi.memory import MemoryState
from melodi.model import LanguageModel
from melodi.reading import portions
from melodi.stream.reader import CHUNK_WINDOWS, evaluating


@dataclass
class Text:
    """Ids to read, and what those from `first` on cost."""

    ids: list[int]
    first: int
    """At least 1: before an id that is scored something must have been read."""
    nats: float = 0.0
    greedy: bool = True
    """Whether every id that is scored was the most likely one."""


class Point(NamedTuple):
    """Where a stretch has ended."""

    state: MemoryState
    last_1D: Tensor
    """The final hidden vector of its last id."""


class Stretches(NamedTuple):
    """Siblings in the tree: each is the texts that share it, in order."""

    above: Point
    depth: int
    """Ids before them."""
    texts: list[list[Text]]

    def ids(self) -> list[list[int]]:
        return [group[0].ids[self.depth : shared(group)] for group in self.texts]


@torch.inference_mode()
def score(
    model: LanguageModel,
    texts: Sequence[Text],
    rows: int = 8,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Fills in what the texts cost. `progress` hears how many of them are done."""
    if any(not 0 < text.first <= len(text.ids) for text in texts):
        raise ValueError("something must come before the first id that is scored")
    root = Point(model.empty_state(1), model.embedding.weight.new_zeros(1, model.config.width))
    waiting = list(below(root, 0, texts, rows))
    with evaluating(model):
        while waiting:
            stretches = waiting.pop()
            for group, point in zip(stretches.texts, walk(model, stretches), strict=True):
                depth = shared(group)
                if progress is not None:
                    progress(sum(len(text.ids) == depth for text in group))
                waiting += below(point, depth, group, rows)


def below(above: Point, depth: int, texts: Iterable[Text], rows: int) -> list[Stretches]:
    """The stretches that go on from a point, in batches of about equal lengths."""
    longer = sorted((text for text in texts if len(text.ids) > depth), key=lambda text: text.ids)
    groups = [list(group) for _, group in groupby(longer, key=lambda text: text.ids[depth])]
    groups.sort(key=shared)
    return [Stretches(above, depth, groups[i : i + rows]) for i in range(0, len(groups), rows)]


def shared(group: Sequence[Text]) -> int:
    """How many ids texts in order have in common: those of the first and the last of them."""
    first, last = group[0].ids, group[-1].ids
    pairs = enumerate(zip(first, last, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(last)))


def walk(model: LanguageModel, stretches: Stretches) -> list[Point]:
    """Reads the stretches side by side, and adds up what their texts are scored for."""
    state = stretches.above.state.select([0] * len(stretches.texts))
    last_BD = stretches.above.last_1D.repeat(len(stretches.texts), 1)
    ids = [torch.tensor(row) for row in stretches.ids()]
    longest, place = max(map(len, ids)), int(state.open_B.max())
    for cut in portions(longest, place, model.config.window, CHUNK_WINDOWS):
        piece = [row[cut] for row in ids]
        lengths = [len(row) for row in piece]
        tokens_BT = pad_sequence(piece, batch_first=True).to(last_BD.device)
        ragged = lengths if len(set(lengths)) > 1 else None
        x_BTD, state, _ = model.hidden(tokens_BT, state, ragged)
        for row, (group, new) in enumerate(zip(stretches.texts, piece, strict=True)):
            if len(new):
                expecting_TD = torch.cat([last_BD[row, None], x_BTD[row, : len(new) - 1]])
                depth = stretches.depth + cut.start
                add(model, group, depth, expecting_TD, tokens_BT[row, : len(new)])
                last_BD[row] = x_BTD[row, len(new) - 1]
    return [Point(state.select([row]), last_BD[row : row + 1]) for row in range(len(ids))]


def add(
    model: LanguageModel, group: list[Text], depth: int, expecting_TD: Tensor, ids_T: Tensor
) -> None:
    """Counts ids that come after `depth` others, each expected by the id before it, to the texts
    that are scored for them. Of the others no logits are computed."""
    skipped = max(min(text.first for text in group) - depth, 0)
    if skipped >= len(ids_T):
        return
    x_nD, ids_n = expecting_TD[skipped:], ids_T[skipped:]
    weight_VD, scale = model.embedding.weight, model.output_scale
    nats_n = linear_nats(x_nD, weight_VD, ids_n, scale).double().cpu()
    most_likely = [
        logits_of(x, weight_VD, scale).argmax(-1) == ids
        for x, ids in chunks(x_nD, ids_n, len(weight_VD))
    ]
    greedy_n = torch.cat(most_likely).cpu()
    for text in group:
        begin = max(text.first - depth - skipped, 0)
        text.nats += float(nats_n[begin:].sum())
        text.greedy = text.greedy and bool(greedy_n[begin:].all())
