"""Run folders to plots: what was learned, and what the memory does."""

from pathlib import Path
from typing import Any

from melodi.drawing import COLOURS, look, pyplot, save
from melodi.files import read_object
from melodi.run import Run

ENOUGH = 20
"""Predictions behind a point."""
DROPPED = {
    "memory": "all dropped",
    "short_term": "short-term memory dropped",
    "long_term": "long-term memory dropped",
}


def plot_run(folder: str | Path) -> Path:
    """Loss, gates, and loss by position with and without memory, as RUN/report.png; what there is
    nothing of has no panel."""
    run = Run(folder)
    metrics, found = run.read_metrics(), newest_record(run.folder)
    panels = [lambda axes: plot_loss(axes, metrics)]
    if any(key.startswith("gate/") for record in metrics for key in record):
        panels.append(lambda axes: plot_gates(axes, metrics))
    if found is not None:
        record = found
        panels.append(lambda axes: plot_positions(axes, record))
    figure, axes = pyplot().subplots(
        1, len(panels), figsize=(5 * len(panels), 4.2), layout="constrained", squeeze=False
    )
    for draw, place in zip(panels, axes[0], strict=True):
        draw(place)
        place.grid(alpha=0.25)
        if place.get_legend_handles_labels()[0]:
            place.legend(fontsize=8, framealpha=0.6)
    figure.suptitle(str(run.folder), parse_math=False)
    return save(figure, run.folder / "report.png")


def newest_record(folder: Path) -> dict[str, Any] | None:
    """Of the evaluations of a run."""
    found = sorted(folder.glob("*eval-*.json"), key=lambda path: path.stat().st_mtime)
    return read_object(found[-1]) if found else None


def plot_loss(axes: Any, metrics: list[dict[str, Any]]) -> None:
    for number, (key, label) in enumerate(
        (("loss", "training"), ("validation_loss", "validation"))
    ):
        points = [(record["step"], record[key]) for record in metrics if key in record]
        marker = "o" if key == "validation_loss" or len(points) == 1 else ""
        if points:
            axes.plot(
                *zip(*points, strict=True),
                color=COLOURS[number],
                marker=marker,
                label=label,
                markersize=4,
            )
    axes.set(xlabel="step", ylabel="nats per token", title="Loss")
    axes.xaxis.get_major_locator().set_params(integer=True)


def plot_gates(axes: Any, metrics: list[dict[str, Any]]) -> None:
    names = sorted({key for record in metrics for key in record if key.startswith("gate/")})
    for number, name in enumerate(names):
        points = [(record["step"], record[name]) for record in metrics if name in record]
        label = f"layer {name.partition('/')[2]}"
        axes.plot(*zip(*points, strict=True), label=label, **{**look(number), "marker": ""})
    axes.set(xlabel="step", ylabel="α, mean over heads", title="Share of long-term memory")
    axes.xaxis.get_major_locator().set_params(integer=True)


def plot_positions(axes: Any, record: dict[str, Any]) -> None:
    """Loss by position in the document, from where enough is predicted to say something."""
    passes = (("", "memory kept"), *((f"_without_{name}", DROPPED[name]) for name in DROPPED))
    for number, (suffix, label) in enumerate(passes):
        points = [
            (bucket["first"], bucket["nats"])
            for bucket in record.get(f"by_position{suffix}", ())
            if bucket["predictions"] >= ENOUGH
        ]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **look(number))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    split = record.get("split", "")
    axes.set(
        xlabel="position in the document, tokens",
        ylabel="nats per token",
        title=f"What memory is worth, {split} documents",
    )
