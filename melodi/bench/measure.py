"""How things are measured on a noisy machine: in turn, by time, as ratios inside a round.

- `interleave` takes one sample of every task per round, in a new order each time, until the seconds
  are spent. What disturbs the machine then disturbs all tasks alike.
- Two tasks are compared round by round, and the median of these ratios is reported: numbers of
  different rounds, let alone of different runs, are not comparable.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Summary:
    """A median, and the quartiles around it; the extremes where there are fewer than four."""

    median: float
    low: float
    high: float
    count: int

    @property
    def spread(self) -> float:
        """Half of the range from low to high, as a share of the median."""
        return (self.high - self.low) / 2 / self.median if self.median else 0.0


def summary(samples: Sequence[float]) -> Summary:
    if not samples:
        raise ValueError("a summary needs at least one sample")
    low, high = min(samples), max(samples)
    if len(samples) >= 4:
        low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Summary(statistics.median(samples), low, high, len(samples))


def ratio(samples: Sequence[float], reference: Sequence[float]) -> Summary:
    """Of samples to those of the reference, each to the one of its own round."""
    if len(samples) != len(reference):
        raise ValueError(
            f"{len(samples)} and {len(reference)} samples are not of the same rounds: "
            "measure both in one run"
        )
    return summary([a / b for a, b in zip(samples, reference, strict=True)])


@dataclass(frozen=True)
class Task:
    """Something that is measured once per round."""

    name: str
    metric: str
    sample: Callable[[], float]
    """Takes a sample: units per second."""
    work: float | None = None
    """What one unit needs of the machine, in operations or bytes, if that was counted."""
    optional: bool = False
    """A failure is noted, and the task left out: it is not our code that fails."""
    needed: bool = False
    """Measured even if no time is left: the others are compared with it."""


class Measured(NamedTuple):
    task: Task
    samples: list[float]


def rate(run: Callable[[], object], units: int) -> Callable[[], float]:
    """A sample of units per second."""

    def sample() -> float:
        start = time.perf_counter()
        run()
        return units / max(time.perf_counter() - start, 1e-9)

    return sample


def interleave(
    tasks: Sequence[Task],
    seconds: float,
    note: Callable[[str], None],
    doing: str,
    warm: bool = True,
) -> list[Measured]:
    """Samples of all tasks, as many rounds as the seconds allow.

    The first round warms up, and counts only where there is no time for a second; what does not fit
    into the seconds even once is left out, unless it is needed.
    """
    samples: dict[int, list[float]] = {i: [] for i in range(len(tasks))}
    order, shuffle = list(samples), random.Random(0)
    begin, rounds, longest = time.perf_counter(), 0, 0.0
    while rounds == 0 or time.perf_counter() - begin + longest < seconds:
        start = time.perf_counter()
        for i in order:
            task = tasks[i]
            if rounds == 0 and not task.needed and time.perf_counter() - begin > seconds:
                del samples[i]
                note(f"{task.name}: {task.metric} left out, no time is left")
                continue
            progress(f"{doing}, round {rounds + 1}: {task.name} {task.metric}")
            try:
                samples[i].append(task.sample())
            except Exception as error:
                if not task.optional:
                    raise
                del samples[i]
                note(f"{task.name}: {task.metric} failed: {one_line(error)}")
        order = list(samples)
        shuffle.shuffle(order)
        longest = time.perf_counter() - start
        rounds += 1
    skip = 1 if warm and rounds > 1 else 0
    return [Measured(tasks[i], found[skip:]) for i, found in samples.items()]


def progress(doing: str) -> None:
    """One line on standard error that is written over; nothing where there is no terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{doing[:78]}", end="", file=sys.stderr, flush=True)


def progress_done() -> None:
    progress("")


def one_line(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:150]}"
