"""TOKENS -> STORE: a store in the making, which survives interruptions.

1. Documents are appended in order to a draft (appender.py), which notes how far it is, so that the
   same command continues an interrupted one, to the same bytes.
2. The draft is dealt out into one file of tokens per split, and the manifest is written last.
3. Of a shard the draft itself is the result, with checksums in a file that is written last.
4. What was begun and then refused is discarded: the corrected command finds an empty folder.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from melodi.data import shards
from melodi.data.shards import SHARD, Shard
from melodi.data.splits import Shares, assign_splits
from melodi.data.store import (
    DTYPES,
    FORMAT,
    MANIFEST,
    PROGRESS,
    SPLITS,
    VERSION,
    IntArray,
    counts_in_words,
)
from melodi.data.tokenizer import TOKENIZER_FILES, Tokenizer, load_tokenizer
from melodi.files import checksum, read_json, replacing, write_json

MOST_NAMES = 100
"""So many documents of a kind are named in the manifest; all are counted."""


@dataclass
class Progress:
    """How much of a draft is valid, and what was found on the way."""

    request: dict[str, Any]
    tokenizer_digest: str | None = None
    read: int = 0
    kept: int = 0
    tokens: int = 0
    named: int = 0
    """Bytes of the names' file."""
    skipped: dict[str, int] = field(default_factory=dict)
    skipped_names: dict[str, list[str]] = field(default_factory=dict)
    repaired: dict[str, int] = field(default_factory=dict)
    repaired_names: dict[str, list[str]] = field(default_factory=dict)


class StoreWriter:
    """The draft of a store: the tokens of all documents in one file, a row of figures about each
    document in another, a line about each that was read, kept or not, in a third, and a fourth that
    says how much of the three is valid."""

    TOKENS, TABLE, NAMES = FILES = "draft.tokens", "draft.documents", "draft.names"
    COLUMNS = ("tokens", "bytes", "digest", "place", "split")

    def __init__(self, folder: Path, request: dict[str, Any]) -> None:
        """Begins a draft, or continues the one in the folder if it is of the same request."""
        check_free(folder)
        self.folder = folder
        for partial in folder.glob("*.partial"):  # of a process that was killed
            partial.unlink()
        if (folder / PROGRESS).exists():
            self.progress = Progress(**read_json(folder / PROGRESS))
            self._check_same(request)
        else:
            self.progress = Progress(request)
            self.save_progress()

    def take_tokenizer(self, tokenizer: Tokenizer) -> None:
        tokenizer.save(self.folder)
        self.progress.tokenizer_digest = tokenizer.digest()
        self.save_progress()

    def finish(self, shares: Shares, ignored: Mapping[str, str]) -> None:
        """Deals the documents out into their splits. Interrupted, it is simply done again."""
        table, progress = self.table(), self.progress
        if not len(table):
            skipped = f" (skipped: {counts_in_words(progress.skipped)})" if progress.skipped else ""
            raise ValueError(
                f"no documents in {', '.join(progress.request['sources'])}{skipped}: give at least "
                "one with text"
            )
        ignored_counts: dict[str, int] = {}
        ignored_names: dict[str, list[str]] = {}
        for name, reason in ignored.items():
            note(name, reason, ignored_counts, ignored_names)
        tokenizer = load_tokenizer(self.folder)
        splits = assign_splits(table[:, 3], table[:, 4], shares)
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": dtype_name(tokenizer),
            "vocab_size": tokenizer.vocab_size,
            "tokenizer_digest": tokenizer.digest(),
            "splits": {
                split: self._write_split(split, tokenizer, table[:, :2], splits == number)
                for number, split in enumerate(SPLITS)
            },
            "sources": progress.request["sources"],
            "request": progress.request,
            "skipped": progress.skipped,
            "skipped_names": progress.skipped_names,
            "repaired": progress.repaired,
            "repaired_names": progress.repaired_names,
            "ignored": ignored_counts,
            "ignored_names": ignored_names,
        }
        write_json(self.folder / MANIFEST, manifest)
        remove_draft(self.folder)

    def finish_shard(self, shard: Shard, ignored: Mapping[str, str]) -> None:
        """The draft is whole: from now on it can be joined with those of the other shards."""
        about = {
            "format": shards.FORMAT,
            "version": shards.VERSION,
            "shard": [shard.number, shard.count],
            "ignored": dict(ignored),
            "checksums": {name: checksum(self.folder / name) for name in self.FILES},
            "progress": asdict(self.progress),
        }
        write_json(self.folder / SHARD, about)
        (self.folder / PROGRESS).unlink()

    def discard(self) -> None:
        """Takes back everything that was written."""
        remove_draft(self.folder)
        files = [f"{split}.{kind}" for split in SPLITS for kind in ("tokens", "index")]
        for name in (*files, *TOKENIZER_FILES):
            (self.folder / name).unlink(missing_ok=True)

    def table(self) -> IntArray:
        """One row per kept document, in the order of COLUMNS."""
        data = (self.folder / self.TABLE).read_bytes()
        return np.frombuffer(data, "<i8").reshape(-1, len(self.COLUMNS))[: self.progress.kept]

    def save_progress(self) -> None:
        write_json(self.folder / PROGRESS, asdict(self.progress))

    def _write_split(
        self, split: str, tokenizer: Tokenizer, sizes: IntArray, chosen: NDArray[np.bool_]
    ) -> dict[str, Any]:
        """Writes a split's files from the draft's tokens; returns what the manifest says about it.
        sizes: of all documents, in tokens and in bytes."""
        tokens, index = self.folder / f"{split}.tokens", self.folder / f"{split}.index"
        lengths = sizes[:, 0] * DTYPES[dtype_name(tokenizer)].itemsize
        starts = np.cumsum(lengths) - lengths
        with (
            (self.folder / self.TOKENS).open("rb") as source,
            replacing(tokens) as partial,
            partial.open("wb") as file,
        ):
            for i in np.flatnonzero(chosen):
                copy(source, int(starts[i]), int(lengths[i]), file)
        ends = np.zeros((2, np.count_nonzero(chosen) + 1), np.int64)
        ends[:, 1:] = np.cumsum(sizes[chosen], axis=0).T
        with replacing(index) as partial, partial.open("wb") as file:
            np.save(file, ends)
        return {
            "documents": ends.shape[1] - 1,
            "tokens": int(ends[0, -1]),
            "bytes": int(ends[1, -1]),
            "checksums": {"tokens": checksum(tokens), "index": checksum(index)},
        }

    def _check_same(self, request: dict[str, Any]) -> None:
        for key in {**self.progress.request, **request}:
            before, value = self.progress.request.get(key), request.get(key)
            if before != value:
                raise ValueError(
                    f"store {self.folder} was begun with {key}={before!r}, not {value!r}: give the "
                    "same to continue, choose another --out, or delete the folder"
                )


def check_free(folder: Path) -> None:
    """Refuses a folder in which no store can be begun or continued."""
    if (folder / MANIFEST).exists():
        remove_draft(folder)  # in case of a kill at the very end
        raise ValueError(
            f"store {folder} is finished and is not overwritten: choose another --out, "
            "or delete it first"
        )
    if (folder / SHARD).exists():
        (folder / PROGRESS).unlink(missing_ok=True)
        raise ValueError(
            f"shard {folder} is finished and is not overwritten: choose another --out, "
            "or delete it first"
        )
    # A process killed at the very beginning leaves no more than these.
    names = {path.name for path in folder.iterdir() if not path.match(f"{PROGRESS}.*.partial")}
    if names - {".lock"} and PROGRESS not in names:
        raise ValueError(f"folder {folder} is not empty: choose another --out")


def remove_draft(folder: Path) -> None:
    for name in (*StoreWriter.FILES, PROGRESS):
        (folder / name).unlink(missing_ok=True)


def note(name: str, reason: str, counts: dict[str, int], names: dict[str, list[str]]) -> None:
    """Counts a document, and names it if it is among the first."""
    counts[reason] = counts.get(reason, 0) + 1
    if counts[reason] <= MOST_NAMES:
        names.setdefault(reason, []).append(name)


def copy(source: Any, start: int, length: int, target: Any) -> None:
    source.seek(start)
    while length:
        block = source.read(min(length, 1 << 20))
        target.write(block)
        length -= len(block)


def dtype_name(tokenizer: Tokenizer) -> str:
    return "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
