"""TOKENS -> DRAFT: one document after the other, each kept or skipped when it ends.

Skipped are binary, empty, duplicate and short documents. Every few seconds the draft notes how far
it is.
"""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from melodi.data.splits import place_of, split_number
from melodi.data.text import Document
from melodi.data.writer import StoreWriter, note

SAVE_SECONDS = 5.0


class Appender:
    """Writes a draft's files from where they are valid, one document after the other."""

    def __init__(self, writer: StoreWriter, dtype: np.dtype[Any]) -> None:
        self.writer, self.progress = writer, writer.progress
        self.dtype = dtype
        self.num_tokens = 0
        """Of the document that is being written."""

    def __enter__(self) -> "Appender":
        folder = self.writer.folder
        self.files = [open_kept(folder / name) for name in StoreWriter.FILES]
        self.tokens, self.table, self.names = self.files
        self._cut_tokens()
        self.table.truncate(self.progress.kept * 8 * len(StoreWriter.COLUMNS))
        self.names.truncate(self.progress.named)
        for file in (self.table, self.names):
            file.seek(0, os.SEEK_END)
        self.digests = set(self.writer.table()[:, 2].tolist())
        self.saved_at = time.monotonic()
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
        self.num_tokens += len(ids)

    def end_document(self, document: Document) -> None:
        progress = self.progress
        reason = self._reason_to_skip(document)
        line = json.dumps([document.name, reason, sorted(document.flaws)]) + "\n"
        progress.named += self.names.write(line.encode())
        if reason:
            note(document.name, reason, progress.skipped, progress.skipped_names)
            self._cut_tokens()
        else:
            self._keep(document)
            for flaw in sorted(document.flaws):
                note(document.name, flaw, progress.repaired, progress.repaired_names)
        progress.read += 1
        if time.monotonic() - self.saved_at >= SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        for file in self.files:
            file.flush()
            os.fsync(file.fileno())
        self.writer.save_progress()
        self.saved_at = time.monotonic()

    def _reason_to_skip(self, document: Document) -> str | None:
        if reason := document.reason_to_skip(self.digests):
            return reason
        if not self.num_tokens:
            return "empty"
        return "short" if self.num_tokens < document.min_tokens else None

    def _keep(self, document: Document) -> None:
        digest, split = document.digest(), split_number(document.split)
        row = [self.num_tokens, document.num_bytes, digest, place_of(document.name), split]
        self.table.write(np.array(row, "<i8").tobytes())
        self.digests.add(digest)
        self.progress.kept += 1
        self.progress.tokens += self.num_tokens
        self.num_tokens = 0

    def _cut_tokens(self) -> None:
        """Takes back the tokens of a document that is not kept."""
        self.tokens.seek(self.progress.tokens * self.dtype.itemsize)
        self.tokens.truncate()
        self.num_tokens = 0


def open_kept(path: Path) -> Any:
    """For writing, with what is in it."""
    path.touch()
    return path.open("r+b")
