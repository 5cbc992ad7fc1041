"""Files of text through a StreamReader: what each token cost, document by document.

A document is a text file, what comes from standard input, or a record of JSON lines or parquet. It
is read in pieces, so that its size does not matter. One document can go on from a memory; several
are read at the same time, each in a row of its own.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from torch import Tensor

from melodi.config.training import Precision
from melodi.data.text import BINARY, INVALID, RECORDS, Document, decoded_blocks, file_documents
from melodi.data.text import text_blocks as blocks_of_file
from melodi.data.tokenizer import Tokenizer
from melodi.evaluation.documents import Evaluation
from melodi.model import LanguageModel
from melodi.stream import StreamReader
from melodi.stream.reader import CHUNK_WINDOWS
from melodi.stream.source import encoded_pieces


@dataclass
class TextRead:
    """What reading a document gave."""

    document: Document
    sums: Evaluation = field(default_factory=Evaluation)
    windows: list[dict[str, float]] = field(default_factory=list)
    """Of a document that was read alone: first token, tokens, predictions and nats of each."""

    def add(self, nats_T: Tensor) -> Evaluation:
        """Counts tokens that were read; what nothing came before is no prediction."""
        expected_T = nats_T[1:] if bool(nats_T[:1].isnan().any()) else nats_T
        new = Evaluation(float(expected_T.double().sum()), len(expected_T), tokens=len(nats_T))
        self.sums += new
        return new

    def record(self) -> dict[str, Any]:
        """The figures; those of a document without predictions are unknown."""
        return {"path": self.document.name, **figures(self.sums)}

    def finish(self) -> None:
        self.sums += Evaluation(documents=1, bytes=self.document.num_bytes)
        if BINARY in self.document.flaws:
            raise ValueError(f"{self.document.name} is binary: give a text")

    @property
    def remark(self) -> str | None:
        if INVALID in self.document.flaws:
            return f"{self.document.name} is not all UTF-8: what is not was read as U+FFFD"
        return None


def figures(sums: Evaluation) -> dict[str, Any]:
    known = sums.predictions > 0
    return {
        "tokens": sums.tokens,
        "bytes": sums.bytes,
        "predictions": sums.predictions,
        "nats": sums.nats,
        "nats_per_token": sums.loss if known else None,
        "perplexity": sums.perplexity if known else None,
        "bits_per_byte": sums.bits_per_byte if known else None,
    }


def documents_in(names: Sequence[str], text_column: str = "text") -> Iterator[Document]:
    """The documents of files, in order; - is standard input."""
    if list(names).count("-") > 1:
        raise ValueError("- is given twice: standard input can be read once")
    for name in names:
        if name != "-" and not Path(name).is_file():
            raise FileNotFoundError(f"{name} is no file: give text files, .jsonl, or -")
    for name in names:
        path = Path(name)
        if name == "-":
            if sys.stdin is None:
                raise ValueError("- is standard input, which is closed: give a file")
            yield Document(name, partial(decoded_blocks, sys.stdin.buffer))
        elif name.endswith(RECORDS):
            yield from file_documents(path, name, text_column, None)
        else:
            yield Document(name, partial(blocks_of_file, path))


def read_one(
    reader: StreamReader, document: Document, progress: Callable[[int], object] | None = None
) -> TextRead:
    """Reads on with a document. `progress` hears of bytes."""
    result = TextRead(document)
    ids = ids_of(document, reader.model.tokenizer, goes_on=reader.tokens_read[0] > 0)
    seen = 0
    for window in reader.read_windows(ids, CHUNK_WINDOWS):
        new = result.add(window.nats_T)
        result.windows.append(
            {
                "first": window.first,
                "tokens": new.tokens,
                "predictions": new.predictions,
                "nats": new.nats,
            }
        )
        if progress is not None:
            progress(document.num_bytes - seen)
        seen = document.num_bytes
    result.finish()
    return result


def read_together(
    model: LanguageModel,
    documents: Iterable[Document],
    rows: int,
    progress: Callable[[int], object] | None = None,
    precision: Precision = "fp32",
) -> Iterator[TextRead]:
    """Reads documents from their beginnings, so many at a time; each ends in the order given."""
    documents = iter(documents)
    while group := [TextRead(document) for document in islice(documents, rows)]:
        sources = [ids_of(one.document, model.tokenizer, goes_on=False) for one in group]
        reader = StreamReader(model, rows=len(group), precision=precision)
        size = CHUNK_WINDOWS * model.config.window
        seen = 0
        while any(chunk := [list(islice(source, size)) for source in sources]):
            for one, nats_T in zip(group, reader.read_batch(chunk), strict=True):
                one.add(nats_T)
            now = sum(one.document.num_bytes for one in group)
            if progress is not None:
                progress(now - seen)
            seen = now
        for one in group:
            one.finish()
            yield one


def ids_of(document: Document, tokenizer: Tokenizer, goes_on: bool) -> Iterator[int]:
    """The ids of a document, which is encoded piece by piece."""
    return chain.from_iterable(encoded_pieces(document.pieces(), tokenizer, goes_on))
