"""What the runs of a recipe have shown so far, row by row, pooled over seeds.

A run counts when it was trained to its end and evaluated. Seeds are pooled document by document:
the nats of a document are their mean over the seeds of a row. Intervals are over documents.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from melodi.config import ModelConfig
from melodi.evaluation.intervals import Interval, bootstrap, paired
from melodi.files import read_object
from melodi.paper.estimate import training_time
from melodi.paper.plan import Planned, Settings, plan, state_of, step_of
from melodi.paper.recipe import Recipe, Row
from melodi.paper.recipes import recipe_named

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Result:
    """One run that has been begun."""

    planned: Planned
    step: int
    record: dict[str, Any] | None
    """Its evaluation; None until it is trained and evaluated."""
    seconds: float
    """Of its training steps."""
    environment: dict[str, Any]

    @property
    def model(self) -> ModelConfig:
        return self.planned.run.configs()[0]

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return self.planned.run.read_metrics() if self.planned.run.metrics.exists() else []

    @cached_property
    def documents(self) -> tuple[tuple[int, int], ...]:
        """Number and predictions of each document."""
        each = self.record["per_document"] if self.record else ()
        return tuple((one["document"], one["predictions"]) for one in each)

    @cached_property
    def checksum(self) -> str | None:
        """Of the tokens of the documents' split; earlier versions did not note it."""
        return (self.record or {}).get("documents_checksum")

    @cached_property
    def answers(self) -> dict[str, Any] | None:
        """What its dialect meant."""
        return self.planned.run.answers()

    @cached_property
    def nats(self) -> Floats:
        """Of each document."""
        each = self.record["per_document"] if self.record else ()
        return np.array([one["nats"] for one in each], np.float64)


@dataclass(frozen=True)
class RowResult:
    """A row of the table, with the runs of all seeds that have been begun."""

    row: Row
    model: ModelConfig
    tokens: int
    """Training tokens of a run."""
    steps: dict[str, int]
    """How many, and what one reads."""
    runs: tuple[Result, ...]

    @property
    def evaluated(self) -> list[Result]:
        return [run for run in self.runs if run.record is not None]

    @property
    def seeds(self) -> dict[int, Result]:
        return {run.planned.seed: run for run in self.evaluated}

    @property
    def documents(self) -> tuple[tuple[int, int], ...]:
        """Those of all seeds, which must have read the same."""
        check_same([self])
        return self.evaluated[0].documents

    @cached_property
    def nats(self) -> Floats:
        """Of each document, the mean over seeds."""
        return self.nats_of(set(self.seeds))

    def nats_of(self, seeds: set[int]) -> Floats:
        """The same over these of them."""
        return np.mean([self.seeds[seed].nats for seed in sorted(seeds)], axis=0)

    @cached_property
    def perplexity(self) -> Interval:
        return bootstrap(self.nats, counts(self.documents))

    @property
    def floats(self) -> int:
        return sum(self.model.memory_floats())

    @property
    def perplexity_without_memory(self) -> float:
        """Nats are averaged over seeds, as those with memory are."""
        return math.exp(np.mean(np.log(self.figures("perplexity_without_memory"))))

    @property
    def bits_per_byte(self) -> float:
        return float(np.mean(self.figures("bits_per_byte")))

    def figures(self, key: str) -> list[float]:
        """One of the records, seed by seed."""
        return [run.record[key] for run in self.evaluated if run.record]

    def by_place(self, key: str, seeds: set[int]) -> dict[int, float]:
        """Nats per token by the place of a prediction, the mean over these seeds, of one of the
        tallies of a record; keyed by the first place of each bucket."""
        tallies = [(self.seeds[seed].record or {}).get(key, ()) for seed in sorted(seeds)]
        return {
            same[0]["first"]: float(np.mean([bucket["nats"] for bucket in same]))
            for same in zip(*tallies, strict=True)
        }


@dataclass(frozen=True)
class Results:
    """All rows of a recipe."""

    recipe: Recipe
    settings: Settings
    rows: tuple[RowResult, ...]

    def __getitem__(self, label: str) -> RowResult:
        return next(row for row in self.rows if row.row.label == label)

    @cached_property
    def evaluated(self) -> list[RowResult]:
        return [row for row in self.rows if row.evaluated]

    @property
    def reference(self) -> RowResult | None:
        """The row that others are compared with: the recipe's, or else the first that is there."""
        wanted = self[self.recipe.reference]
        return wanted if wanted.evaluated else next(iter(self.evaluated), None)

    def difference(self, a: RowResult, b: RowResult) -> Interval | None:
        """Nats per token of a less those of b, document by document: below zero, a is better. None
        where they have no seed in common."""
        check_same([a, b])
        seeds = common_seeds([a, b])
        if not seeds:
            return None
        return paired(a.nats_of(seeds), b.nats_of(seeds), counts(a.documents))

    def differences_by_place(self, key: str) -> list[tuple[RowResult, dict[int, float]]]:
        """Nats per token of rows with memory less those of the reference, place by place. Rows with
        another window, or without a seed in common, have no places in common with it."""
        reference, found = self.reference, []
        for row in self.evaluated:
            if reference is None or row is reference or not row.floats:
                continue
            seeds = common_seeds([row, reference])
            if seeds and row.model.window == reference.model.window:
                to = reference.by_place(key, seeds)
                by = row.by_place(key, seeds)
                found.append((row, {place: nats - to[place] for place, nats in by.items()}))
        return [(row, by) for row, by in found if by]


def counts(documents: tuple[tuple[int, int], ...]) -> list[int]:
    return [predictions for _, predictions in documents]


def common_seeds(rows: list[RowResult]) -> set[int]:
    """Those that all rows have: a seed reads its own documents, some of which are harder."""
    return set.intersection(*[set(row.seeds) for row in rows])


def check_same(rows: list[RowResult]) -> None:
    """Refuses to compare what was evaluated on different documents, or was made by versions in
    which a dialect of one name meant different things."""
    runs = [run for row in rows for run in row.evaluated]
    for first, other in ((runs[0], other) for other in runs[1:]):
        folders = f"{first.planned.folder} and {other.planned.folder}"
        checksums = {first.checksum, other.checksum} - {None}
        if other.documents != first.documents or len(checksums) > 1:
            raise ValueError(
                f"{folders} were evaluated on different documents: remove their records "
                "(*eval-*.json), and run the recipe again"
            )
        if other.answers != first.answers:
            raise ValueError(
                f"{folders} are of versions in which dialect {first.model.dialect!r} meant "
                "different things, or did not say what: keep them in different folders, or train "
                "one of them again"
            )


def gather(folder: Path) -> Results:
    """What is there of a recipe, in DIR/NAME."""
    settings = Settings.read(folder)
    recipe = recipe_named(settings.recipe)
    planned = plan(settings, folder.parent, exact=False, own=folder)
    rows = []
    for row in recipe.rows:
        own = [one for one in planned if one.row is row]
        runs = [result_of(one, settings) for one in own if one.run.exists and one.run.started]
        model = runs[0].model if runs else own[0].model
        train = own[0].train
        steps = {name: getattr(train, name) for name in ("rows", "segment_windows", "steps")}
        rows.append(RowResult(row, model, own[0].tokens, steps, tuple(runs)))
    return Results(recipe, settings, tuple(rows))


def result_of(planned: Planned, settings: Settings) -> Result:
    done = state_of(planned, settings) == "done"
    return Result(
        planned,
        step_of(planned.run),
        read_object(planned.folder / settings.record_name) if done else None,
        training_time(planned.run)[1],
        planned.run.environment(),
    )
