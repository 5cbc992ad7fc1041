"""`melodi prepare`: text to tokens."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from melodi.cli.console import check_at_least, parse, print_table

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
    """Use this SentencePiece *.model or tokenizer.json instead, or bytes."""
    text_column: str = "text"
    """Where JSON lines, parquet and hub datasets have their text."""
    validation_share: float = 0.02
    """Share of the documents to hold out, unless the source has splits."""
    test_share: float = 0.02
    """Share of the documents to hold out, unless the source has splits."""
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
    from melodi.data.prepare import prepare as prepare_store

    try:
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
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted: the same command continues from here") from None
    if options.json:
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
