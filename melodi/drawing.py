"""What all pictures share: a pyplot without a screen, colours, and files that are whole or absent.

The colours are those of Okabe and Ito, which the colour-blind can tell apart, without yellow, which
white hides.
"""

import contextlib
from pathlib import Path
from typing import Any

from melodi.files import replacing

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "*"]
LINES = ["-", "--", ":", "-."]
LOOKS = [(COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]) for i in range(56)]
"""A colour and a marker for each of many lines, all different."""


def look(number: int) -> dict[str, Any]:
    """Of one of many lines: where colours come again, they are drawn in another way."""
    colour, marker = LOOKS[number % len(LOOKS)]
    line = LINES[number // len(COLOURS) % len(LINES)]
    return dict(color=colour, marker=marker, linestyle=line, markersize=5, linewidth=1.2)


def pyplot() -> Any:
    """matplotlib's, which the extra `plot` brings."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("plots need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plotting() -> Any | None:
    """pyplot, if it is there."""
    with contextlib.suppress(ValueError):
        return pyplot()
    return None


def save(figure: Any, path: Path, dpi: int = 110) -> Path:
    """As PNG, without date and version: the same data give the same file."""
    with replacing(path) as partial:
        figure.savefig(partial, format="png", dpi=dpi, metadata={"Software": None})
    pyplot().close(figure)
    return path
