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
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    else:
        axes.text(0.5, 0.5, "not measured in this run", ha="center", transform=axes.transAxes)
