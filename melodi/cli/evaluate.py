"""`melodi eval`: a run folder to figures."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from melodi.cli.console import check_at_least, device_named, parse, print_table, use_threads

RunFolder = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
Texts = Annotated[
    tuple[str, ...], tyro.conf.arg(metavar="STR [STR ...]", help_behavior_hint="(default: none)")
]


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

    Example: melodi eval runs/first --split validation --json
    """
    options = parse(EvalArgs, eval_, args)
    check_at_least(1, rows=options.rows, max_tokens=options.max_tokens)
    use_threads(options.threads)
    device = device_named(options.device)
    if options.tasks:
        from melodi.cli.tasks import eval_tasks

        eval_tasks(options.run, options.tasks, options.include, options.rows, device, options.json)
        return
    from melodi.evaluation.record import evaluate_run, write_record
    from melodi.files import json_text
    from melodi.run import Run, load

    run = Run(options.run)
    model = load(options.run).to(device)
    store = run.open_store(options.data)
    store.verify(options.split)
    record = evaluate_run(model, run, store, options.split, options.rows, options.max_tokens)
    if options.json:
        print(json_text(record, indent=2))
    else:
        print_evaluation(options.run, record)
    # Last, so that a run on a disk that cannot be written to still gives its figures.
    write_record(run, record)


def print_evaluation(run: Path, record: dict[str, Any]) -> None:
    print_table(
        f"{run}: {record['documents']} {record['split']} documents, "
        f"{record['predictions']:,} predictions",
        ["", "perplexity", "bits per byte"],
        [
            ["memory kept", f"{record['perplexity']:.3f}", f"{record['bits_per_byte']:.4f}"],
            [
                "memory dropped at every window",
                f"{record['perplexity_without_memory']:.3f}",
                f"{record['bits_per_byte_without_memory']:.4f}",
            ],
        ],
    )
