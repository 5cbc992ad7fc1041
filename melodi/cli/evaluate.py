"""`melodi eval`: a run folder to figures."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from melodi.cli.console import (
    Texts,
    check_at_least,
    check_not_given,
    device_named,
    parse,
    print_table,
    use_threads,
)
from melodi.config.training import Precision

if TYPE_CHECKING:
    from melodi.config import ModelConfig

RunFolder = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]


@dataclass
class EvalArgs:
    run: RunFolder
    """A run folder."""
    data: Path | None = None
    """A token store made with the same tokenizer; the run's own when not given."""
    split: Literal["train", "validation", "test"] = "test"
    """Which documents."""
    rows: int = 8
    """Documents that are read at the same time."""
    max_tokens: int | None = None
    """Read whole documents until they hold about this many tokens; all of them when not given."""
    drops: bool = False
    """Read once more without short-term memory, and once without long-term memory, where a model
    has both."""
    precision: Precision = "fp32"
    """In which numbers products are computed; auto: bf16 where this machine is faster with it."""
    threads: int | None = None
    """CPU threads; torch's own choice when not given."""
    device: str | None = None
    """cpu, cuda …; the GPU where there is one when not given."""
    json: bool = False
    """Print one JSON object instead of a table."""
    tasks: Texts = ()
    """Instead of a store, tasks of lm-evaluation-harness, by name (extra: eval)."""
    include: Path | None = None
    """A folder with tasks of your own, *.yaml."""


def eval_(args: list[str]) -> None:
    """Run folder to perplexity on whole documents, with memory and with memory dropped.

    Example: melodi eval runs/books --split validation --json
    """
    options = parse(EvalArgs, eval_, args)
    check_at_least(1, rows=options.rows, max_tokens=options.max_tokens)
    check_tasks(options)
    use_threads(options.threads)
    device = device_named(options.device)
    if options.tasks:
        from melodi.cli.tasks import eval_tasks

        eval_tasks(
            options.run,
            options.tasks,
            options.include,
            options.rows,
            device,
            options.precision,
            options.json,
        )
        return
    from melodi.evaluation.record import evaluate_run, write_record
    from melodi.files import json_text
    from melodi.run import SHIPPED, Run, load, run_folder

    run = Run(run_folder(options.run))
    model = load(options.run).to(device)
    store = run.open_store(options.data)
    store.verify(options.split)
    metrics = run.read_metrics() if run.metrics.exists() else []
    record = evaluate_run(
        model,
        run,
        store,
        options.split,
        options.rows,
        options.max_tokens,
        options.drops,
        options.precision,
    )
    record["costs"] = costs(model.config, metrics, record["step"])
    if options.json:
        print(json_text(record, indent=2))
    else:
        print_evaluation(options.run, record)
    # Last, so that a run on a disk that cannot be written to still gives its figures. The run in
    # the package keeps the record that it came with.
    if run.folder != SHIPPED:
        write_record(run, record)


def check_tasks(options: EvalArgs) -> None:
    """Tasks bring their own documents."""
    if options.include is not None and not options.tasks:
        raise ValueError(f"--include {options.include} is for tasks: name them with --tasks")
    if options.tasks:
        why = "is of a store, and --tasks reads none: leave one of them out"
        check_not_given(options, ("data", "split", "max_tokens", "drops"), why)


def costs(config: "ModelConfig", metrics: list[dict[str, Any]], step: int | None) -> dict[str, Any]:
    """What the model holds and what its training took up to this step, unknown without metrics:
    tokens as these count them, and twice as many FLOPs as multiply-adds, with full memory."""
    from melodi.bench.operations import TRAINING, per_token
    from melodi.paper.costs import cost

    lines = [line for line in metrics if step is None or line["step"] <= step]
    tokens = sum(line.get("tokens", 0) for line in lines) if metrics else None
    return {
        **cost(config),
        "training_tokens": tokens,
        "training_flops": tokens and 2 * TRAINING * per_token(config) * tokens,
        "reading_flops_per_token": 2 * per_token(config),
    }


def print_evaluation(run: Path, record: dict[str, Any]) -> None:
    lacking = [name for name in ("memory", "short_term", "long_term") if name in record["worth"]]
    print_table(
        f"{run}: {record['documents']} {record['split']} document"
        f"{'s' * (record['documents'] > 1)}, "
        f"{record['predictions']:,} predictions; 95 % intervals over documents",
        ["", "perplexity", "interval", "bits per byte", "worth in nats", "interval"],
        [
            figures_of(record, "memory kept", "", None),
            *[
                figures_of(record, DROPPED[name], f"_without_{name}", record["worth"][name])
                for name in lacking
            ],
        ],
    )


DROPPED = {
    "memory": "memory dropped at every window",
    "short_term": "short-term memory dropped",
    "long_term": "long-term memory dropped",
}


def figures_of(
    record: dict[str, Any], label: str, suffix: str, worth: dict[str, float] | None
) -> list[str]:
    between = record[f"perplexity_interval{suffix}"]
    return [
        label,
        f"{record[f'perplexity{suffix}']:.3f}",
        ends(between, 3),
        f"{record[f'bits_per_byte{suffix}']:.4f}",
        "" if worth is None else f"{worth['value']:.4f}",
        "" if worth is None else ends(worth, 4),
    ]


def ends(interval: dict[str, Any], digits: int) -> str:
    if interval["low"] is None:
        return "one document"
    return f"{interval['low']:.{digits}f} to {interval['high']:.{digits}f}"
