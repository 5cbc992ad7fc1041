"""`melodi prepare`: parse, make the store, print what is in it."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from melodi.data import TokenStore
from melodi.draft import counts_in_words


@dataclass
class PrepareArgs:
    sources: tyro.conf.Positional[tuple[str, ...]] = ()
    """Folders and files of .txt, .md, .tex, .py, .jsonl, .jsonl.gz, .jsonl.zst and .parquet; pg19,
    arxiv-math, c4-4k or hub:NAME[:CONFIG]. Without any: the standard library of this Python.
    A folder with parts named train and validation or test keeps these splits, and only these."""
    out: Path = Path("store")
    """Folder to make the token store in."""
    vocab_size: int | None = None
    """Train a byte-level vocabulary of this size on the training documents; 2048 by default."""
    tokenizer: str | None = None
    """Use this SentencePiece *.model or tokenizer.json instead, or bytes."""
    text_column: str = "text"
    """Where JSON lines, parquet and hub datasets have their text."""
    validation_share: float = 0.02
    """Share of the documents to hold out, unless the source has splits."""
    test_share: float = 0.02
    """Share of the documents to hold out, unless the source has splits."""
    workers: int | None = None
    """Threads that encode; as many as there are cores by default."""
    json: bool = False
    """Print the manifest as JSON instead of a table."""


def prepare(args: list[str]) -> None:
    """Corpus to tokenizer and token store; run again, an interrupted one continues.

    Example: melodi prepare books/ --out store --vocab-size 8192
    """
    from melodi import data
    from melodi.console import parse

    options = parse(PrepareArgs, prepare, args)
    try:
        store = data.prepare(
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
        print("melodi: interrupted: the same command continues from here", file=sys.stderr)
        raise SystemExit(130) from None
    if options.json:
        print(json.dumps(store.manifest, indent=2))
    else:
        print_store(store)


def print_store(store: TokenStore) -> None:
    from melodi.console import print_table

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
    for what in ("skipped", "repaired"):
        if manifest[what]:
            print(f"{what}: {counts_in_words(manifest[what])}")
