"""The figures of a recipe: perplexity against its axis, and the loss on the way there.

Markers and line styles tell curves apart where colours do not. Bars show the interval of the paired
difference to the row that all are compared with: the interval of a perplexity alone mostly shows
how documents differ.
"""

import math
from itertools import cycle, product
from pathlib import Path
from typing import Any

from melodi.drawing import COLOURS, LINES, LOOKS, look, plotting, save
from melodi.paper.results import Results, RowResult

SKIPPED = 0.2
"""The first share of a training, in which the loss falls too far to leave room for the rest."""


def draw_figure(results: Results, path: Path) -> bool:
    """False where there is nothing to draw, or nothing to draw with."""
    plot = plotting()
    if plot is None or not results.evaluated:
        return False
    panels = 2 if results.recipe.name == "window-size" else 1
    figure, axes = plot.subplots(
        1, panels, figsize=(8 + 5 * (panels - 1), 5), layout="constrained", squeeze=False
    )
    draw_curves(axes[0, 0], results)
    if panels == 2:
        draw_increments(axes[0, 1], results)
    save(figure, path, dpi=120)
    return True


def draw_losses(results: Results, path: Path) -> bool:
    """Training and validation loss of every run that has been begun."""
    plot = plotting()
    if plot is None or not any(run.metrics for row in results.rows for run in row.runs):
        return False
    figure, (training, validation) = plot.subplots(
        1, 2, figsize=(13, 5.5), layout="constrained", sharey=True
    )
    shown = [row for row in results.rows if any(run.metrics for run in row.runs)]
    for row, (line, colour) in zip(shown, cycle(product(LINES, COLOURS)), strict=False):
        for number, run in enumerate(row.runs):
            label = row.row.label if number == 0 else None
            for axes, key in ((training, "loss"), (validation, "validation_loss")):
                points = loss_points(row, run.metrics, run.planned.train.steps, key)
                if points:
                    x, y = zip(*points, strict=True)
                    marker = "." if key == "validation_loss" else ""
                    axes.plot(x, y, line, color=colour, marker=marker, label=label, linewidth=1.2)
    for axes, title in ((training, "Training"), (validation, "Validation")):
        axes.set(xlabel="training tokens, millions", title=title)
        axes.grid(alpha=0.25)
    training.set_ylabel("nats per token")
    handles, labels = training.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=9)
    save(figure, path, dpi=120)
    return True


def draw_places(results: Results, path: Path) -> bool:
    """By how much rows with memory differ from the one that all are compared with, and where: by
    place in the window, and by place in the document once there is something to remember."""
    plot, reference = plotting(), results.reference
    if plot is None or reference is None:
        return False
    panels = [
        ("by_place_in_window", 1, "place in the window, tokens"),
        ("by_position", reference.model.window, "place in the document, tokens"),
    ]
    found = {key: results.differences_by_place(key) for key, _, _ in panels}
    if not any(found.values()):
        return False
    figure, both = plot.subplots(1, 2, figsize=(13, 5), layout="constrained", sharey=True)
    for axes, (key, first, label) in zip(both, panels, strict=True):
        for number, (row, by) in enumerate(found[key]):
            shown = {place: nats for place, nats in by.items() if place >= first}
            axes.plot(shown.keys(), shown.values(), label=row.row.label, **look(number))
        axes.axhline(0.0, color="black", linestyle=":")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        axes.set_xlabel(label)
        axes.grid(alpha=0.25)
    both[0].set_ylabel(f"nats per token, less those of {reference.row.label}")
    handles, labels = both[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=9)
    save(figure, path, dpi=120)
    return True


def loss_points(
    row: RowResult, metrics: list[dict[str, Any]], steps: int, key: str
) -> list[tuple[float, float]]:
    """Tokens in millions and nats, without the first steep part unless there is nothing else."""
    per_step = row.tokens / steps / 1e6
    points = [(r["step"], r[key]) for r in metrics if r.get(key) is not None]
    later = [point for point in points if point[0] >= SKIPPED * steps] or points
    return [(step * per_step, nats) for step, nats in later]


def draw_curves(axes: Any, results: Results) -> None:
    names = [name for name in dict.fromkeys(row.series for row in results.recipe.rows) if name]
    systems = list(dict.fromkeys(name.partition(", ")[0] for name in names))
    category = results.recipe.axis_scale == "category"
    for number, name in enumerate(names):
        system, _, variant = name.partition(", ")
        of_system = LOOKS[systems.index(system)]
        shift = 0.12 * (number - (len(names) - 1) / 2) if category else 0.0
        rows = [row for row in results.evaluated if row.row.series in (name, "")]
        rows = [row for row in rows if position(row, results) is not None]
        rows.sort(key=lambda row: position(row, results) or 0.0)
        if any(row.row.series == name for row in rows):
            draw_curve(axes, results, rows, name, of_system, bool(variant), shift)
    for row in results.evaluated:
        if row.row.x is None and not row.floats:
            draw_floor(axes, row)
    finish(axes, results)


def draw_curve(
    axes: Any,
    results: Results,
    rows: list[RowResult],
    name: str,
    of_system: tuple[str, str],
    hollow: bool,
    shift: float,
) -> None:
    """hollow: a variant of the system that has the same colour and marker."""
    colour, marker = of_system
    joined = len(rows) > 1 and results.recipe.axis_scale != "category"
    x = [(position(row, results) or 0.0) + shift for row in rows]
    y = [row.perplexity.value for row in rows]
    lower, upper = zip(*[around(row, results) for row in rows], strict=True)
    axes.errorbar(
        x,
        y,
        (lower, upper),
        color=colour,
        marker=marker,
        linestyle=("--" if hollow else "-") if joined else "",
        markerfacecolor="white" if hollow else colour,
        markersize=7,
        capsize=3,
        label=name,
    )
    for row, at, value in zip(rows, x, y, strict=True):
        place = dict(textcoords="offset points", xytext=(6, -12 if hollow else 6), fontsize=8)
        behind = dict(facecolor="white", edgecolor="none", alpha=0.75, pad=0.5)
        axes.annotate(row.row.note, (at, value), bbox=behind if row.row.note else None, **place)


def draw_floor(axes: Any, row: RowResult) -> None:
    """A row without memory has no place on an axis of memory: a line, or words at the edge where it
    is so far away that all else would be squeezed."""
    value, (low, high) = row.perplexity.value, axes.get_ylim()
    if value > high + (high - low) / 2:
        place = dict(xycoords="axes fraction", ha="right", va="top", fontsize=9)
        axes.annotate(f"{row.row.label}: {value:.2f} ↑", (0.99, 0.99), **place)
        return
    axes.axhline(value, color="#555555", linestyle=":", linewidth=1.5)
    place = dict(xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=9)
    axes.annotate(row.row.label, (0.99, value), **place)


def position(row: RowResult, results: Results) -> float | None:
    """Where on the axis; None for a row without memory on an axis of memory, which is a line."""
    x = row.row.x
    if isinstance(x, str):
        return float(categories(results).index(x))
    return (row.floats or None) if x is None else x


def categories(results: Results) -> list[str]:
    return list(dict.fromkeys(str(row.x) for row in results.recipe.rows))


def around(row: RowResult, results: Results) -> tuple[float, float]:
    """How far the bar of a row reaches below and above its perplexity."""
    reference = results.reference
    if reference is None or row is reference:
        return 0.0, 0.0
    found = results.difference(row, reference)
    if found is None or found.low is None or found.high is None:
        return 0.0, 0.0
    here = row.perplexity.value
    down, up = found.low - found.value, found.high - found.value
    return here * (1 - math.exp(down)), here * (math.exp(up) - 1)


def finish(axes: Any, results: Results) -> None:
    from matplotlib import ticker

    recipe = results.recipe
    axes.set(xlabel=recipe.axis, ylabel=f"perplexity, {results.settings.split} documents")
    if recipe.axis_scale in ("log", "log2"):
        axes.set_xscale("log", base=2 if recipe.axis_scale == "log2" else 10)
    if recipe.axis_scale == "log":
        axes.xaxis.set_major_locator(ticker.LogLocator(10, (1, 2, 5)))
        axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
        axes.minorticks_off()
    given = sorted({row.x for row in recipe.rows if isinstance(row.x, int | float)})
    if recipe.axis_scale == "category":
        names = categories(results)
        axes.set_xticks(range(len(names)), names)
        axes.set_xlim(-0.5, len(names) - 0.5)
    elif given:
        axes.set_xticks(given, [f"{x:g}" for x in given])
        axes.minorticks_off()
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=9)


def draw_increments(axes: Any, results: Results) -> None:
    """Figure 6, right: what a window of a half and of a quarter costs."""
    names = dict.fromkeys(row.series for row in results.recipe.rows)
    for name, (colour, marker) in zip(names, LOOKS, strict=False):
        found = {
            row.row.x: row.perplexity.value for row in results.evaluated if row.row.series == name
        }
        if {512, 256, 128} <= found.keys():
            point = (found[256] - found[512], found[128] - found[512])
            axes.plot(*point, marker, color=colour, label=name, markersize=8)
    axes.set(xlabel="perplexity more at window 256", ylabel="perplexity more at window 128")
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=9)
