"""Run folders to plots: what was learned, and what the memory does."""

from pathlib import Path
from typing import Any

from melodi.drawing import pyplot, save
from melodi.files import read_object
from melodi.run import Run


def plot_run(folder: str | Path) -> Path:
    """Loss, gates, and loss by position with and without memory, as RUN/report.png."""
    run = Run(folder)
    metrics = run.read_metrics()
    figure, (loss, gates, position) = pyplot().subplots(
        1, 3, figsize=(15, 4.2), layout="constrained"
    )
    plot_loss(loss, metrics)
    plot_gates(gates, metrics)
    plot_positions(position, run.folder)
    figure.suptitle(str(run.folder), parse_math=False)
    return save(figure, run.folder / "report.png")


def plot_loss(axes: Any, metrics: list[dict[str, Any]]) -> None:
    for key, label, style in (("loss", "training", "-"), ("validation_loss", "validation", "o-")):
        points = [(record["step"], record[key]) for record in metrics if key in record]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=4)
    axes.set(xlabel="step", ylabel="nats per token", title="Loss")
    explain(axes)


def plot_gates(axes: Any, metrics: list[dict[str, Any]]) -> None:
    names = sorted({key for record in metrics for key in record if key.startswith("gate/")})
    for name in names:
        points = [(record["step"], record[name]) for record in metrics if name in record]
        axes.plot(*zip(*points, strict=True), label=f"layer {name.partition('/')[2]}")
    axes.set(xlabel="step", ylabel="α, mean over heads", title="Share of long-term memory")
    explain(axes)


def plot_positions(axes: Any, folder: Path) -> None:
    """Loss by position in the document, from the newest evaluation."""
    found = sorted(folder.glob("*eval-*.json"), key=lambda path: path.stat().st_mtime)
    axes.set(
        xlabel="position in the document", ylabel="nats per token", title="What memory is worth"
    )
    if not found:
        return
    result = read_object(found[-1])
    for key, label in (("by_position", "memory kept"), ("by_position_without_memory", "dropped")):
        points = [(bucket["first"], bucket["nats"]) for bucket in result.get(key, ())]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", label=label, markersize=4)
    axes.set_xscale("log", base=2)
    explain(axes)


def explain(axes: Any) -> None:
    """A legend, where there is something to explain."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
