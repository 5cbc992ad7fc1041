"""Recall against distance, as a picture: one line for each model."""

from pathlib import Path
from typing import Any

from melodi.drawing import look, pyplot, save


def draw_recall(records: list[dict[str, Any]], title: str, path: Path) -> Path:
    """Right answers, with chance as a dotted line, or nats that are remembered, with intervals."""
    figure, axes = pyplot().subplots(figsize=(7.5, 4.5), layout="constrained")
    for number, record in enumerate(records):
        style = look(number)
        if "accuracy" in record["curve"][0]:
            draw_accuracy(axes, record, style)
        else:
            draw_remembered(axes, record, style)
    distances = sorted({point["distance"] for record in records for point in record["curve"]})
    if "chance" in records[0]:
        chance = records[0]["chance"]
        axes.axhline(chance, color="black", linestyle=":", linewidth=1, label="chance")
    else:
        title += "; bands: 95 % intervals over documents"
    axes.set(xlabel="windows since it was read", title=title)
    if distances[-1] > 4 * len(distances):
        axes.set_xscale("log", base=2)
    axes.set_xticks(distances, [str(distance) for distance in distances])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    # Beside the lines, so that it hides none of them.
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return save(figure, path)


def draw_accuracy(axes: Any, record: dict[str, Any], style: dict[str, Any]) -> None:
    points = [(point["distance"], point["accuracy"]) for point in record["curve"]]
    axes.plot(*zip(*points, strict=True), label=record["name"], **style)
    axes.set(ylabel="share of right answers", ylim=(-0.03, 1.03))


def draw_remembered(axes: Any, record: dict[str, Any], style: dict[str, Any]) -> None:
    ends = [(point["distance"], point["remembered"]) for point in record["curve"]]
    x, values = [x for x, _ in ends], [end["value"] for _, end in ends]
    axes.plot(x, values, label=record["name"], **style)
    low, high = ([end[side] for _, end in ends] for side in ("low", "high"))
    if None not in low:
        axes.fill_between(x, low, high, alpha=0.15, color=style["color"], linewidth=0)
    axes.axhline(0, color="black", linestyle=":", linewidth=1)
    axes.set(ylabel="nats per token saved at the second meeting")
