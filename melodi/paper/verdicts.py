"""Whether what the paper claims holds here: ✓, ✗, or undecided.

An ordering is decided by the paired difference over documents, pooled over seeds: ✓ if it lies on
the paper's side of zero, ✗ if on the other, by more than documents and runs together make by chance
for one claim in twenty. Other documents would change it as far as its 95 % interval reaches, other
runs as far as `Noise` says, from the seeds of the whole table; the two are independent, so their
squares add up. What some seed alone would turn around stays undecided. Two rows are equal (✓) if
the difference is within EQUAL of zero whatever chance has taken off, and not (✗) if it is beyond
whatever chance has added; with the same of every seed.
Memory is counted, and needs no run; what holds at the paper's own sizes, and not at those of a
smaller scale, is undecided there.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from melodi.evaluation.intervals import Interval, paired, student
from melodi.paper.recipe import EQUAL, Claim
from melodi.paper.results import (
    Floats,
    Result,
    Results,
    RowResult,
    check_same,
    common_seeds,
    counts,
)
from melodi.paper.scales import PAPER

Mark = Literal["✓", "✗", "undecided", "not run"]

ORDER: dict[int, Mark] = {-1: "✓", 0: "undecided", 1: "✗"}
"""By the sign of a difference that ought to be below zero."""
BETWEEN_RUNS = 0.25
"""Nats per token by which runs of two rows may differ by chance where no rows have two seeds in
common: two runs that differed in rounding alone have differed by 0.22 (docs/log.md)."""


@dataclass(frozen=True)
class Noise:
    """How runs scatter that differ in their seed alone: the rest when what rows have in common, and
    what seeds have in common, is taken from the nats of a table."""

    deviation: float
    """Of one run, in nats per token."""
    freedom: int

    def bound(self, seeds: int, squares: int = 2) -> float:
        """What a sum of rows, averaged over seeds, exceeds by chance for one claim in twenty, up or
        down. Squares: of the coefficients of its rows, added up; a difference of two has 2."""
        return student(self.freedom) * self.deviation * math.sqrt(squares / seeds)


@dataclass(frozen=True)
class Verdict:
    claim: Claim
    mark: Mark
    difference: Interval | None = None
    """Nats per token of the better side less those of the worse."""
    why: str = ""
    seeds: int = 0
    """Seeds that all its rows have."""


def judge_all(results: Results) -> list[Verdict]:
    noise = noise_of(results)
    return [judge(claim, results, noise) for claim in results.recipe.claims]


def noise_of(results: Results) -> Noise | None:
    """From the rows that have several seeds; None where they have too few in common."""
    rows = [row for row in results.evaluated if len(row.seeds) > 1]
    if not rows:
        return None
    check_same(rows)
    predictions = sum(counts(rows[0].documents))
    return scatter_of(
        [{s: run.nats.sum() / predictions for s, run in row.seeds.items()} for row in rows]
    )


def scatter_of(table: Sequence[Mapping[int, float]]) -> Noise | None:
    """Of the nats per token of each row by seed. A level for every row and one for every seed are
    fitted by least squares, and the rest is noise; None where nothing is left."""
    cells = [(row, seed, nats) for row, by in enumerate(table) for seed, nats in by.items()]
    seeds = sorted({seed for _, seed, _ in cells})
    design = np.zeros((len(cells), len(table) + len(seeds)))
    for cell, (row, seed, _) in zip(design, cells, strict=True):
        cell[[row, len(table) + seeds.index(seed)]] = 1
    nats_c = np.array([nats for _, _, nats in cells])
    levels, _, rank, _ = np.linalg.lstsq(design, nats_c)
    freedom = len(cells) - int(rank)
    if not freedom:
        return None
    return Noise(math.sqrt(((nats_c - design @ levels) ** 2).sum() / freedom), freedom)


def judge(claim: Claim, results: Results, noise: Noise | None) -> Verdict:
    better = [results[label] for label in claim.better]
    worse = [results[label] for label in claim.worse]
    if claim.kind == "memory":
        return judge_memory(claim, better[0], worse[0])
    rows = [*better, *worse]
    missing = [row.row.label for row in rows if not row.evaluated]
    if missing:
        return Verdict(claim, "not run", why=f"not run: {', '.join(dict.fromkeys(missing))}")
    check_same(rows)
    predictions = counts(rows[0].documents)
    seeds = common_seeds(rows)
    if not seeds:
        return Verdict(claim, "undecided", why="no seed that all of its rows have")
    pool = paired(total(better, seeds), total(worse, seeds), predictions)
    by_seed = seed_differences(better, worse, predictions)
    squares = squares_of(claim)
    chance = BETWEEN_RUNS * math.sqrt(squares / 2)
    if noise is not None:
        chance = noise.bound(len(by_seed), squares)
    mark = equal_mark(pool) if claim.kind == "equal" else ORDER[pool.sign]
    why = "" if mark == "undecided" else doubt(claim, mark, pool, by_seed, chance)
    return Verdict(claim, "undecided" if why else mark, pool, why, len(by_seed))


def squares_of(claim: Claim) -> int:
    """Of the coefficients of its rows: one may stand on a side twice, or on both."""
    coefficients = Counter(claim.better)
    coefficients.subtract(claim.worse)
    return sum(times**2 for times in coefficients.values())


def doubt(
    claim: Claim, mark: Mark, pool: Interval, by_seed: dict[int, float], chance: float
) -> str:
    """Why a mark that documents alone would give may be luck; empty if it is not. chance: what
    other runs would make of the difference."""
    assert pool.low is not None, "what has no interval has no mark"
    assert pool.high is not None, "what has no interval has no mark"
    size, below, above = abs(pool.value), pool.value - pool.low, pool.high - pool.value
    luck = math.hypot(chance, above if pool.value < 0 else below)
    if claim.kind == "equal":
        luck = math.hypot(chance, max(below, above))
        against = [seed for seed, v in by_seed.items() if (abs(v) <= EQUAL) != (mark == "✓")]
        beyond = size + luck <= EQUAL if mark == "✓" else size - luck > EQUAL
    else:
        against = [seed for seed, v in by_seed.items() if v * pool.value < 0]
        beyond = size > luck
    if against:
        return f"seed {', '.join(map(str, against))} says the opposite"
    if not beyond:
        return f"up to {luck:.3f} may be chance" + ", one seed" * (len(by_seed) == 1)
    return ""


def total(rows: list[RowResult], seeds: set[int]) -> Floats:
    return np.sum([row.nats_of(seeds) for row in rows], axis=0)


def seed_differences(
    better: list[RowResult], worse: list[RowResult], predictions: list[int]
) -> dict[int, float]:
    """Nats per token of each seed that all rows have."""
    common = common_seeds([*better, *worse])

    def nats(rows: list[RowResult], seed: int) -> float:
        chosen: list[Result] = [row.seeds[seed] for row in rows]
        return float(sum(run.nats.sum() for run in chosen)) / sum(predictions)

    return {seed: nats(better, seed) - nats(worse, seed) for seed in sorted(common)}


def equal_mark(difference: Interval) -> Mark:
    low, _, high = difference
    if low is None or high is None:
        return "undecided"
    if low >= -EQUAL and high <= EQUAL:
        return "✓"
    return "✗" if low > EQUAL or high < -EQUAL else "undecided"


def judge_memory(claim: Claim, better: RowResult, worse: RowResult) -> Verdict:
    """The paper's factors are rounded."""

    def holds(times: float) -> bool:
        return times > 1 and round(times, 1) >= claim.times

    times = worse.floats / better.floats
    why = f"{better.floats:,} and {worse.floats:,} floats: {times:.2f} times"
    if holds(times):
        return Verdict(claim, "✓", why=why)
    there, here = (sum(PAPER.config(row.row.shape).memory_floats()) for row in (worse, better))
    if holds(there / here):
        why = (
            f"{why}; {there / here:.2f} times at the paper's sizes, which this scale does not keep"
        )
        return Verdict(claim, "undecided", why=why)
    return Verdict(claim, "✗", why=why)
