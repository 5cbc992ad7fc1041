"""Whether what the paper claims holds here: ✓, ✗, or undecided.

An ordering is decided by the paired difference over documents, pooled over seeds: ✓ if its 95 %
interval lies on the paper's side of zero, ✗ if on the other. Documents say nothing about how much
another seed would change, so an ordering that some seed alone would turn around stays undecided,
and one that a single seed shows, unless it is larger than runs of the same rows have differed.
Two rows are equal (✓) if the whole interval is within EQUAL of zero, and not (✗) if none of it is;
with the same of every seed.
Memory is counted, and needs no run; what holds at the paper's own sizes, and not at those of a
smaller scale, is undecided there.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from melodi.evaluation.intervals import Interval, paired
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

BETWEEN_RUNS = 0.15
"""Nats per token. After 2 M tokens of math two runs of one row differed by 0.13 (docs/log.md)."""


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
    return [judge(claim, results) for claim in results.recipe.claims]


def judge(claim: Claim, results: Results) -> Verdict:
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
    # A gain is a difference of two differences, and so of twice as many runs.
    if len(by_seed) < 2 and not beyond(pool, BETWEEN_RUNS * len(better)):
        why = "one seed: two runs of a row can differ by as much"
        return Verdict(claim, "undecided", pool, why, len(by_seed))
    mark: Mark
    if claim.kind == "equal":
        mark = equal_mark(pool)
        against = [s for s, value in by_seed.items() if (abs(value) <= EQUAL) != (mark == "✓")]
    else:
        mark = {-1: "✓", 0: "undecided", 1: "✗"}[pool.sign]  # type: ignore[assignment]
        against = [seed for seed, value in by_seed.items() if value * pool.value < 0]
    if mark != "undecided" and against:
        why = f"seed {', '.join(map(str, against))} says the opposite"
        return Verdict(claim, "undecided", pool, why, len(by_seed))
    return Verdict(claim, mark, pool, seeds=len(by_seed))


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


def beyond(difference: Interval, bound: float) -> bool:
    """Whether the whole interval is farther from zero."""
    low, _, high = difference
    return low is not None and high is not None and (low > bound or high < -bound)


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
