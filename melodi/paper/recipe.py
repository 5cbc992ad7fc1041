"""What a recipe is: rows, the paper's numbers, and what the paper says of them.

A row is a model in the paper's own sizes (`Shape`); a scale makes a config of it. A claim is an
ordering that the paper states, with its place. Its two sides are rows whose nats per token are
added up, so that "a loses less than b" is a claim as well: better = (a after, b before), worse =
(b after, a before). The paper's figures print no values, so their rows have no numbers.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from melodi.paper import numbers
from melodi.paper.shapes import Shape

EQUAL = 0.01
"""Nats per token, 1 % of perplexity, up to which two rows count as equal where the paper says so:
our choice; in its Table 8 ("consistent") the largest difference is 0.8 %."""


@dataclass(frozen=True)
class Row:
    """One model of a table, or one point of a figure."""

    label: str
    shape: Shape
    paper: numbers.Numbers = field(default_factory=dict)
    """The paper's perplexities by column; empty where it prints none."""
    series: str = ""
    """The curve that the row is a point of."""
    x: float | str | None = None
    """Where on the curve; its memory in floats when not given."""
    note: str = ""
    """What stands beside the point."""


@dataclass(frozen=True)
class Claim:
    """What the paper says, about rows by their labels."""

    better: tuple[str, ...]
    worse: tuple[str, ...]
    where: str
    """Its place in the paper, or the question that it answers."""
    text: str = ""
    """In words; "a better than b" when not given."""
    kind: Literal["better", "equal", "memory"] = "better"
    """better: fewer nats. equal: as many, up to EQUAL. memory: fewer floats."""
    times: float = 1.0
    """How many times fewer floats, at least."""

    @property
    def words(self) -> str:
        return self.text or f"{' and '.join(self.better)} better than {' and '.join(self.worse)}"


@dataclass(frozen=True)
class Recipe:
    """A table or a figure."""

    name: str
    title: str
    rows: tuple[Row, ...]
    reference: str
    """The row to which every other is compared."""
    claims: tuple[Claim, ...] = ()
    asked: str = "What the paper claims"
    """The heading over the claims."""
    axis: str = "memory per document, floats"
    axis_scale: Literal["log", "log2", "linear", "category"] = "log"
    ablation: bool = True
    """Whether the paper trains it for 200k steps and not for 500k."""
    equal: bool = False
    """Whether parameters are made equal at the paper's scale, too."""
    remarks: tuple[str, ...] = ()
    """What the paper leaves open, and what was chosen."""

    def row(self, label: str) -> Row:
        return next(row for row in self.rows if row.label == label)

    @property
    def columns(self) -> list[str]:
        """The columns in which the paper has numbers."""
        found = {column for row in self.rows for column in row.paper}
        return [column for column in numbers.COLUMNS if column in found]


def ordered(labels: Iterable[str], where: str, text: str = "") -> list[Claim]:
    """Each row better than the one before it."""
    return [Claim((after,), (before,), where, text) for before, after in pairwise(labels)]
