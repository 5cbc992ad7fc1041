"""`melodi read`: documents to what each token cost, and to a memory file."""

import errno
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from melodi.cli.console import (
    check_at_least,
    device_named,
    parse,
    print_table,
    use_threads,
)
from melodi.config.training import Precision

if TYPE_CHECKING:
    from melodi.data.text import Document
    from melodi.evaluation.texts import TextRead
    from melodi.model import LanguageModel
    from melodi.stream import StreamReader

Files = Annotated[
    tyro.conf.Positional[tuple[str, ...]],
    tyro.conf.arg(metavar="FILE [FILE ...]", help_behavior_hint="(required)"),
]
LINES, BAR = 16, 40
"""Of the picture of the loss: how many lines at most, and how long they are."""


@dataclass
class ReadArgs:
    files: Files
    """Text files, .jsonl[.gz|.zst] or .parquet (each record is a document), or - for standard
    input. Several documents are read at the same time, each on its own."""
    run: Path | None = None
    """A run folder; the model that ships with melodi, laptop-melodi, when not given."""
    memory: Path | None = None
    """Go on from this memory file, as if the document were the rest of what it was made from."""
    save: Path | None = None
    """Write what is remembered to this file, after Ctrl-C too. It holds content of the document."""
    bf16: bool = False
    """Save in half of the space, with numbers of two bytes."""
    rows: int = 8
    """Documents that are read at the same time."""
    text_column: str = "text"
    """Where JSON lines and parquet have their text."""
    precision: Precision = "fp32"
    """In which numbers products are computed; auto: bf16 where this machine is faster with it."""
    threads: int | None = None
    """CPU threads; torch's own choice when not given."""
    device: str | None = None
    """cpu, cuda …; the GPU where there is one when not given."""
    json: bool = False
    """Print one JSON object instead of a table."""


def read(args: list[str]) -> None:
    """Documents to nats per token and, if wanted, to a memory file to go on from.

    Example: melodi read book.txt --save book.memory
    """
    options = parse(ReadArgs, read, args)
    check_at_least(1, rows=options.rows)
    if not options.files:
        raise ValueError("FILE is missing: give text files, or - for standard input")
    check_place(options.save)
    check_not_overwritten(options.save)
    if options.bf16 and options.save is None:
        raise ValueError("--bf16 says how memory is saved: give --save FILE too")
    use_threads(options.threads)
    device = device_named(options.device)
    from melodi.evaluation.texts import documents_in
    from melodi.run import default_run, load

    documents = documents_in(options.files, options.text_column)
    first = list(islice(documents, 2))
    if not first:
        raise ValueError(f"{', '.join(options.files)} is empty: give something to read")
    alone = len(first) == 1
    for flag, path in (("--memory", options.memory), ("--save", options.save)):
        if path is not None and not alone:
            raise ValueError(
                f"{flag} is for one document, and here are several: read them one after the other"
            )
    model = load(options.run or default_run()).to(device)
    results = (
        [follow(model, first[0], options)]
        if alone
        else together(model, chain(first, documents), options)
    )
    for result in results:
        if result.remark:
            print(f"melodi: {result.remark}", file=sys.stderr)
    if options.json:
        print_json(results, options)
    else:
        print_results(results, options)


def check_place(path: Path | None) -> None:
    """Before hours of reading, not after them."""
    if path is None:
        return
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a device or a pipe"
        raise ValueError(f"--save {path} is {kind}: give a file")
    if not path.parent.is_dir():
        raise ValueError(f"--save {path} cannot be written: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(errno.EACCES, "no permission", str(path.parent))


def check_not_overwritten(path: Path | None) -> None:
    """Only a memory file gives way to another: a document that is named by mistake does not."""
    from melodi.memory_file import is_memory_file

    if path is not None and path.exists() and path.stat().st_size and not is_memory_file(path):
        raise ValueError(f"--save {path} is there, and is no memory file: choose another name")


def reader_of_one(
    model: "LanguageModel", memory: Path | None, precision: Precision, int8: bool = False
) -> "StreamReader":
    """A reader of one document, from its beginning or from a memory file."""
    from melodi.stream import StreamReader

    if memory is None:
        return StreamReader(model, precision=precision, int8=int8)
    reader = StreamReader.load(model, memory, precision, int8)
    if reader.rows > 1:
        raise ValueError(f"--memory {memory} holds {reader.rows} documents: give a file of one")
    return reader


def follow(model: "LanguageModel", document: "Document", options: ReadArgs) -> "TextRead":
    """One document, from the beginning or from a memory file; saved even if interrupted."""
    from melodi.evaluation.texts import read_one

    reader = reader_of_one(model, options.memory, options.precision)
    before = reader.tokens_read[0]
    try:
        with bar(options) as progress:
            result = read_one(reader, document, progress.update)
    except KeyboardInterrupt as stop:
        count = reader.tokens_read[0] - before
        message = f"interrupted after {count:,} tokens"
        if options.save is not None and count:
            reader.save(options.save, "bf16" if options.bf16 else None)
            message += f": what was read is in {options.save}"
        raise KeyboardInterrupt(message, *stop.args[1:]) from None
    if not result.sums.tokens:
        raise ValueError(f"{document.name} is empty: give something to read")
    if options.save is not None:
        reader.save(options.save, "bf16" if options.bf16 else None)
    return result


def together(
    model: "LanguageModel", documents: "Iterable[Document]", options: ReadArgs
) -> "list[TextRead]":
    from melodi.evaluation.texts import read_together

    with bar(options) as progress:
        return list(
            read_together(model, documents, options.rows, progress.update, options.precision)
        )


def bar(options: ReadArgs) -> Any:
    """Of bytes of text, whose number is known of text files alone."""
    from melodi.data.progress import progress_bar
    from melodi.data.text import RECORDS

    known = not any(name == "-" or name.endswith(RECORDS) for name in options.files)
    sizes = [Path(name).stat().st_size for name in options.files] if known else []
    return progress_bar("reading", sum(sizes) if known else None)


def run_name(options: ReadArgs) -> str:
    from melodi.run import default_run

    return str(options.run or default_run().name)


def print_json(results: "list[TextRead]", options: ReadArgs) -> None:
    from melodi.evaluation.documents import Evaluation
    from melodi.evaluation.texts import figures
    from melodi.files import json_text

    files = [result.record() for result in results]
    if len(results) == 1:
        files[0]["windows"] = results[0].windows
    record = {
        "run": run_name(options),
        "memory": options.memory and str(options.memory),
        "saved": options.save and str(options.save),
        **figures(sum((result.sums for result in results), Evaluation())),
        "files": files,
    }
    print(json_text(record, indent=2))


def print_results(results: "list[TextRead]", options: ReadArgs) -> None:
    rows = []
    for result in results:
        record = result.record()
        numbers = [record[key] for key in ("nats_per_token", "perplexity", "bits_per_byte")]
        rows.append(
            [
                shortened(record["path"]),
                f"{record['tokens']:,}",
                *["-" if number is None else f"{number:.3f}" for number in numbers],
            ]
        )
    print_table(
        f"{run_name(options)}: {len(results)} document{'s' * (len(results) > 1)}",
        ["", "tokens", "nats/token", "perplexity", "bits/byte"],
        rows,
    )
    if len(results) == 1:
        print_windows(results[0].windows)
    if options.save is not None:
        size = options.save.stat().st_size
        print(f"{options.save}: {size:,} bytes, from which reading and writing go on")


def shortened(name: str, width: int = 30) -> str:
    return name if len(name) <= width else "..." + name[3 - width :]


def print_windows(windows: list[dict[str, float]]) -> None:
    """The loss from beginning to end, in lines of equally many windows."""
    per_line = -(-len(windows) // LINES)
    groups = [windows[i : i + per_line] for i in range(0, len(windows), per_line)]
    counts = [sum(w["predictions"] for w in group) for group in groups]
    if not any(counts):  # of a single token nothing was expected
        return
    means = [
        sum(w["nats"] for w in group) / max(count, 1)
        for group, count in zip(groups, counts, strict=True)
    ]
    most = max(means)
    print(f"nats per token, {per_line} window{'s' * (per_line > 1)} a line")
    for group, mean in zip(groups, means, strict=True):
        length = round(BAR * mean / most) if 0 < most < float("inf") else 0
        print(f"{int(group[0]['first']):>14,}  {mean:8.3f}  {'#' * length}")
