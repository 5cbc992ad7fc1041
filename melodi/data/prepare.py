"""DOCUMENTS -> TOKENS: how a token store is made, in bounded memory and through interruptions.

1. If a vocabulary is to be trained, the training documents are sampled evenly, and it is trained.
2. Documents are read in pieces, which threads encode (both tokenizer libraries let go of Python's
   lock) and one writer appends in order to a draft of the store.
3. The draft is dealt out into the splits.

Only one process at a time makes a store. Stopped by a kill or a full disk, the same command
continues; refused because of what it was given, it leaves nothing that would be in the way.
"""

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from melodi.data.appender import Appender
from melodi.data.corpus import Source, open_sources
from melodi.data.progress import progress_bar
from melodi.data.shards import Shard
from melodi.data.splits import Shares
from melodi.data.store import DTYPES, TokenStore
from melodi.data.text import Document
from melodi.data.tokenizer import Tokenizer, check_vocab_size, load_tokenizer
from melodi.data.vocabulary import train_vocabulary
from melodi.data.writer import Progress, StoreWriter, check_free, dtype_name
from melodi.files import locked

DEFAULT_VOCAB_SIZE = 2048
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)

Item = TypeVar("Item")


def prepare(
    sources: str | Path | Sequence[str | Path] = (),
    out: str | Path = "store",
    vocab_size: int | None = None,
    tokenizer: str | Path | None = None,
    workers: int | None = None,
    text_column: str = "text",
    validation_share: float = 0.02,
    test_share: float = 0.02,
) -> TokenStore:
    """Makes the store `out`, or goes on making it. Without sources: Python's standard library.
    The vocabulary is trained, 2048 by default, unless a tokenizer is given."""
    if tokenizer is not None and vocab_size is not None:
        raise ValueError(
            f"vocab_size={vocab_size} and tokenizer={tokenizer}: give only one of them"
        )
    vocab_size = DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
    check_vocab_size(vocab_size)
    shares = checked_shares(validation_share, test_share)
    threads = checked_workers(workers)
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    corpus = open_sources(sources, text_column)
    made_with = given.digest() if given else f"trained, {vocab_size}"
    with drafting(Path(out), requested(corpus, text_column, made_with, shares)) as writer:
        if writer.progress.tokenizer_digest is None:
            writer.take_tokenizer(given or train_vocabulary(corpus, vocab_size, shares))
        append_documents(writer, corpus, threads)
        writer.finish(shares, ignored_files(corpus))
    return TokenStore.open(out)


def prepare_shard(
    shard: Shard,
    tokenizer: str | Path,
    sources: str | Path | Sequence[str | Path] = (),
    out: str | Path = "store",
    workers: int | None = None,
    text_column: str = "text",
    validation_share: float = 0.02,
    test_share: float = 0.02,
) -> Progress:
    """Makes one shard of what `prepare` with the same tokenizer makes; merge.py joins them."""
    shares = checked_shares(validation_share, test_share)
    threads = checked_workers(workers)
    given = load_tokenizer(tokenizer)
    corpus = open_sources(sources, text_column)
    mine = shard.of(corpus)
    request = requested(corpus, text_column, given.digest(), shares)
    with drafting(Path(out), {**request, "shard": str(shard)}) as writer:
        if writer.progress.tokenizer_digest is None:
            writer.take_tokenizer(given)
        append_documents(writer, mine, threads)
        writer.finish_shard(shard, ignored_files(corpus))
    return writer.progress


def checked_shares(validation: float, test: float) -> Shares:
    shares = Shares(validation, test)
    shares.check()
    return shares


def checked_workers(workers: int | None) -> int:
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers} must be at least 1")
    return workers or os.cpu_count() or 1


def requested(
    corpus: list[Source], text_column: str, tokenizer: str, shares: Shares
) -> dict[str, Any]:
    """What a store is made of, as its manifest says it."""
    return {
        "sources": [source.description for source in corpus],
        "contents": [source.fingerprint for source in corpus],
        "text_column": text_column,
        "tokenizer": tokenizer,
        "validation_share": shares.validation,
        "test_share": shares.test,
    }


def ignored_files(corpus: list[Source]) -> dict[str, str]:
    return dict(chain(*(source.ignored.items() for source in corpus)))


@contextlib.contextmanager
def drafting(out: Path, request: dict[str, Any]) -> Iterator[StoreWriter]:
    """The draft of a request in a folder, begun or continued, with nobody else at work there."""
    out.mkdir(parents=True, exist_ok=True)
    check_free(out)  # before the lock, which is a file: nothing is put into a folder of others
    with full_disk_named(out), locked(out):
        writer = StoreWriter(out, request)
        with discarded_if_refused(writer):
            yield writer


def append_documents(writer: StoreWriter, corpus: list[Source], workers: int) -> None:
    """Encodes all documents that the draft does not have yet."""
    tokenizer = load_tokenizer(writer.folder)
    dtype = DTYPES[dtype_name(tokenizer)]
    end_of_document = tokenizer.end_of_document
    closing = np.array([] if end_of_document is None else [end_of_document], dtype)
    documents = chain.from_iterable(source.documents() for source in corpus)
    unread = islice(documents, writer.progress.read, None)
    sizes = [source.num_bytes for source in corpus]
    total = None if None in sizes else sum(size or 0 for size in sizes)
    with Appender(writer, dtype) as appender, progress_bar("encoding", total) as bar:
        bar.update(int(writer.table()[:, 1].sum()))
        for document, ids in encoded(unread, writer.folder, dtype, workers):
            if ids is not None:
                appender.append(ids)
                continue
            appender.append(closing)
            appender.end_document(document)
            bar.update(document.num_bytes)


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


def a_few_ahead(items: Iterator[Item], count: int) -> Iterator[Item]:
    """The same items, each drawn from the iterator some time before it is given out."""
    drawn = deque(islice(items, count))
    for item in items:
        yield drawn.popleft()
        drawn.append(item)
    yield from drawn


@contextlib.contextmanager
def discarded_if_refused(writer: StoreWriter) -> Iterator[None]:
    """A ValueError means that sources or options must change, so the draft is of no use."""
    try:
        yield
    except ValueError:
        writer.discard()
        raise


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
