"""How far a figure can be trusted: 95 % intervals over documents.

Tokens of one document are not independent, documents are: so documents are what is drawn anew, with
replacement, as many as there are. A figure is a ratio of sums, total nats over total predictions,
of each draw. Its 2.5 % and 97.5 % quantiles alone are too narrow for few documents, as a mean with
an estimated variance is when the normal quantile is used for Student's: their distances from the
figure are therefore stretched by √(n / (n-1)) · t / 1.96, where t is Student's quantile for n - 1.
With one document there is nothing to draw from, and no interval.
"""

import functools
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
DRAWN_AT_ONCE = 1 << 22
"""Documents, so that many documents do not need much memory."""

Sums = Sequence[float] | Sequence[int] | NDArray[np.floating] | NDArray[np.integer]


class Interval(NamedTuple):
    """A figure between the two ends of its 95 % interval; None where one document gives none."""

    low: float | None
    value: float
    high: float | None

    @property
    def sign(self) -> int:
        """1 or -1 where the whole interval is above or below zero, 0 where that is undecided."""
        if self.low is None or self.high is None:
            return 0
        return int(self.low > 0) - int(self.high < 0)

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.4g} (one document: no interval)"
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"


def bootstrap(nats: Sums, predictions: Sums, samples: int = 10_000, seed: int = 0) -> Interval:
    """Perplexity from the nats and the predictions of each document."""
    low, value, high = ratio(nats, predictions, samples, seed)
    ends = [None if end is None else perplexity(end) for end in (low, high)]
    return Interval(ends[0], perplexity(value), ends[1])


def perplexity(nats: float) -> float:
    return math.exp(min(nats, 700.0))


def paired(
    nats_a: Sums, nats_b: Sums, predictions: Sums, samples: int = 10_000, seed: int = 0
) -> Interval:
    """Nats per prediction of a less those of b, on the same documents: below zero, a is better.

    The difference varies far less from document to document than either loss, so that it decides
    orderings that two separate intervals leave open.
    """
    a, b = np.asarray(nats_a, np.float64), np.asarray(nats_b, np.float64)
    if a.shape != b.shape:
        raise ValueError(
            f"nats of {a.size} and of {b.size} documents cannot be paired: evaluate both models on "
            "the same documents"
        )
    return ratio(a - b, predictions, samples, seed)


def ratio(tops: Sums, bottoms: Sums, samples: int = 10_000, seed: int = 0) -> Interval:
    """Total of the tops over the total of the bottoms; documents without a bottom do not count."""
    top, bottom = np.asarray(tops, np.float64), np.asarray(bottoms, np.float64)
    if top.ndim != 1 or top.shape != bottom.shape:
        raise ValueError(
            f"sums of shape {top.shape} and counts of shape {bottom.shape}: give one of each for "
            "every document"
        )
    top, bottom = top[bottom > 0], bottom[bottom > 0]
    if not len(top):
        raise ValueError("no document has a prediction: there is nothing to take an interval of")
    value = float(top.sum() / bottom.sum())
    if len(top) == 1:
        return Interval(None, value, None)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(draws(top, bottom, samples, seed), [tail, 1 - tail]).tolist()
    stretch = widening(len(top))
    return Interval(value - stretch * (value - low), value, value + stretch * (high - value))


def draws(
    top: NDArray[np.float64], bottom: NDArray[np.float64], samples: int, seed: int
) -> NDArray[np.float64]:
    """The ratio of the sums over documents drawn with replacement, for each sample."""
    random, count = np.random.default_rng(seed), len(top)
    at_once = max(DRAWN_AT_ONCE // count, 1)
    parts = []
    for start in range(0, samples, at_once):
        chosen = random.integers(count, size=(min(at_once, samples - start), count))
        parts.append(top[chosen].sum(1) / bottom[chosen].sum(1))
    return np.concatenate(parts)


def widening(documents: int) -> float:
    """What the quantiles of so few draws have to be stretched by; 1 for very many."""
    normal = NormalDist().inv_cdf(1 - (1 - LEVEL) / 2)
    return float(np.sqrt(documents / (documents - 1)) * student(documents - 1) / normal)


@functools.cache
def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's distribution: x = √freedom · tan(angle) makes its density a
    power of a cosine, which is summed until it holds 95 % between -x and x."""
    angle = np.linspace(0.0, np.pi / 2, 20_001)
    density = np.cos(angle) ** (freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return float(np.sqrt(freedom) * np.tan(np.interp(LEVEL, mass / mass[-1], angle)))
