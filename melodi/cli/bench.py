"""`melodi bench`: speed here, next to the alternatives."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from melodi.cli.console import Texts, check_at_least, parse, print_table, use_threads
from melodi.config.training import Precision
from melodi.files import write_json

Part = Literal["growth", "speed", "documents", "peaks"]
PARTS: tuple[Part, ...] = ("growth", "speed", "documents", "peaks")
METRICS = {"train": "Training", "read": "Reading", "generate": "Generation, one document"}


@dataclass
class BenchArgs:
    quick: bool = False
    """Fewer kinds, lengths and rounds: budgeted for two minutes on two quiet cores."""
    json: bool = False
    """Print all samples as a JSON object instead of tables."""
    out: Path | None = None
    """Folder for bench.json and, where lengths of documents were compared, bench.png."""
    size: Literal["laptop", "small", "mid"] = "laptop"
    """Size of all models."""
    threads: int | None = None
    """CPU threads; torch's own choice when not given."""
    precision: Precision = "fp32"
    """Of all models, and of the roof. auto: bf16 where this machine is clearly faster with it."""
    parts: tuple[Part, ...] = PARTS
    """What is measured: one document read on and on, speed of all models, whole documents, peak
    memory."""
    models: Texts = ()
    """Names of models, as the tables have them, to be compared with melodi; all when not given."""


def bench(args: list[str]) -> None:
    """Speed and memory here, next to full attention and other implementations.

    All models are measured in turn, in one run: compare only ratios of one run.

    Example: melodi bench --quick --out bench
    """
    options = parse(BenchArgs, bench, args)
    check_at_least(1, threads=options.threads)
    if not options.parts:
        raise ValueError(f"--parts needs at least one of {', '.join(PARTS)}")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    use_threads(options.threads)

    import torch

    from melodi.bench.runner import run_bench
    from melodi.bench.sizes import PLANS, SIZES
    from melodi.precision import resolve

    size = SIZES[options.size]
    precision = resolve(options.precision, torch.device("cpu"), size.reference)
    size = replace(size, precision=precision)
    plan = replace(PLANS["quick" if options.quick else "full"], models=options.models)
    record = run_bench(size, plan, options.parts)
    record = {"size": options.size, "quick": options.quick, **record}
    if options.json:
        print(json.dumps(record, indent=2))
    else:
        print_record(record)
    if options.out is not None:
        save(record, options.out)


def save(record: dict[str, Any], folder: Path) -> None:
    from melodi.bench.plots import plot_bench

    write_json(folder / "bench.json", record)
    plot_bench(record, folder)


def print_record(record: dict[str, Any]) -> None:
    m = record["machine"]
    numbers = record["config"]["precision"]
    print(f"{m['cpu']}, {m['capability']}, {m['threads']} threads, torch {m['torch']}, {numbers}")
    for row in record["speed"]:
        if row["name"] == "machine":
            values = f"{row['best'] / 1e9:.1f} best, {row['median'] / 1e9:.1f} median"
            print(f"{row['metric']:<10} {values}, in G{row['unit']}, {row['count']} rounds")
    peaks = {(row["name"], row["work"], row["length"]): row for row in record["peaks"]}
    segment = record["config"]["segment"]
    for metric, title in METRICS.items():
        rows = [row for row in record["speed"] if row["metric"] == metric]
        of = "bandwidth" if metric == "generate" else "roof"
        columns = ["model", "tokens/s", "±", "to melodi", "±", f"of {of}"]
        cells = [speed_cells(row) for row in rows]
        if metric == "train":
            columns.append("peak MB")
            for row, cell in zip(rows, cells, strict=True):
                peak = peaks.get((row["name"], "train", segment))
                cell.append(f"{peak['megabytes']:.0f}" if peak else "-")
        print_measured(title, columns, cells)
    print_documents(record)


def print_measured(title: str, columns: list[str], cells: list[list[str]]) -> None:
    """A part that was left out has no table."""
    if cells:
        print_table(title, columns, cells)


def speed_cells(row: dict[str, Any]) -> list[str]:
    relative, share = row["to_melodi"], row.get("share")
    return [
        row["name"],
        f"{row['median']:,.0f}",
        spread(row),
        f"{relative['median']:.2f}",
        spread(relative),
        f"{share['median']:.0%}" if share else "-",
    ]


def spread(figures: dict[str, Any]) -> str:
    """One sample has none."""
    return f"{figures['spread']:.0%}" if figures["count"] > 1 else "-"


def print_documents(record: dict[str, Any]) -> None:
    print_measured(
        "Whole documents, read from their start",
        ["tokens", "model", "tokens/s", "±", "to melodi"],
        [
            [
                f"{row['length']:,}",
                row["name"],
                f"{row['median']:,.0f}",
                spread(row),
                f"{row['to_melodi']['median']:.2f}",
            ]
            for row in record["documents"]
        ],
    )
    works = {"train": "train", "read": "read", "chunks": "read in chunks"}
    peaks = [
        [works[row["work"]], row["name"], f"{row['length']:,}", f"{row['megabytes']:.0f}"]
        for row in record["peaks"]
        # Of one segment it stands beside the speed of training, where that was measured.
        if row["work"] != "train"
        or row["length"] != record["config"]["segment"]
        or not record["speed"]
    ]
    columns = ["work", "model", "tokens", "MB"]
    print_measured("Memory that a whole document adds, at its peak", columns, peaks)
    print_measured(
        "One document, read on and on by melodi",
        ["after tokens", "tokens/s", "±", "to the first", "±", "resident MB"],
        [
            [
                f"{row['position']:,}",
                f"{row['median']:,.0f}",
                spread(row),
                f"{row['to_first']['median']:.2f}",
                spread(row["to_first"]),
                f"{row['resident_mb']:.0f}" if row["resident_mb"] else "-",
            ]
            for row in record["growth"]
        ],
    )
