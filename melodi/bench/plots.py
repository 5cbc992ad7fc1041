"""The record of `melodi bench` to pictures: speed and memory against the length of a document."""

from pathlib import Path
from typing import Any


def plot_bench(record: dict[str, Any], folder: Path) -> Path:
    """DIR/bench.png."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("plots need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (speed, reading, training) = pyplot.subplots(
        1, 3, figsize=(15, 4.2), layout="constrained"
    )
    plot_speed(speed, record)
    plot_memory(reading, record, ("read", "chunks"), "Memory of reading")
    plot_memory(training, record, ("train",), "Memory of training")
    m = record["machine"]
    numbers = record["config"]["precision"]
    figure.suptitle(f"{m['cpu']}, {m['threads']} threads, {numbers}", parse_math=False)
    path = folder / "bench.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def plot_speed(axes: Any, record: dict[str, Any]) -> None:
    """Whole documents from their start; ours goes on to where the growth was measured."""
    for name in dict.fromkeys(row["name"] for row in record["documents"]):
        rows = [row for row in record["documents"] if row["name"] == name]
        draw(axes, name, [(row["length"], row["median"], row["low"], row["high"]) for row in rows])
    later = [(r["position"], r["median"], r["low"], r["high"]) for r in record["growth"]]
    draw(axes, "melodi, reading on at", later)
    finish(axes, "tokens per second", "Speed of reading")


def plot_memory(axes: Any, record: dict[str, Any], works: tuple[str, ...], title: str) -> None:
    chosen = [row for row in record["peaks"] if row["work"] in works]
    for name, work in dict.fromkeys((row["name"], row["work"]) for row in chosen):
        rows = [row for row in chosen if (row["name"], row["work"]) == (name, work)]
        if len(rows) > 1:
            label = f"{name}, in chunks" if work == "chunks" else name
            points = sorted((row["length"], row["megabytes"]) for row in rows)
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
    if not axes.get_legend_handles_labels()[0]:
        axes.text(0.5, 0.5, "not measured in this run", ha="center", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[])
        return
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
