"""Whether what the paper claims holds here: ✓, ✗, or undecided.

An ordering is decided by the paired difference over documents, pooled over seeds: ✓ if its 95 %
interval lies on the paper's side of zero, ✗ if on the other. Documents say nothing about how much
another run would change, so a difference must also be larger than chance makes it between runs
(`Noise`, from the seeds of the whole table), and one that some seed alone would turn around stays
undecided. Two rows are equal (✓) if the whole interval is within EQUAL of zero, and not (✗) if none
of it is, by more than chance; with the same of every seed.
Memory is counted, and needs no run; what holds at the paper's own sizes, and not at those of a
smaller scale, is undecided there.
"""

import math
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
"""Nats per token that a difference must exceed where no rows have two seeds in common. After 2 M
tokens of math two runs of one row have differed by 0.13, at an earlier scale (docs/log.md)."""
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
STUDENT |= {10: 2.23, 12: 2.18, 15: 2.13, 20: 2.09, 30: 2.04, 60: 2.00, 120: 1.98}
"""Quantiles at 97.5 % of Student's distribution, by degrees of freedom."""


@dataclass(frozen=True)
class Noise:
    """How runs scatter that differ in their seed alone: the rest when what rows have in common, and
    what seeds have in common, is taken from the nats of a table."""

    deviation: float
    """Of one run, in nats per token."""
    freedom: int

    def bound(self, pairs: int, seeds: int) -> float:
        """What a sum of differences of so many pairs of rows, averaged over seeds, exceeds by
        chance in one of twenty tables."""
        quantile = STUDENT[max(known for known in STUDENT if known <= self.freedom)]
        return quantile * self.deviation * math.sqrt(2 * pairs / seeds)


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
    """From the rows that have several seeds; None where there are not two such rows."""
    rows = [row for row in results.evaluated if len(row.seeds) > 1]
    seeds = common_seeds(rows) if rows else set()
    if len(rows) < 2 or len(seeds) < 2:
        return None
    check_same(rows)
    predictions = sum(counts(rows[0].documents))
    nats_rs = np.array([[row.seeds[s].nats.sum() for s in sorted(seeds)] for row in rows])
    return scatter_of(nats_rs / predictions)


def scatter_of(nats_rs: Floats) -> Noise:
    """Of a table of nats per token, rows by seeds."""
    rest_rs = nats_rs - nats_rs.mean(0) - nats_rs.mean(1, keepdims=True) + nats_rs.mean()
    freedom = (nats_rs.shape[0] - 1) * (nats_rs.shape[1] - 1)
    return Noise(math.sqrt((rest_rs**2).sum() / freedom), freedom)


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
    # A gain is a difference of two differences, and so of twice as many runs.
    chance = BETWEEN_RUNS * len(better)
    if noise is not None:
        chance = noise.bound(len(better), len(by_seed))
    mark: Mark
    if claim.kind == "equal":
        mark = equal_mark(pool)
        chance = chance + EQUAL if mark == "✗" or len(by_seed) < 2 else 0.0
        against = [s for s, value in by_seed.items() if (abs(value) <= EQUAL) != (mark == "✓")]
    else:
        mark = {-1: "✓", 0: "undecided", 1: "✗"}[pool.sign]  # type: ignore[assignment]
        against = [seed for seed, value in by_seed.items() if value * pool.value < 0]
    why = ""
    if mark != "undecided" and against:
        why = f"seed {', '.join(map(str, against))} says the opposite"
    elif mark != "undecided" and abs(pool.value) <= chance:
        why = f"runs differ by up to {chance:.3f} by chance" + ", one seed" * (len(by_seed) == 1)
    return Verdict(claim, "undecided" if why else mark, pool, why, len(by_seed))


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
