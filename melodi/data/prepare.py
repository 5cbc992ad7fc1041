"""DOCUMENTS -> TOKENS: how a token store is made, in bounded memory and through interruptions.

1. If a vocabulary is to be trained, the training documents are sampled evenly, and it is trained.
2. Documents are read in pieces, which threads encode (both tokenizer libraries let go of Python's
   lock) and one writer appends in order to a draft. When a document ends it is kept, or dropped as
   binary, empty, a duplicate or too short. Every few seconds the draft notes how far it is, so that
   the same command continues an interrupted one, to the same bytes.
3. Each document belongs to a split by the hash of its name, unless its source says otherwise, so
   that adding documents does not move others. Where that leaves a split empty, which only happens
   to small corpora, the document nearest to it moves there from the largest split.
4. The draft is dealt out into one file of tokens per split, and the manifest is written last.

Files of a finished store: manifest.json, the tokenizer, and for each split its tokens, end to end,
and its index, an array of where each document starts and the last one ends, in tokens and bytes.
"""

import contextlib
import errno
import hashlib
import json
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from melodi.data.corpus import BINARY, Document, Source
from melodi.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from melodi.files import checksum, write_json

FORMAT, VERSION = "melodi-store", 1
SPLITS = ("train", "validation", "test")
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
SAMPLE_CHARACTERS = 20_000_000
SAMPLE_BLOCK = 1 << 14
REMOTE_SAMPLE_BYTES = 1 << 30
SAVE_SECONDS = 5.0
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)

IntArray = NDArray[np.int64]
Item = TypeVar("Item")


class Shares(NamedTuple):
    """How much of the documents is held out."""

    validation: float
    test: float

    def check(self) -> None:
        if min(self) < 0 or sum(self) >= 1:
            raise ValueError(
                f"validation_share={self.validation} and test_share={self.test} must not be "
                "negative and must leave something to train on"
            )

    def splits(self, places: IntArray) -> IntArray:
        """The split of each place, as an index into SPLITS."""
        fractions = places / 2.0**63
        bounds = (self.validation, self.validation + self.test)
        return np.select([fractions < bounds[0], fractions < bounds[1]], [1, 2], 0)


class Draft:
    """A store in the making: the tokens of all documents in one file, a row of figures about each
    document in another, and a third that says how much of the two is valid."""

    TOKENS, ROWS, PROGRESS = "draft.tokens", "draft.documents", "draft.json"
    PROGRESS_NEW = "draft.json.partial"
    COLUMNS = ("tokens", "bytes", "digest", "place", "split")

    def __init__(self, folder: Path, request: dict[str, Any]) -> None:
        self.folder = folder
        begun = folder / self.PROGRESS
        if (folder / "manifest.json").exists():
            self._remove()
            raise ValueError(
                f"store {folder} is finished and is not overwritten: choose another --out, "
                "or delete it first"
            )
        if begun.exists():
            self.progress = json.loads(begun.read_text("utf-8"))
            self._check_same(request)
            return
        folder.mkdir(parents=True, exist_ok=True)
        if {path.name for path in folder.iterdir()} - {self.PROGRESS_NEW}:
            raise ValueError(f"folder {folder} is not empty: choose another --out")
        self.progress = {
            "request": request,
            "tokenizer_digest": None,
            "read": 0,
            "kept": 0,
            "tokens": 0,
            "skipped": {},
            "repaired": {},
        }
        self._save_progress()

    def take_tokenizer(self, tokenizer: Tokenizer) -> None:
        tokenizer.save(self.folder)
        self.progress["tokenizer_digest"] = tokenizer.digest()
        self._save_progress()

    def append_documents(self, corpus: list[Source], workers: int) -> None:
        """Encodes all documents that the draft does not have yet."""
        tokenizer = load_tokenizer(self.folder)
        dtype = DTYPES[dtype_name(tokenizer)]
        end_of_document = tokenizer.end_of_document
        closing = np.array([] if end_of_document is None else [end_of_document], dtype)
        documents = islice(
            chain.from_iterable(source.documents() for source in corpus),
            self.progress["read"],
            None,
        )
        sizes = [source.num_bytes for source in corpus]
        total = None if None in sizes else sum(size or 0 for size in sizes)
        with Appender(self, dtype) as appender, progress_bar("encoding", total) as bar:
            bar.update(int(self.rows()[:, 1].sum()))
            for document, ids in encoded(documents, self.folder, dtype, workers):
                if ids is not None:
                    appender.append(ids)
                    continue
                appender.append(closing)
                appender.end_document(document)
                bar.update(document.num_bytes)

    def finish(self, shares: Shares) -> None:
        """Deals the documents out into their splits. Interrupted, it is simply done again."""
        rows = self.rows()
        if not len(rows):
            skipped = counts_in_words(self.progress["skipped"])
            self._remove()
            raise ValueError(
                f"no documents in {', '.join(self.progress['request']['sources'])}"
                f"{f' (skipped: {skipped})' if skipped else ''}: give at least one with text"
            )
        tokenizer = load_tokenizer(self.folder)
        tokens, itemsize = self.folder / self.TOKENS, DTYPES[dtype_name(tokenizer)].itemsize
        splits = assign_splits(rows[:, 3], rows[:, 4], shares)
        request = self.progress["request"]
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": dtype_name(tokenizer),
            "vocab_size": tokenizer.vocab_size,
            "tokenizer_digest": tokenizer.digest(),
            "splits": {
                split: write_split(
                    self.folder / split, tokens, itemsize, rows[:, :2], splits == number
                )
                for number, split in enumerate(SPLITS)
            },
            "sources": request["sources"],
            "request": request,
            "skipped": self.progress["skipped"],
            "repaired": self.progress["repaired"],
        }
        write_json(self.folder / "manifest.json", manifest)
        self._remove()

    def rows(self) -> IntArray:
        """One row per kept document, in the order of COLUMNS."""
        data = (self.folder / self.ROWS).read_bytes()
        return np.frombuffer(data, "<i8").reshape(-1, len(self.COLUMNS))[: self.progress["kept"]]

    def _check_same(self, request: dict[str, Any]) -> None:
        for key, value in request.items():
            before = self.progress["request"].get(key)
            if before != value:
                raise ValueError(
                    f"store {self.folder} was begun with {key}={before!r}, not {value!r}: give the "
                    "same to continue, choose another --out, or delete the folder"
                )

    def _save_progress(self) -> None:
        write_json(self.folder / self.PROGRESS, self.progress)

    def _remove(self) -> None:
        for name in (self.TOKENS, self.ROWS, self.PROGRESS):
            (self.folder / name).unlink(missing_ok=True)


class Appender:
    """Writes a draft's files from where they are valid, one document after the other."""

    def __init__(self, draft: Draft, dtype: np.dtype[Any]) -> None:
        self.draft = draft
        self.dtype = dtype

    def __enter__(self) -> "Appender":
        progress, folder = self.draft.progress, self.draft.folder
        self.files = [open_kept(folder / name) for name in (Draft.TOKENS, Draft.ROWS)]
        self.tokens, self.rows = self.files
        self.start = self.end = progress["tokens"]
        self._cut_tokens()
        self.rows.truncate(progress["kept"] * 8 * len(Draft.COLUMNS))
        self.rows.seek(0, os.SEEK_END)
        self.digests = set(self.draft.rows()[:, 2].tolist())
        self.skipped, self.repaired = Counter(progress["skipped"]), Counter(progress["repaired"])
        self.read, self.saved_at = progress["read"], time.monotonic()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        # Whatever went wrong may have gone wrong half way: the last saved progress still holds.
        if error is None:
            self.save()
        for file in self.files:
            with contextlib.suppress(OSError):
                file.close()

    def append(self, ids: NDArray[Any]) -> None:
        self.tokens.write(ids.tobytes())
        self.end += len(ids)

    def end_document(self, document: Document) -> None:
        reason = self._reason_to_skip(document)
        if reason:
            self.skipped[reason] += 1
            self._cut_tokens()
        else:
            self._keep(document)
            self.repaired.update(document.flaws)
        self.read += 1
        if time.monotonic() - self.saved_at >= SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        for file in self.files:
            file.flush()
            os.fsync(file.fileno())
        self.draft.progress |= {
            "read": self.read,
            "kept": len(self.digests),
            "tokens": self.start,
            "skipped": dict(sorted(self.skipped.items())),
            "repaired": dict(sorted(self.repaired.items())),
        }
        self.draft._save_progress()
        self.saved_at = time.monotonic()

    def _reason_to_skip(self, document: Document) -> str | None:
        if BINARY in document.flaws:
            return BINARY
        if document.is_blank or self.end == self.start:
            return "empty"
        if self.end - self.start < document.min_tokens:
            return "short"
        return "duplicate" if document.digest() in self.digests else None

    def _keep(self, document: Document) -> None:
        split = SPLITS.index(document.split) if document.split else -1
        num_tokens, place = self.end - self.start, place_of(document.name)
        row = [num_tokens, document.num_bytes, document.digest(), place, split]
        self.rows.write(np.array(row, "<i8").tobytes())
        self.digests.add(document.digest())
        self.start = self.end

    def _cut_tokens(self) -> None:
        """Takes back the tokens of the document that is not finished."""
        self.tokens.seek(self.start * self.dtype.itemsize)
        self.tokens.truncate()
        self.end = self.start


def encoded(
    documents: Iterable[Document], tokenizer_folder: Path, dtype: np.dtype[Any], workers: int
) -> Iterator[tuple[Document, NDArray[Any] | None]]:
    """The ids of each piece, in order, and None at the end of each document."""
    # A tokenizer for each thread: a shared one makes them wait for its cache.
    local = threading.local()

    def start() -> None:
        local.tokenizer = load_tokenizer(tokenizer_folder)

    def encode(piece: str, is_first: bool) -> NDArray[Any]:
        tokenizer: Tokenizer = local.tokenizer
        return np.array(
            tokenizer.encode(piece) if is_first else tokenizer.encode_next(piece), dtype
        )

    def results() -> Iterator[tuple[Document, Future[NDArray[Any]] | None]]:
        for document in documents:
            for n, piece in enumerate(document.pieces()):
                yield document, pool.submit(encode, piece, n == 0)
            yield document, None

    pool = ThreadPoolExecutor(workers, initializer=start)
    try:
        for document, ids in a_few_ahead(results(), 4 * workers):
            yield document, None if ids is None else ids.result()
    finally:
        pool.shutdown(cancel_futures=True)


def trained_on(corpus: list[Source], vocab_size: int, shares: Shares) -> Tokenizer:
    train_tokenizer([], vocab_size)  # refuses a bad size before hours of reading
    return train_tokenizer(sample(corpus, shares), vocab_size)


def sample(corpus: list[Source], shares: Shares) -> list[str]:
    """Blocks of text spread evenly over the training documents: every block at first, and every
    other one of those whenever there are too many. Of a remote source only the beginning."""
    blocks: list[str] = []
    stride, seen, size = 1, 0, 0
    for source in corpus:
        for piece in training_pieces(source, shares):
            for start in range(0, len(piece), SAMPLE_BLOCK):
                if seen % stride == 0:
                    blocks.append(piece[start : start + SAMPLE_BLOCK])
                    size += len(blocks[-1])
                seen += 1
                if size > SAMPLE_CHARACTERS:
                    blocks = blocks[::2]
                    size, stride = sum(map(len, blocks)), 2 * stride
    return blocks


def training_pieces(source: Source, shares: Shares) -> Iterator[str]:
    with progress_bar("sampling", source.num_bytes) as bar:
        for document in source.documents():
            held_out = shares.splits(np.array([place_of(document.name)]))[0] > 0
            if document.split != "train" and (document.split or held_out):
                continue
            yield from document.pieces()
            bar.update(document.num_bytes)
            if source.is_remote and bar.n > REMOTE_SAMPLE_BYTES:
                return


def place_of(name: str) -> int:
    """A document's place in the range of 63 bits that the splits share out."""
    digest = hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def assign_splits(places: IntArray, official: IntArray, shares: Shares) -> IntArray:
    """The split of each document; official: what its source says, -1 if it says nothing."""
    splits = np.where(official >= 0, official, shares.splits(places))
    if (official >= 0).any():
        return splits
    for split, share in enumerate((1.0, *shares)):
        counts = np.bincount(splits, minlength=len(SPLITS))
        # A lone document is for training.
        can_give = counts.max() > (1 if split else 0)
        if share and can_give and not counts[split]:
            donors = np.flatnonzero(splits == counts.argmax())
            splits[donors[places[donors].argmin()]] = split
    return splits


def a_few_ahead(items: Iterator[Item], count: int) -> Iterator[Item]:
    """The same items, each drawn from the iterator some time before it is given out."""
    drawn = deque(islice(items, count))
    for item in items:
        yield drawn.popleft()
        drawn.append(item)
    yield from drawn


def write_split(
    path: Path, tokens: Path, itemsize: int, sizes: IntArray, chosen: NDArray[np.bool_]
) -> dict[str, Any]:
    """Writes a split's files from the draft's tokens; returns what the manifest says about it.
    sizes: of all documents, in tokens and in bytes."""
    lengths = sizes[:, 0] * itemsize
    starts = np.cumsum(lengths) - lengths
    with tokens.open("rb") as source, path.with_suffix(".tokens").open("wb") as file:
        for i in np.flatnonzero(chosen):
            copy(source, int(starts[i]), int(lengths[i]), file)
        sync(file)
    index = np.zeros((2, np.count_nonzero(chosen) + 1), np.int64)
    index[:, 1:] = np.cumsum(sizes[chosen], axis=0).T
    with path.with_suffix(".index").open("wb") as file:
        np.save(file, index)
        sync(file)
    return {
        "documents": index.shape[1] - 1,
        "tokens": int(index[0, -1]),
        "bytes": int(index[1, -1]),
        "checksums": {kind: checksum(path.with_suffix(f".{kind}")) for kind in ("tokens", "index")},
    }


def copy(source: Any, start: int, length: int, target: Any) -> None:
    source.seek(start)
    while length:
        block = source.read(min(length, 1 << 20))
        target.write(block)
        length -= len(block)


def sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def open_kept(path: Path) -> Any:
    """For writing, with what is in it."""
    path.touch()
    return path.open("r+b")


def dtype_name(tokenizer: Tokenizer) -> str:
    return "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"


def counts_in_words(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.items())


def progress_bar(doing: str, num_bytes: int | None) -> Any:
    """Appears on a terminal when the work takes more than a second or two."""
    from tqdm import tqdm

    return tqdm(
        desc=doing,
        total=num_bytes,
        unit="B",
        unit_scale=True,
        delay=1.5,
        file=sys.stderr,
        disable=None,
    )


@contextlib.contextmanager
def full_disk_named(folder: Path) -> Iterator[None]:
    """A failed write does not say where."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno not in DISK_ERRORS:
            raise
        raise OSError(
            f"store {folder} cannot be written ({error.strerror}): "
            "mend that and run the same command again, it continues"
        ) from error
