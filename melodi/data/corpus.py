"""CORPUS -> DOCUMENTS -> PIECES: text from anywhere, never more of it in memory than is needed.

1. A source is named by the user: a folder or file of text, JSON lines or parquet, a dataset of the
   Hugging Face hub, or nothing at all, which means the standard library of the running Python.
2. A source lists its documents in a fixed order. A text file is one document, and so is a record.
3. A document is read once, in pieces of at most PIECE characters, cut where a tokenizer would not
   see the difference. Only a single record of JSON lines or parquet is ever held whole.
4. While it is read, a document finds out its digest, its size, and what was wrong with it.

A folder or dataset with parts named train and validation or test comes with its splits, and the
held-out parts are read first: of two equal documents the held-out one is kept.
"""

import codecs
import contextlib
import gzip
import hashlib
import importlib
import io
import json
import platform
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

PIECE = 1 << 18
TEXT = (".txt", ".md", ".tex", ".py")
RECORDS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
READING_ORDER = ("validation", "test", "train")
BINARY, INVALID = "binary", "invalid UTF-8"


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


@dataclass(frozen=True)
class Source:
    description: str
    documents: Callable[[], Iterator[Document]]
    fingerprint: str = ""
    """Changes when the source does, as far as can be told without reading it."""
    num_bytes: int | None = None
    """Bytes of text, if that is known beforehand."""
    is_remote: bool = False


@dataclass(frozen=True)
class HubDataset:
    path: str
    config: str | None = None
    data_files: str | None = None
    min_tokens: int = 0


HUB = {
    "pg19": HubDataset("emozilla/pg19"),
    "arxiv-math": HubDataset(
        "json", data_files="hf://datasets/EleutherAI/proof-pile-2/arxiv/train/*.jsonl.zst"
    ),
    "c4-4k": HubDataset("allenai/c4", "en", min_tokens=4096),
}


def open_sources(names: Sequence[str | Path], text_column: str = "text") -> list[Source]:
    """One source per name; the standard library of the running Python if there is no name."""
    return [open_source(name, text_column) for name in names] or [standard_library()]


def open_source(name: str | Path, text_column: str = "text") -> Source:
    path, name = Path(name), str(name)
    if path.is_dir():
        return folder_source(path, text_column)
    if path.is_file():
        return files_source(name, path.parent, [path], text_column)
    if name in HUB:
        return hub_source(name, HUB[name], text_column)
    if name.startswith("hub:"):
        _, dataset, config = f"{name}:".split(":", 2)
        return hub_source(name, HubDataset(dataset, config.strip(":") or None), text_column)
    raise ValueError(
        f"source {name!r} does not exist: give a file or folder, {', '.join(HUB)}, "
        "or hub:NAME[:CONFIG]"
    )


def standard_library(smallest: int = 16_384) -> Source:
    """The embedded corpus: the long files of the running Python's own source."""
    root = Path(sysconfig.get_path("stdlib"))
    others = {"site-packages", "dist-packages"}
    paths = [path for path in listed(root, (".py",)) if not others & set(path.parts)]
    long_enough = [path for path in paths if path.stat().st_size > smallest]
    # Debian and others split Python into packages, and leave the long tests out.
    if len(long_enough) < 100 and smallest > 4096:
        return standard_library(4096)
    version = platform.python_version()
    about = f"standard library of Python {version}, files over {smallest // 1024} kB"
    return files_source(about, root, long_enough, "text")


def folder_source(folder: Path, text_column: str) -> Source:
    splits = official_splits(path.name for path in folder.iterdir() if path.is_dir())
    parts = [folder / split for split in splits] or [folder]
    paths = [path for part in parts for path in listed(part, TEXT + RECORDS)]
    return files_source(str(folder), folder, paths, text_column, has_splits=bool(splits))


def files_source(
    description: str, root: Path, paths: list[Path], text_column: str, has_splits: bool = False
) -> Source:
    """Files that lie under a root: each a document, or many records."""
    if not paths:
        raise ValueError(f"no documents in {description}: none of *{', *'.join(TEXT + RECORDS)}")

    def documents() -> Iterator[Document]:
        for path in paths:
            place = path.relative_to(root)
            split = place.parts[0] if has_splits else None
            yield from file_documents(path, place.as_posix(), text_column, split)

    sizes = [(path.relative_to(root).as_posix(), path.stat().st_size) for path in paths]
    is_plain = all(path.name.endswith(TEXT) for path in paths)
    return Source(
        description,
        documents,
        hashlib.sha256(json.dumps(sizes).encode()).hexdigest()[:16],
        sum(size for _, size in sizes) if is_plain else None,
    )


def listed(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Files of these kinds in a folder and below, sorted, hidden ones left out."""
    found = {path.relative_to(folder): path for path in folder.rglob("*")}
    visible = [place for place in found if not any(part.startswith(".") for part in place.parts)]
    wanted = [place for place in visible if place.name.endswith(suffixes)]
    return [found[place] for place in sorted(wanted, key=Path.as_posix) if found[place].is_file()]


def official_splits(names: Iterable[str]) -> list[str]:
    """The splits that a source comes with, in reading order; a lone "test" folder is no split."""
    found = set(names)
    splits = [split for split in READING_ORDER if split in found]
    return splits if "train" in found and len(splits) > 1 else []


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
            where = f"{path} line {n + 1}"
            yield Document(f"{name}:{n}", partial(json_blocks, line, text_column, where), split)
    else:
        raise ValueError(f"file {path} is of no known kind: give *{', *'.join(TEXT + RECORDS)}")


def text_blocks(path: Path, flaws: set[str]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
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
                .ZstdDecompressor()
                .stream_reader(file, read_across_frames=True)
            )
            file = stack.enter_context(io.BufferedReader(reader, 1 << 20))
        yield from file


def json_blocks(line: bytes, text_column: str, where: str, flaws: set[str]) -> Iterator[str]:
    if not line.strip():
        return
    try:
        text = line.decode()
    except UnicodeDecodeError:
        flaws.add(INVALID)
        text = line.decode(errors="replace")
    try:
        record = json.loads(text)
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


def hub_source(name: str, dataset: HubDataset, text_column: str) -> Source:
    def documents() -> Iterator[Document]:
        parts = extra("datasets", name).load_dataset(
            dataset.path, dataset.config, data_files=dataset.data_files, streaming=True
        )
        yield from hub_documents(parts, name, text_column, dataset.min_tokens)

    return Source(name, documents, is_remote=True)


def hub_documents(
    parts: Mapping[str, Iterable[Mapping[str, Any]]], name: str, text_column: str, min_tokens: int
) -> Iterator[Document]:
    """The documents of what `load_dataset` returns: its parts by name, each a stream of records."""
    splits = official_splits(parts)
    for part in splits or sorted(parts):
        for n, record in enumerate(parts[part]):
            where = f"{name}/{part}:{n}"
            value = value_of(record, text_column, where)
            split = part if splits else None
            yield Document(where, partial(value_blocks, value, where), split, min_tokens)


def value_of(record: Any, text_column: str, where: str) -> Any:
    if not isinstance(record, Mapping):
        raise ValueError(f"{where} is a {type(record).__name__}: each record must be an object")
    if text_column not in record:
        raise ValueError(
            f"{where} has no column {text_column!r}: choose --text-column from {', '.join(record)}"
        )
    return record[text_column]


def cut(blocks: Iterable[str]) -> Iterator[str]:
    """The same text in pieces that do not depend on how it came in blocks."""
    rest = ""
    for block in blocks:
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
            f"{needed_by} needs {module.partition('.')[0]}: pip install 'melodi-lm[data]'"
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
