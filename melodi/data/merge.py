"""SHARDS -> STORE: what several machines prepared becomes the store that one would have made.

1. Shards are checked: all of one whole, each there once, none damaged.
2. Their documents go into a draft in order, as if they had just been read: a duplicate of one in an
   earlier shard is found here. From there on all is as in prepare.py, to the same bytes.
"""

import json
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from melodi.data.appender import Appender
from melodi.data.prepare import checked_shares, drafting
from melodi.data.progress import progress_bar
from melodi.data.shards import Shard, read_shard
from melodi.data.store import DTYPES, SPLITS, TokenStore
from melodi.data.text import Document
from melodi.data.tokenizer import load_tokenizer
from melodi.data.writer import StoreWriter, dtype_name
from melodi.files import checksum

BLOCK = 1 << 20
"""Tokens that are copied at a time."""


@dataclass
class ReadDocument(Document):
    """A document that a shard has read: its text is gone, what became of it is known."""

    reason: str | None = None
    known_digest: int = 0

    def digest(self) -> int:
        return self.known_digest

    def reason_to_skip(self, digests: Container[int]) -> str | None:
        return self.reason or ("duplicate" if self.known_digest in digests else None)


def merge(shards: Sequence[str | Path], out: str | Path) -> TokenStore:
    """Makes the store `out` from all shards of a corpus, given in any order, or goes on with it."""
    out, folders = Path(out), in_order([Path(shard) for shard in shards])
    first = read_shard(folders[0])
    request = whole_request(first)
    shares = checked_shares(request["validation_share"], request["test_share"])
    for folder in folders:
        check_whole(folder)
    tokenizer = load_tokenizer(folders[0])
    dtype = DTYPES[dtype_name(tokenizer)]
    with drafting(out, request) as writer:
        if writer.progress.tokenizer_digest is None:
            writer.take_tokenizer(tokenizer)
        documents = chain.from_iterable(read_documents(folder, dtype) for folder in folders)
        unread = islice(documents, writer.progress.read, None)
        with Appender(writer, dtype) as appender, progress_bar("merging", None) as bar:
            for document, tokens in unread:
                for start in range(0, len(tokens), BLOCK):
                    appender.append(tokens[start : start + BLOCK])
                appender.end_document(document)
                bar.update(document.num_bytes)
        writer.finish(shares, first["ignored"])
    return TokenStore.open(out)


def in_order(folders: list[Path]) -> list[Path]:
    """The shards by their numbers, if they are all those of one whole."""
    abouts = {folder: read_shard(folder) for folder in folders}
    first, about = next(iter(abouts.items()))
    numbers: dict[int, Path] = {}
    for folder, other in abouts.items():
        for key, value in whole_request(other).items():
            if value != (ours := whole_request(about)[key]):
                raise ValueError(
                    f"shards {first} and {folder} are not of one whole: {key}={ours!r} and "
                    f"{value!r}; prepare all with the same"
                )
        shard = Shard(*other["shard"])
        if shard.count != about["shard"][1]:
            raise ValueError(
                f"shard {folder} is {shard} and {first} is {Shard(*about['shard'])}: give shards "
                "of one number"
            )
        if shard.number in numbers:
            raise ValueError(
                f"{numbers[shard.number]} and {folder} are both shard {shard}: give each once"
            )
        numbers[shard.number] = folder
    if missing := [n for n in range(1, about["shard"][1] + 1) if n not in numbers]:
        raise ValueError(
            f"shard {Shard(missing[0], about['shard'][1])} is missing ({len(missing)} in all): "
            "give all shards"
        )
    return [numbers[number] for number in sorted(numbers)]


def whole_request(about: dict[str, Any]) -> dict[str, Any]:
    """What the whole is made of, of which this is a shard."""
    request = about["progress"]["request"]
    return {key: value for key, value in request.items() if key != "shard"}


def check_whole(folder: Path) -> None:
    about = read_shard(folder)
    for name, digest in about["checksums"].items():
        if not (folder / name).is_file() or checksum(folder / name) != digest:
            raise ValueError(f"{folder / name} is damaged: copy or prepare shard {folder} again")
    if load_tokenizer(folder).digest() != about["progress"]["tokenizer_digest"]:
        raise ValueError(
            f"the tokenizer in {folder} is not the one that made it: copy or prepare shard "
            f"{folder} again"
        )


def read_documents(
    folder: Path, dtype: np.dtype[Any]
) -> Iterator[tuple[ReadDocument, NDArray[Any]]]:
    """All documents that a shard has read, with the tokens of those that it kept."""
    path = folder / StoreWriter.TOKENS
    tokens = np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
    table = np.fromfile(folder / StoreWriter.TABLE, "<i8").reshape(-1, len(StoreWriter.COLUMNS))
    rows, start = iter(table.tolist()), 0
    with (folder / StoreWriter.NAMES).open(encoding="utf-8") as names:
        for line in names:
            name, reason, flaws = json.loads(line)
            document = ReadDocument(name, lambda _: iter(()), flaws=set(flaws), reason=reason)
            length = 0
            if reason is None:
                length, document.num_bytes, document.known_digest, _, split = next(rows)
                document.split = None if split < 0 else SPLITS[split]
            yield document, tokens[start : start + length]
            start += length
