"""TOKENS ON DISK: a token store, its format and its documents.

Files of a finished store: manifest.json, the tokenizer, and for each split its tokens, end to end,
and its index, an array of where each document starts and the last one ends, in tokens and bytes.

- The tokens of a split are one memory-mapped file, and its documents are views of it.
- `TokenStore.open` reads the manifest and the indexes, which are small, and checks them. The tokens
  are checked by `verify`, which reads all of them once: at the start of a run or an evaluation.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from melodi.data.shards import SHARD
from melodi.data.tokenizer import Tokenizer, load_tokenizer
from melodi.files import checksum, read_json

FORMAT, VERSION = "melodi-store", 1
MANIFEST, PROGRESS = "manifest.json", "draft.json"
"""A store has the first when it is finished, the second while it is being written."""
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

IntArray = NDArray[np.int64]


class TokenStore:
    """A finished store: `split(name)` gives its documents, `tokenizer` made their tokens."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        """For a manifest that has been checked: use `open`."""
        self.path = path
        self.manifest = manifest
        self.vocab_size: int = manifest["vocab_size"]
        self.dtype = DTYPES[manifest["dtype"]]
        self._indexes = {split: self._read_index(split) for split in SPLITS}
        self._verified: set[str] = set()

    @classmethod
    def open(cls, path: str | Path) -> "TokenStore":
        path = Path(path)
        return cls(path, read_manifest(path))

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        tokenizer = load_tokenizer(self.path)
        if tokenizer.digest() != self.manifest["tokenizer_digest"]:
            raise ValueError(
                f"the tokenizer in {self.path} is not the one that made the store: prepare it again"
            )
        return tokenizer

    def split(self, name: str) -> "Documents":
        split = checked_split(name)
        index = self._indexes[split]
        # An empty file cannot be mapped.
        empty = not index[0, -1]
        path = self.path / f"{split}.tokens"
        tokens = np.empty(0, self.dtype) if empty else np.memmap(path, self.dtype, "r")
        return Documents(np.asarray(tokens), index)

    def verify(self, *splits: str) -> None:
        """Compares the tokens of these splits, or of all, with their checksums, and the tokenizer
        with its digest. Each file is read once, whole, however often this is called."""
        for split in map(checked_split, splits or SPLITS):
            if split not in self._verified:
                self._check_sum(split, "tokens")
                self._verified.add(split)
        _ = self.tokenizer

    def remarks(self) -> list[str]:
        """What was left out or lost when the store was made, one line each."""
        lines = []
        for what in ("skipped", "ignored"):
            if counts := self.manifest.get(what):
                lines.append(f"{what}: {counts_in_words(counts)}")
        if lost := self.manifest.get("repaired"):
            lines.append(
                f"characters lost in {sum(lost.values())} documents ({counts_in_words(lost)}): "
                "what could not be read became U+FFFD; to keep it, convert them to UTF-8 and "
                "prepare again"
            )
        if lines:
            lines.append(f"which ones: {self.path / MANIFEST}")
        return lines

    def _read_index(self, split: Split) -> IntArray:
        """The index of a split, after a look at the size of its tokens."""
        about = self.manifest["splits"][split]
        tokens, index = self.path / f"{split}.tokens", self.path / f"{split}.index"
        for path in (tokens, index):
            if not path.is_file():
                raise ValueError(f"store {self.path} lacks {path.name}: prepare it again")
        expected = about["tokens"] * self.dtype.itemsize
        if tokens.stat().st_size != expected:
            raise ValueError(
                f"{tokens} has {tokens.stat().st_size} bytes, not {expected}: prepare it again"
            )
        self._check_sum(split, "index")
        try:
            with index.open("rb") as file:
                array = np.load(file, allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise ValueError(f"{index} is no index ({error}): prepare it again") from None
        if array.shape != (2, about["documents"] + 1) or array[0, -1] != about["tokens"]:
            raise ValueError(
                f"{index} is not the index of {about['documents']} documents with "
                f"{about['tokens']} tokens that {MANIFEST} tells of: prepare it again"
            )
        return cast(IntArray, array)

    def _check_sum(self, split: Split, kind: str) -> None:
        path = self.path / f"{split}.{kind}"
        if checksum(path) != self.manifest["splits"][split]["checksums"][kind]:
            raise ValueError(f"{path} is damaged: its checksum differs; prepare it again")


class Documents:
    """The documents of a split: `documents[i]` is a view of the file, not a copy."""

    def __init__(self, tokens: NDArray[Any], index: IntArray) -> None:
        """index: where each document starts and the last one ends, in tokens and in bytes."""
        self.tokens = tokens
        self.offsets, byte_offsets = index
        self.lengths: IntArray = np.diff(self.offsets)
        self.num_bytes: IntArray = np.diff(byte_offsets)

    @classmethod
    def in_memory(cls, documents: Sequence[Sequence[int] | NDArray[Any]]) -> "Documents":
        """Documents that come from no file and no text, so they have no bytes."""
        arrays = [np.asarray(document, np.int64) for document in documents]
        ends = np.cumsum([0, *map(len, arrays)])
        tokens = np.concatenate([np.empty(0, np.int64), *arrays])
        return cls(tokens, np.stack([ends, np.zeros_like(ends)]))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> NDArray[Any]:
        if not 0 <= i < len(self):
            raise IndexError(f"document {i} of {len(self)}")
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]


def checked_split(name: str) -> Split:
    if name not in SPLITS:
        raise ValueError(f"split {name!r} is unknown: choose one of {', '.join(SPLITS)}")
    return name


def read_manifest(store: Path) -> dict[str, Any]:
    """The manifest of a finished store, with everything in it that is needed to read the store."""
    path = store / MANIFEST
    if not path.is_file():
        if (store / PROGRESS).is_file():
            raise ValueError(f"store {store} is unfinished: run its melodi prepare again")
        if (store / SHARD).is_file():
            raise ValueError(
                f"store {store} is one shard of a store: join all with melodi prepare --merge"
            )
        raise ValueError(f"{store} is no token store: make one with melodi prepare --out STORE")
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{store} is no token store: its {MANIFEST} is not one of {FORMAT}")
    if manifest.get("version") != VERSION:
        raise ValueError(
            f"store {store} has version {manifest.get('version')} and this melodi reads {VERSION}: "
            "prepare it again"
        )
    if manifest.get("dtype") not in DTYPES:
        raise ValueError(
            f"{path} has dtype={manifest.get('dtype')!r}, not {' or '.join(DTYPES)}: prepare it "
            "again"
        )
    require(path, manifest, {"vocab_size": int, "tokenizer_digest": str, "splits": dict})
    require(path, manifest["splits"], dict.fromkeys(SPLITS, dict))
    for split in SPLITS:
        about = manifest["splits"][split]
        require(path, about, {"documents": int, "tokens": int, "bytes": int, "checksums": dict})
        require(path, about["checksums"], {"tokens": str, "index": str})
    return manifest


def require(path: Path, record: dict[str, Any], types: dict[str, type]) -> None:
    """Refuses a record that lacks one of these keys, or has something else there."""
    for key, kind in types.items():
        if not isinstance(record.get(key), kind):
            raise ValueError(
                f"{path} is damaged: {key}={record.get(key)!r} is no {kind.__name__}; prepare it "
                "again"
            )


def counts_in_words(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))
