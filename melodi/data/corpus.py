"""CORPUS -> DOCUMENTS: text from anywhere.

1. A source is named by the user: a folder or file of text, JSON lines or parquet, a dataset of the
   Hugging Face hub, or nothing at all, which means the standard library of the running Python.
2. A source lists its documents in a fixed order; text.py reads them. Files that it does not read
   are named with the reason.

A folder or dataset with a part named train and one named validation (valid, val, dev) or test comes
with its splits, and the held-out parts are read first: of two equal documents the held-out one is
kept.
"""

import contextlib
import hashlib
import json
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from melodi.data.text import RECORDS, TEXT, Document, extra, file_documents, value_blocks, value_of

PART_NAMES = {
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
    "train": ("train",),
}
"""What the parts of a corpus are called by those who make them, in reading order."""


@dataclass(frozen=True)
class Source:
    description: str
    documents: Callable[..., Iterator[Document]]
    """All of them; of a source of files also those of a slice of the files."""
    fingerprint: str = ""
    """Changes when the source does, as far as can be told without reading it."""
    num_bytes: int | None = None
    """Bytes of text, if that is known beforehand."""
    is_remote: bool = False
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Files that are left out, and why."""
    file_sizes: tuple[int, ...] = ()
    """In bytes, of a source of files."""

    def only(self, files: slice) -> "Source":
        """The same source as far as these files go; its fingerprint stays that of the whole."""
        sizes = self.file_sizes[files]
        return replace(
            self,
            documents=partial(self.documents, files),
            num_bytes=None if self.num_bytes is None else sum(sizes),
            file_sizes=sizes,
        )


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


def open_sources(
    names: str | Path | Sequence[str | Path], text_column: str = "text"
) -> list[Source]:
    """One source per name; the standard library of the running Python if there is no name."""
    names = [names] if isinstance(names, str | Path) else names
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
        if not dataset:
            raise ValueError(f"source {name!r} names no dataset: give hub:NAME[:CONFIG]")
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
    parts = [folder / part for part in splits] or [folder]
    paths = [path for part in parts for path in listed(part, TEXT + RECORDS)]
    taken = set(paths)
    ignored = {
        path.relative_to(folder).as_posix(): "outside the splits"
        if path.name.endswith(TEXT + RECORDS)
        else path.suffix or "without suffix"
        for path in listed(folder)
        if path not in taken
    }
    return files_source(str(folder), folder, paths, text_column, splits, ignored)


def files_source(
    description: str,
    root: Path,
    paths: list[Path],
    text_column: str,
    splits: Mapping[str, str] | None = None,
    ignored: Mapping[str, str] | None = None,
) -> Source:
    """Files that lie under a root: each a document, or many records."""
    if not paths:
        raise ValueError(f"no documents in {description}: none of *{', *'.join(TEXT + RECORDS)}")

    def documents(files: slice = slice(None)) -> Iterator[Document]:
        for path in paths[files]:
            place = path.relative_to(root)
            split = (splits or {}).get(place.parts[0])
            yield from file_documents(path, place.as_posix(), text_column, split)

    sizes = [(path.relative_to(root).as_posix(), path.stat().st_size) for path in paths]
    is_plain = all(path.name.endswith(TEXT) for path in paths)
    return Source(
        description,
        documents,
        hashlib.sha256(json.dumps(sizes).encode()).hexdigest()[:16],
        sum(size for _, size in sizes) if is_plain else None,
        ignored=ignored or {},
        file_sizes=tuple(size for _, size in sizes),
    )


def listed(folder: Path, suffixes: tuple[str, ...] = ("",)) -> list[Path]:
    """Files of these kinds in a folder and below, sorted, hidden ones left out."""
    found = {path.relative_to(folder): path for path in folder.rglob("*")}
    visible = [place for place in found if not any(part.startswith(".") for part in place.parts)]
    wanted = [place for place in visible if place.name.endswith(suffixes)]
    return [found[place] for place in sorted(wanted, key=Path.as_posix) if found[place].is_file()]


def official_splits(names: Iterable[str]) -> dict[str, str]:
    """The split of each part that a source comes with, in reading order, if it comes with splits:
    a lone "test" folder is none."""
    found = set(names)
    splits = {name: split for split, names in PART_NAMES.items() for name in names if name in found}
    return splits if "train" in found and len(splits) > 1 else {}


def hub_source(name: str, dataset: HubDataset, text_column: str) -> Source:
    def documents() -> Iterator[Document]:
        datasets = extra("datasets", name)
        with broken_stream_named(name):
            parts = datasets.load_dataset(
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
        for n, record in enumerate(streamed(parts[part], name)):
            where = f"{name}/{part}:{n}"
            value = value_of(record, text_column, where)
            read = partial(value_blocks, value, where)
            yield Document(where, read, splits.get(part), min_tokens)


def streamed(records: Iterable[Mapping[str, Any]], name: str) -> Iterator[Mapping[str, Any]]:
    with broken_stream_named(name):
        yield from records


@contextlib.contextmanager
def broken_stream_named(name: str) -> Iterator[None]:
    """Whatever a remote source raises is no fault of its text: what was prepared is kept."""
    try:
        yield
    except Exception as error:
        raise OSError(
            f"source {name!r} cannot be read ({' '.join(str(error).split())}): mend that and run "
            "the same command again, it continues"
        ) from error
