"""`melodi eval` and `melodi report`: a run folder to figures and plots."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from melodi.cli.console import check_at_least, device_named, parse, print_table, use_threads
from melodi.files import write_json

if TYPE_CHECKING:
    from melodi.evaluation.documents import Evaluation

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
    threads: int | None = None
    """CPU threads; torch's own choice when not given."""
    device: str | None = None
    """cpu, cuda …; the GPU where there is one when not given."""
    json: bool = False
    """Print one JSON object instead of a table."""


def eval_(args: list[str]) -> None:
    """Run folder to perplexity on whole documents, with memory and with memory dropped.

    Example: melodi eval runs/first --split validation --json
    """
    options = parse(EvalArgs, eval_, args)
    check_at_least(1, rows=options.rows, max_tokens=options.max_tokens)
    use_threads(options.threads)
    record = evaluation(options, device_named(options.device))
    if options.json:
        print(json.dumps(record, indent=2))
    else:
        print_evaluation(options.run, record)
    # Last, so that a run on a disk that cannot be written to still gives its figures.
    write_json(options.run / f"eval-{options.split}.json", record)


def evaluation(options: EvalArgs, device: str) -> dict[str, Any]:
    """Two passes over the documents, memory kept and memory dropped."""
    from tqdm import tqdm

    from melodi.data.store import TokenStore
    from melodi.evaluation.documents import choose, evaluate
    from melodi.run import Run, check_store
    from melodi.training.checkpoint import load

    model = load(options.run)
    model.to(device)
    _, config, data = Run(options.run).configs()
    store = TokenStore.open(options.data or data["path"])
    check_store(store, data["tokenizer_digest"])
    documents = store.split(options.split)
    chosen = choose(documents, options.max_tokens)
    if not len(documents):
        raise ValueError(f"the {options.split} split of {store.path} is empty: choose another")
    tokens = int(sum(documents.lengths[i] for i in chosen))
    results = []
    for kept in (True, False):
        label = "memory kept" if kept else "memory dropped"
        with tqdm(total=tokens, desc=label, unit="tok", unit_scale=True, disable=None) as bar:
            results.append(
                evaluate(
                    model,
                    documents,
                    chosen,
                    rows=min(options.rows, len(chosen)),
                    segment_windows=config.segment_windows,
                    with_memory=kept,
                    progress=bar.update,
                )
            )
    return evaluation_record(options.split, *results)


def evaluation_record(split: str, kept: "Evaluation", dropped: "Evaluation") -> dict[str, Any]:
    return {
        "split": split,
        "documents": kept.documents,
        "tokens": kept.tokens,
        "predictions": kept.predictions,
        "bytes": kept.bytes,
        "perplexity": kept.perplexity,
        "bits_per_byte": kept.bits_per_byte,
        "perplexity_without_memory": dropped.perplexity,
        "bits_per_byte_without_memory": dropped.bits_per_byte,
        "by_position": kept.by_position(),
        "by_position_without_memory": dropped.by_position(),
    }


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


@dataclass
class ReportArgs:
    run: RunFolder
    """A run folder."""


def report(args: list[str]) -> None:
    """Run folder to plots: loss, gates, and what the memory is worth (extra: plot).

    Example: melodi report runs/first
    """
    options = parse(ReportArgs, report, args)
    from melodi.paper.report import plot_run

    print(plot_run(options.run))
