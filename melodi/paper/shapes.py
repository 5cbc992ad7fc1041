"""A row of the paper in the paper's own numbers; a scale makes a config of it."""

from dataclasses import dataclass
from typing import Literal

WINDOW, SEGMENT, QUEUE, DEPTH = 512, 4096, 128, 13
"""The paper's window and segment, in tokens, its queue, in windows, and its layers."""

System = Literal[
    "melodi",
    "transformer-xl",
    "block-recurrent",
    "memorizing",
    "no-memory",
    "compressive",
    "rmt",
    "autocompressor",
    "infini",
    "armt",
]


@dataclass(frozen=True)
class Shape:
    """A model of the paper, in the paper's numbers."""

    system: System = "melodi"
    short: int = 128
    """S at the window of 512 tokens; a shorter window has proportionally fewer."""
    long: int = 64
    """L, likewise; 0: no long-term memory."""
    window: int = WINDOW
    depth: int = DEPTH
    coverage: int | None = None
    """Windows in the queue, the same at every scale; the scale's own queue when not given."""
    long_layers: tuple[int, ...] = (8,)
    """Indices in the stack of `depth` layers."""
    short_layers: int | None = None
    """How many layers have short-term memory, spread evenly; all when not given."""
    branching: bool = True
    copying: bool = False
    counted: bool = False
    """Layers are what the row is about."""
