"""Documents of a recall task while they are written: facts, questions, and what stands between.

Shapes: R rows, T tokens of a document, K windows, W tokens of a window, n tokens that are written.
"""

from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Examples(NamedTuple):
    """Documents of a task."""

    tokens_RT: Ints
    targets_RT: Ints
    """The answer at the last token of each question, -1 elsewhere."""
    distances_RT: Ints
    """Windows from the fact to the question, -1 where nothing is asked."""


class Page:
    """Documents that are being written."""

    def __init__(self, tokens_RKW: Ints) -> None:
        self.tokens = tokens_RKW
        self.targets = np.full_like(tokens_RKW, -1)
        self.distances = np.full_like(tokens_RKW, -1)
        self.rows = np.arange(len(tokens_RKW))

    def write(self, window: int | Ints, place_R: Ints, tokens_Rn: Ints) -> None:
        """Puts the same number of tokens into a window of each row."""
        for i in range(tokens_Rn.shape[1]):
            self.tokens[self.rows, window, place_R + i] = tokens_Rn[:, i]

    def ask(
        self,
        window: int,
        place_R: Ints,
        question_Rn: Ints,
        answer_R: Ints,
        distance_R: Ints,
        asked_R: NDArray[np.bool_] | None = None,
    ) -> None:
        """Puts a question into a window of each row, or of the rows that can be asked."""
        rows = self.rows if asked_R is None else self.rows[asked_R]
        last = question_Rn.shape[1] - 1
        for i in range(last + 1):
            self.tokens[rows, window, place_R[rows] + i] = question_Rn[rows, i]
        self.targets[rows, window, place_R[rows] + last] = answer_R[rows]
        self.distances[rows, window, place_R[rows] + last] = distance_R[rows]

    def forget_rewritten(self, window: int, keys_Rf: Ints) -> None:
        """Takes back the questions of a window for keys that it gives a new value to."""
        asked_RW = self.targets[:, window] >= 0
        again_RW = (self.tokens[:, window, :, None] == keys_Rf[:, None]).any(-1) & asked_RW
        self.targets[:, window][again_RW] = -1
        self.distances[:, window][again_RW] = -1

    def examples(self) -> Examples:
        rows = len(self.tokens)
        return Examples(
            *[array.reshape(rows, -1) for array in (self.tokens, self.targets, self.distances)]
        )


def slots(random: Generator, rows: int, window: int) -> Ints:
    """Places of a window for two tokens each, in random order, so that nothing overlaps."""
    return 2 * random.random((rows, window // 2)).argsort(1)


def language(random: Generator, shape: tuple[int, int], words: int) -> Ints:
    """Texts in which words follow each other as in a language: word i is 1/i as frequent as the
    first, and half of the words follow from the one before them."""
    frequency = 1 / np.arange(1, words + 1)
    text_RT = random.choice(words, shape, p=frequency / frequency.sum())
    follows_RT = random.random(shape) < 0.5
    for t in range(1, shape[1]):
        after_R = (5 * text_RT[:, t - 1] + 3) % words
        text_RT[:, t] = np.where(follows_RT[:, t], after_R, text_RT[:, t])
    return text_RT
