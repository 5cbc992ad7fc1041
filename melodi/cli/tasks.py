"""The part of `melodi eval` that runs tasks of lm-evaluation-harness."""

from pathlib import Path
from typing import Any

from melodi.cli.console import print_table
from melodi.config.training import Precision


def eval_tasks(
    run: Path,
    tasks: tuple[str, ...],
    include: Path | None,
    rows: int,
    device: str,
    precision: Precision,
    as_json: bool,
) -> None:
    """What `--tasks` does."""
    try:
        from melodi.lm_eval import evaluate_tasks
    except ImportError as error:
        raise ValueError(str(error)) from None
    from melodi.files import json_text
    from melodi.run import load

    found = evaluate_tasks(load(run).to(device), tasks, include, rows, precision)
    record = {"run": str(run), **found}
    if as_json:
        print(json_text(record, indent=2))
    else:
        print_tasks(record)


def print_tasks(record: dict[str, Any]) -> None:
    rows = []
    for task, figures in record["tasks"].items():
        for name, value in figures.items():
            metric = name.partition(",")[0]
            if isinstance(value, float) and not metric.endswith("_stderr"):
                error = figures.get(name.replace(metric, f"{metric}_stderr", 1))
                rows.append(
                    [
                        task,
                        metric,
                        f"{value:.4f}" if abs(value) < 1e6 else f"{value:.3e}",
                        f"{error:.4f}" if isinstance(error, float) else "-",
                        str(record["samples"].get(task, "")),
                    ]
                )
    print_table(
        f"{record['run']}: lm-evaluation-harness {record['lm_eval']}",
        ["task", "metric", "value", "error", "samples"],
        rows,
    )
