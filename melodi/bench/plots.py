"""The record of `melodi bench` to pictures: speed and memory against the length of a document."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from melodi.drawing import pyplot, save


def plot_bench(record: dict[str, Any], folder: Path) -> Path | None:
    """DIR/bench.png, of what was measured against the length of a document; none if nothing was."""
    panels: list[Callable[[Any], None]] = []
    if record["documents"] or record["growth"]:
        panels.append(partial(plot_speed, record=record))
    for works, title in (
        (("read", "chunks"), "Memory of reading"),
        (("train",), "Memory of training"),
    ):
        if lines := memory_lines(record, works):
            panels.append(partial(plot_memory, lines=lines, title=title))
    if not panels:
        return None
    figure, axes = pyplot().subplots(
        1, len(panels), figsize=(5 * len(panels), 4.2), layout="constrained", squeeze=False
    )
    for panel, place in zip(panels, axes[0], strict=True):
        panel(place)
    m = record["machine"]
    numbers = record["config"]["precision"]
    figure.suptitle(f"{m['cpu']}, {m['threads']} threads, {numbers}", parse_math=False)
    return save(figure, folder / "bench.png")


def plot_speed(axes: Any, record: dict[str, Any]) -> None:
    """Whole documents from their start; ours goes on to where the growth was measured."""
    for name in dict.fromkeys(row["name"] for row in record["documents"]):
        rows = [row for row in record["documents"] if row["name"] == name]
        draw(axes, name, [(row["length"], row["median"], row["low"], row["high"]) for row in rows])
    later = [(r["position"], r["median"], r["low"], r["high"]) for r in record["growth"]]
    draw(axes, "melodi, reading on at", later)
    finish(axes, "tokens per second", "Speed of reading")


def memory_lines(
    record: dict[str, Any], works: tuple[str, ...]
) -> dict[str, list[tuple[int, float]]]:
    """Lengths and megabytes of every model that was measured at several lengths."""
    chosen = [row for row in record["peaks"] if row["work"] in works]
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in sorted(chosen, key=lambda row: row["length"]):
        label = f"{row['name']}, in chunks" if row["work"] == "chunks" else row["name"]
        lines.setdefault(label, []).append((row["length"], row["megabytes"]))
    return {label: points for label, points in lines.items() if len(points) > 1}


def plot_memory(axes: Any, lines: dict[str, list[tuple[int, float]]], title: str) -> None:
    for label, points in lines.items():
        axes.plot(*zip(*points, strict=True), "o-", markersize=4, label=label)
    finish(axes, "MB that it adds", title)


def draw(axes: Any, label: str, points: list[tuple[float, float, float, float]]) -> None:
    """Medians, with the spread as a band."""
    if not points:
        return
    x, median, low, high = zip(*points, strict=True)
    (line,) = axes.plot(x, median, "o-", markersize=4, label=label)
    axes.fill_between(x, low, high, alpha=0.2, color=line.get_color())


def finish(axes: Any, what: str, title: str) -> None:
    axes.set(xlabel="tokens of the document", ylabel=what, title=title)
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    # Powers of two, and 1, 2 and 5 in every decade, in plain numbers.
    for axis, ticks in ((axes.xaxis, LogLocator(2)), (axes.yaxis, LogLocator(10, (1, 2, 5)))):
        axis.set(major_locator=ticks, minor_formatter=NullFormatter())
        axis.set_major_formatter(FuncFormatter(lambda number, _: plain(number)))
    low, high = axes.get_ylim()
    axes.set_ylim(low / 1.3, high * 1.3)
    axes.legend()


def plain(number: float) -> str:
    """512, 4k, 1M."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "k")):
        if number >= size and number % size == 0:
            return f"{number / size:.0f}{unit}"
    return f"{number:,.0f}" if number >= 1 else f"{number:g}"
