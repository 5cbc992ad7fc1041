"""`melodi prepare`: text to tokens."""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from melodi.cli.console import Paths, check_at_least, parse, print_table

if TYPE_CHECKING:
    from melodi.data.store import TokenStore

Sources = Annotated[
    tyro.conf.Positional[tuple[str, ...]],
    tyro.conf.arg(metavar="[PATH ...]", help_behavior_hint="(default: Python's standard library)"),
]


@dataclass
class PrepareArgs:
    sources: Sources = ()
    """Folders and files of .txt, .md, .tex, .py, .jsonl, .jsonl.gz, .jsonl.zst and .parquet; pg19,
    arxiv-math, c4-4k or hub:NAME[:CONFIG].
    A folder with parts named train and validation (or valid, val, dev) or test keeps these splits,
    and only these."""
    out: Path = Path("store")
    """Folder to make the token store in."""
    vocab_size: int | None = None
    """Train a byte-level vocabulary of this size on the training documents; 2048 when not given."""
    tokenizer: str | None = None
    """Use this SentencePiece *.model or tokenizer.json instead, that in the folder of a run or of a
    store, that of laptop-melodi, or bytes."""
    text_column: str = "text"
    """Where JSON lines, parquet and hub datasets have their text."""
    validation_share: float = 0.02
    """Share of the documents to hold out, unless the source has splits."""
    test_share: float = 0.02
    """Share of the documents to hold out, unless the source has splits."""
    shard: str | None = None
    """Prepare only this part of the files, 2/4 say, with a given --tokenizer."""
    merge: Paths = ()
    """Join these shards, all of one corpus, into the store that one machine would have made."""
    workers: int | None = None
    """Threads that encode; as many as there are cores when not given."""
    json: bool = False
    """Print the manifest as JSON instead of a table."""


def prepare(args: list[str]) -> None:
    """Corpus to tokenizer and token store; run again, an interrupted one continues.

    Example: melodi prepare books/ --out store --vocab-size 8192
    """
    options = parse(PrepareArgs, prepare, args)
    check_at_least(1, vocab_size=options.vocab_size, workers=options.workers)
    if options.tokenizer is not None:
        from melodi.run import run_folder

        options.tokenizer = str(run_folder(options.tokenizer))
    make = prepare_whole
    if options.merge:
        check_only_merge(options)
        make = merge_shards
    elif options.shard is not None:
        make = prepare_one_shard
    try:
        make(options)
    except KeyboardInterrupt as stop:
        message = "interrupted: the same command continues from here"
        raise KeyboardInterrupt(message, *stop.args[1:]) from None


def prepare_whole(options: PrepareArgs) -> None:
    from melodi.data.prepare import prepare as prepare_store

    store = prepare_store(
        options.sources,
        options.out,
        options.vocab_size,
        options.tokenizer,
        options.workers,
        options.text_column,
        options.validation_share,
        options.test_share,
    )
    show(store, options.json)
    if options.vocab_size is not None and store.vocab_size < options.vocab_size:
        print(
            f"melodi: the training documents give a vocabulary of {store.vocab_size:,} and no more",
            file=sys.stderr,
        )


def prepare_one_shard(options: PrepareArgs) -> None:
    if options.tokenizer is None or options.vocab_size is not None:
        raise ValueError(
            "--shard needs a tokenizer that all shards share: give --tokenizer, which may be the "
            "tokenizer.json of a store that was made of a part of the corpus"
        )
    from melodi.data.prepare import prepare_shard
    from melodi.data.shards import Shard

    shard = Shard.parse(options.shard or "")
    done = prepare_shard(
        shard,
        options.tokenizer,
        options.sources,
        options.out,
        options.workers,
        options.text_column,
        options.validation_share,
        options.test_share,
    )
    figures = {"shard": [shard.number, shard.count], "documents": done.kept, "tokens": done.tokens}
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        print(
            f"{options.out}: shard {shard}, {done.kept:,} documents, {done.tokens:,} tokens; when "
            f"all {shard.count} are done, melodi prepare --merge joins them"
        )


def check_only_merge(options: PrepareArgs) -> None:
    """What a store is made of is said by its shards."""
    for given in dataclasses.fields(PrepareArgs):
        same = getattr(options, given.name) == given.default
        if given.name not in ("merge", "out", "json") and not same:
            what = "a PATH" if given.name == "sources" else f"--{given.name.replace('_', '-')}"
            raise ValueError(f"--merge takes everything from the shards: leave out {what}")


def merge_shards(options: PrepareArgs) -> None:
    from melodi.data.merge import merge

    show(merge(options.merge, options.out), options.json)


def show(store: "TokenStore", as_json: bool) -> None:
    if as_json:
        print(json.dumps(store.manifest, indent=2))
    else:
        print_store(store)


def print_store(store: "TokenStore") -> None:
    manifest = store.manifest
    print_table(
        f"{store.path}: {', '.join(manifest['sources'])}, vocabulary of {store.vocab_size:,}",
        ["split", "documents", "tokens", "bytes", "bytes/token"],
        [
            [
                split,
                *[f"{about[key]:,}" for key in ("documents", "tokens", "bytes")],
                f"{about['bytes'] / max(about['tokens'], 1):.2f}",
            ]
            for split, about in manifest["splits"].items()
        ],
    )
    for line in store.remarks():
        print(line)
