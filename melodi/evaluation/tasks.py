"""Recall tasks: documents of random tokens that ask, windows later, for what they said.

Every task makes whole documents of several windows for small models: tokens, targets that are -1
but at questions, and for each question the windows between it and what it asks for. An answer is
never part of the document (except in `copy`), so that every question has to be answered from where
the fact stood, and none from an earlier answer.

- passkey: a number among fillers in the first window; every later window asks for one digit of it.
- needle: a key with its value, in a text of a small random language; every later window asks for
  the key's value.
- mqar: multi-query associative recall. Every window has new keys with values and asks for keys of
  windows before it, all distances alike.
- facts: the same, where a key and its value are one token: nothing has to be bound together, only
  held, so that the two difficulties can be told apart.
- rewrite: a few keys that get new values again and again; the last one counts.
- copy: a sequence in the first window is to be repeated in one later window, token by token.

Shapes: R rows, K windows, f facts of a window, k keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from melodi.evaluation.pages import Examples, Page, language, slots


@dataclass(frozen=True)
class Sizes:
    """How large the documents of a task are."""

    window: int = 16
    windows: int = 8
    answers: int = 16
    """Values that an answer can have."""
    keys: int = 32
    """Names that the value of a needle can have."""
    facts: int = 2
    """Pairs of a key and a value in each window, and questions, where a window has several."""

    def __post_init__(self) -> None:
        if self.windows < 2:
            raise ValueError(f"windows={self.windows} leaves no later window to ask in: give 2")
        for name, least in (("answers", 2), ("keys", 1), ("facts", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.window < 4 * self.facts + 2 or self.window < 8:
            raise ValueError(
                f"window={self.window} is too short for {self.facts} facts and as many questions: "
                f"give at least {max(4 * self.facts + 2, 8)}"
            )


class Vocabulary(NamedTuple):
    """The ids of a task: answers first, from 0; then keys, fillers, facts that are one token each,
    and the two signs."""

    answers: int
    keys: int
    fillers: int
    facts: int = 0

    @property
    def first_key(self) -> int:
        return self.answers

    @property
    def first_filler(self) -> int:
        return self.answers + self.keys

    @property
    def first_fact(self) -> int:
        return self.first_filler + self.fillers

    @property
    def says(self) -> int:
        """The sign before a fact."""
        return self.first_fact + self.facts

    @property
    def asks(self) -> int:
        """The sign before, or instead of, a key that is asked for."""
        return self.says + 1

    @property
    def size(self) -> int:
        return self.asks + 1


FILLERS, WORDS, DIGITS = 8, 24, 3
"""Of the plain fillers, of the small language, and of a passkey."""


@dataclass(frozen=True)
class Task:
    """A task at a size."""

    name: str
    sizes: Sizes
    vocabulary: Vocabulary
    make: Callable[[Generator, int], Examples]
    """Documents for so many rows."""

    @property
    def chance(self) -> float:
        return 1 / self.vocabulary.answers


def task(name: str, sizes: Sizes | None = None) -> Task:
    """The task of this name."""
    if name not in TASKS:
        raise ValueError(f"task {name!r} is unknown: choose one of {', '.join(TASKS)}")
    sizes = sizes or Sizes()
    vocabulary_of, make = TASKS[name]
    vocabulary = vocabulary_of(sizes)
    return Task(name, sizes, vocabulary, lambda random, rows: make(random, rows, sizes, vocabulary))


def passkey(random: Generator, rows: int, s: Sizes, v: Vocabulary) -> Examples:
    """A key of the sign and digits; the questions are keys that name a digit's place."""
    page = Page(random.integers(v.first_filler, v.first_fact, (rows, s.windows, s.window)))
    digits_R3 = random.integers(v.answers, size=(rows, DIGITS))
    said = np.column_stack([np.full(rows, v.says), digits_R3])
    page.write(0, random.integers(s.window - DIGITS, size=rows), said)
    for k in range(1, s.windows):
        digit_R = random.integers(DIGITS, size=rows)
        place_R = random.integers(s.window - 1, size=rows)
        question = np.column_stack([np.full(rows, v.asks), v.first_key + digit_R])
        page.ask(k, place_R, question, digits_R3[np.arange(rows), digit_R], np.full(rows, k))
    return page.examples()


def needle(random: Generator, rows: int, s: Sizes, v: Vocabulary) -> Examples:
    """One key and value, said in any window but the last, asked for in all after it."""
    words_RT = language(random, (rows, s.windows * s.window), v.fillers)
    page = Page((v.first_filler + words_RT).reshape(rows, s.windows, s.window))
    key_R = v.first_key + random.integers(v.keys, size=rows)
    value_R = random.integers(v.answers, size=rows)
    window_R = random.integers(s.windows - 1, size=rows)
    said = np.column_stack([np.full(rows, v.says), key_R, value_R])
    page.write(window_R, random.integers(s.window - 2, size=rows), said)
    question = np.column_stack([np.full(rows, v.asks), key_R])
    for k in range(1, s.windows):
        place_R = random.integers(s.window - 1, size=rows)
        page.ask(k, place_R, question, value_R, k - window_R, window_R < k)
    return page.examples()


def mqar(random: Generator, rows: int, s: Sizes, v: Vocabulary) -> Examples:
    """Keys never come twice; the distance of a question is drawn first, then the fact."""
    page = Page(random.integers(v.first_filler, v.first_fact, (rows, s.windows, s.window)))
    keys_RKf = random.permuted(np.tile(np.arange(v.keys), (rows, 1)), axis=1)
    keys_RKf = v.first_key + keys_RKf.reshape(rows, s.windows, s.facts)
    values_RKf = random.integers(v.answers, size=keys_RKf.shape)
    row_R = np.arange(rows)
    for k in range(s.windows):
        places = slots(random, rows, s.window)
        for fact in range(s.facts):
            key_R, value_R = keys_RKf[:, k, fact], values_RKf[:, k, fact]
            if v.facts:
                joined_R = v.first_fact + (key_R - v.first_key) * v.answers + value_R
                page.write(k, places[:, fact], joined_R[:, None])
            else:
                page.write(k, places[:, fact], np.column_stack([key_R, value_R]))
            if k:
                distance_R = random.integers(1, k + 1, rows)
                other_R = random.integers(s.facts, size=rows)
                chosen = row_R, k - distance_R, other_R
                question = np.column_stack([np.full(rows, v.asks), keys_RKf[chosen]])
                asked_at = places[:, s.facts + fact]
                page.ask(k, asked_at, question, values_RKf[chosen], distance_R)
    return page.examples()


def rewrite(random: Generator, rows: int, s: Sizes, v: Vocabulary) -> Examples:
    """Each window gives new values to some keys and asks for others, or for the same as before."""
    page = Page(random.integers(v.first_filler, v.first_fact, (rows, s.windows, s.window)))
    value_Rk = np.zeros((rows, v.keys), np.int64)
    last_Rk = np.full((rows, v.keys), -1)
    row_R = np.arange(rows)
    for k in range(s.windows):
        places = slots(random, rows, s.window)
        if k:
            for fact in range(s.facts):
                # Any key that has a value, all alike: noise decides among them.
                key_R = np.where(last_Rk >= 0, random.random(last_Rk.shape), -1.0).argmax(1)
                question = np.column_stack([np.full(rows, v.asks), v.first_key + key_R])
                answer_R, since_R = value_Rk[row_R, key_R], k - last_Rk[row_R, key_R]
                page.ask(k, places[:, s.facts + fact], question, answer_R, since_R)
        written_Rf = random.random((rows, v.keys)).argsort(1)[:, : s.facts]
        for fact in range(s.facts):
            key_R, new_R = written_Rf[:, fact], random.integers(v.answers, size=rows)
            page.write(k, places[:, fact], np.column_stack([v.first_key + key_R, new_R]))
            value_Rk[row_R, key_R], last_Rk[row_R, key_R] = new_R, k
        # A question stands before or after this window's facts: those that were written now would
        # be ambiguous, and are not counted.
        page.forget_rewritten(k, v.first_key + written_Rf)
    return page.examples()


def copy(random: Generator, rows: int, s: Sizes, v: Vocabulary) -> Examples:
    """The sequence fills half a window; its repetition is shown as it would be written."""
    page = Page(random.integers(v.first_filler, v.first_fact, (rows, s.windows, s.window)))
    length, row_R = s.window // 2 - 1, np.arange(rows)
    sequence = random.integers(v.answers, size=(rows, length))
    place_R = random.integers(s.window - length, size=rows)
    page.write(0, place_R, np.column_stack([np.full(rows, v.says), sequence]))
    window_R = random.integers(1, s.windows, rows)
    place_R = random.integers(s.window - length, size=rows)
    page.write(window_R, place_R, np.column_stack([np.full(rows, v.asks), sequence]))
    for i in range(length):
        page.targets[row_R, window_R, place_R + i] = sequence[:, i]
        page.distances[row_R, window_R, place_R + i] = window_R
    return page.examples()


TASKS: dict[
    str,
    tuple[Callable[[Sizes], Vocabulary], Callable[[Generator, int, Sizes, Vocabulary], Examples]],
] = {
    "passkey": (lambda s: Vocabulary(10, DIGITS, FILLERS), passkey),
    "needle": (lambda s: Vocabulary(s.answers, s.keys, WORDS), needle),
    "mqar": (lambda s: Vocabulary(s.answers, s.windows * s.facts, FILLERS), mqar),
    "facts": (
        lambda s: Vocabulary(
            s.answers, s.windows * s.facts, FILLERS, s.windows * s.facts * s.answers
        ),
        mqar,
    ),
    "rewrite": (lambda s: Vocabulary(s.answers, 4 * s.facts, FILLERS), rewrite),
    "copy": (lambda s: Vocabulary(s.answers, 1, FILLERS), copy),
}
