"""FILES -> TEXT: documents are read once and in pieces, whatever their size.

1. A text file is one document, and so is a record of JSON lines or parquet.
2. A document is read in pieces of at most PIECE characters, cut where a tokenizer would not see the
   difference. Only a single record is ever held whole. A byte order mark is no text.
3. While it is read, a document finds out its digest, its size, and what was wrong with it. Text is
   UTF-8: what is not becomes U+FFFD and is noted, other encodings are not guessed.
"""

import codecs
import contextlib
import gzip
import hashlib
import importlib
import io
import json
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

PIECE = 1 << 18
TEXT = (".txt", ".md", ".tex", ".py")
RECORDS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
BINARY, INVALID = "binary", "invalid UTF-8"
BYTE_ORDER_MARK = "\ufeff"


@dataclass
class Document:
    name: str
    """Decides the split: the place inside its source, wherever that source lies."""
    blocks: Callable[[set[str]], Iterator[str]]
    """Reads the text, in blocks of any size, and notes flaws in the set."""
    split: str | None = None
    """train, validation or test, if the source says so."""
    min_tokens: int = 0
    """Shorter documents are not wanted."""
    flaws: set[str] = field(default_factory=set)
    num_bytes: int = 0
    is_blank: bool = True
    hasher: Any = field(default_factory=partial(hashlib.blake2b, digest_size=8))

    def pieces(self) -> Iterator[str]:
        for piece in cut(self.blocks(self.flaws)):
            data = piece.encode()
            self.num_bytes += len(data)
            self.hasher.update(data)
            self.is_blank = self.is_blank and piece.isspace()
            yield piece

    def digest(self) -> int:
        """Of the text; complete once all pieces have been read."""
        return int.from_bytes(self.hasher.digest(), "little", signed=True)

    def reason_to_skip(self, digests: Container[int]) -> str | None:
        """Why a document that has been read is left out, however it is encoded; digests: of those
        before it that are kept."""
        if BINARY in self.flaws:
            return BINARY
        if self.is_blank:
            return "empty"
        return "duplicate" if self.digest() in digests else None


def file_documents(
    path: Path, name: str, text_column: str, split: str | None
) -> Iterator[Document]:
    if path.name.endswith(TEXT):
        yield Document(name, partial(text_blocks, path), split)
    elif path.name.endswith(".parquet"):
        for n, value in enumerate(parquet_values(path, text_column)):
            where = f"{path} row {n}"
            yield Document(f"{name}:{n}", partial(value_blocks, value, where), split)
    elif path.name.endswith(RECORDS):
        for n, line in enumerate(raw_lines(path)):
            if not line.strip():  # no record
                continue
            where = f"{path} line {n + 1}"
            yield Document(f"{name}:{n}", partial(json_blocks, line, text_column, where), split)
    else:
        raise ValueError(f"file {path} is of no known kind: give *{', *'.join(TEXT + RECORDS)}")


def text_blocks(path: Path, flaws: set[str]) -> Iterator[str]:
    with path.open("rb") as file:
        yield from decoded_blocks(file, flaws)


def decoded_blocks(file: IO[bytes], flaws: set[str]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    block = file.read(PIECE)
    if b"\0" in block[:8192]:
        flaws.add(BINARY)
        return
    while True:
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError:
            flaws.add(INVALID)
            decoder.errors = "replace"
            text = decoder.decode(block, final=not block)
        yield text
        if not block:
            return
        block = file.read(PIECE)


def raw_lines(path: Path) -> Iterator[bytes]:
    with damage_named(path), contextlib.ExitStack() as stack:
        file: IO[bytes] = stack.enter_context(path.open("rb"))
        if path.suffix == ".gz":
            file = stack.enter_context(gzip.open(file))  # type: ignore[arg-type]
        elif path.suffix == ".zst":
            reader = (
                extra("zstandard", path.name)
                .ZstdDecompressor(max_window_size=1 << 31)  # as far as `zstd --long` goes
                .stream_reader(file, read_across_frames=True)
            )
            file = stack.enter_context(io.BufferedReader(reader, 1 << 20))
        yield from file


def json_blocks(line: bytes, text_column: str, where: str, flaws: set[str]) -> Iterator[str]:
    try:
        text = line.decode()
    except UnicodeDecodeError:
        flaws.add(INVALID)
        text = line.decode(errors="replace")
    try:
        record = json.loads(text.removeprefix(BYTE_ORDER_MARK))
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}): mend or remove it") from error
    yield from value_blocks(value_of(record, text_column, where), where, flaws)


def value_blocks(value: object, where: str, flaws: set[str]) -> Iterator[str]:
    """The text of a record; a missing one is an empty document."""
    if value is None:
        return
    if not isinstance(value, str):
        raise ValueError(f"{where} has text of type {type(value).__name__}: it must be a string")
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        flaws.add(INVALID)
        value = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    yield value


def parquet_values(path: Path, text_column: str) -> Iterator[object]:
    parquet = extra("pyarrow.parquet", path.name)
    with damage_named(path), parquet.ParquetFile(path) as file:
        value_of(dict.fromkeys(file.schema_arrow.names), text_column, str(path))
        for batch in file.iter_batches(16, columns=[text_column]):
            yield from (value.as_py() for value in batch.column(0))


def value_of(record: Any, text_column: str, where: str) -> Any:
    if not isinstance(record, Mapping):
        raise ValueError(f"{where} is a {type(record).__name__}: each record must be an object")
    if text_column not in record:
        raise ValueError(
            f"{where} has no column {text_column!r}, but {', '.join(record)}: choose "
            "--text-column, or mend the record"
        )
    return record[text_column]


def cut(blocks: Iterable[str]) -> Iterator[str]:
    """The same text in pieces that do not depend on how it came in blocks; without a byte order
    mark at its start."""
    rest, begun = "", False
    for block in blocks:
        if block and not begun:
            block, begun = block.removeprefix(BYTE_ORDER_MARK), True
        text, start = rest + block, 0
        while len(text) - start > PIECE:
            end = cut_point(text, start + PIECE)
            yield text[start:end]
            start = end
        rest = text[start:]
    if rest:
        yield rest


def cut_point(text: str, limit: int) -> int:
    """The last place before the limit with a space between two words, where vocabularies begin a
    new token anyway; the limit itself if there is none nearby."""
    end = limit
    while (end := text.rfind(" ", limit - PIECE // 4, end)) > 0:
        if not text[end - 1].isspace() and not text[end + 1].isspace():
            return end
    return limit


def extra(module: str, needed_by: str) -> Any:
    """A library that only some sources need."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{needed_by} needs {module.partition('.')[0]}: pip install '.[data]'"
        ) from error


@contextlib.contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Decompression errors say what is wrong, but not in which file."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("zstandard", "pyarrow"):
            raise
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from error
